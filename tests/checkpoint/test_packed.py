"""Files of a packed directory: layout, mapping, journal, and the refusal of altered files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ktransformers.checkpoint.journal import JOURNAL_FILE, ConversionJournal
from ktransformers.checkpoint.mapped import map_file
from ktransformers.checkpoint.packed import (
    Manifest,
    PackedLayer,
    ShardRecord,
    SourceRecord,
    content_hash,
    manifest_document,
    read_manifest,
)
from ktransformers.checkpoint.rest import copy_small_files, split_into_shards
from ktransformers.checkpoint.sources import PlainTensor
from ktransformers.checkpoint.tensorfile import PAGE_BYTES, FileLayout, TensorFile, plan_layout, read_layout, sha256
from ktransformers.ground.errors import InputError

TENSORS = {
    "experts.gate_up_proj": torch.arange(5000, dtype=torch.int64).to(torch.uint8),
    "experts.down_proj": torch.arange(4096, dtype=torch.int64).to(torch.uint8),
    "experts.down_proj_bias": torch.arange(12, dtype=torch.float32).reshape(3, 4),
}
SPELLED = {torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16"}


def layout_of(tensors: dict[str, torch.Tensor]) -> FileLayout:
    entries = [(name, SPELLED[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
    return plan_layout(entries, {"format": "kt", "conversion": "7"}, padding="experts.padding")


def write(path: Path) -> FileLayout:
    layout = layout_of(TENSORS)
    file = TensorFile(path, layout)
    for name, tensor in reversed(TENSORS.items()):
        half = tensor.numel() // 2
        flat = tensor.reshape(-1)
        file.write(name, flat[half:].contiguous(), half * tensor.element_size())
        file.write(name, flat[:half].contiguous())
    file.finish()
    return layout


def test_tensor_file_is_safetensors_with_page_aligned_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    layout = write(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]
    assert path.stat().st_size == layout.size
    assert all(layout.slots[name].offset % PAGE_BYTES == 0 for name in TENSORS)
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"format": "kt", "conversion": "7"}
        for name, tensor in TENSORS.items():
            assert torch.equal(opened.get_tensor(name), tensor)
        assert {name for name in opened.keys() if name not in TENSORS} == {"experts.padding.1"}  # noqa: SIM118
    assert read_layout(path) == layout
    mapped = map_file(path, "prefault")
    for name, tensor in TENSORS.items():
        slot = layout.slots[name]
        actual = mapped[slot.offset : slot.offset + slot.bytes].view(tensor.dtype).view(tensor.shape)
        assert torch.equal(actual, tensor)


def test_tensor_file_is_renamed_when_complete(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "a.safetensors", layout_of(TENSORS))
    file.write("experts.down_proj", TENSORS["experts.down_proj"])
    assert [entry.name for entry in tmp_path.iterdir()] == [".a.safetensors.partial"]
    with pytest.raises(ValueError, match="4096 bytes at 1, and it has 4096"):
        file.write("experts.down_proj", TENSORS["experts.down_proj"], 1)
    file.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], "bytes where its header says"),
        (lambda data: data + b"x", "bytes where its header says"),
        (lambda data: data[:5], "too few for its header"),
        (lambda data: b"\xff" * 8 + data[8:], "too few for its header"),
        (lambda data: data[:8] + b"[" + data[9:], "expected a whole safetensors file"),
    ],
)
def test_damaged_files_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=message):
        read_layout(path)


def test_unknown_page_modes_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a")
    with pytest.raises(InputError, match="pages: given 'soon', expected one of lazy, prefault, lock"):
        map_file(tmp_path / "a", "soon")


def test_mapped_memory_outlives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(range(256)) * 64)
    tensor = map_file(path)
    part = tensor[256:512]
    path.unlink()
    del tensor
    assert part.tolist() == list(range(256))


def manifest(**changes: Any) -> Manifest:
    layer = PackedLayer(
        module="model.language_model.layers.3.mlp.experts",
        file="packed-00003.safetensors",
        experts=2,
        hidden=64,
        intermediate=32,
        gated=True,
        biased=False,
        formats={"gate": "int4:32", "up": "int4:32", "down": "int8"},
        tensors={"gate_up": "a", "down": "b"},
        bytes={"gate_up": 1, "down": 2},
        layout={},
    )
    words: dict[str, Any] = {
        "version": 1,
        "layout": 2,
        "conversion": "7",
        "made_by": "a test",
        "formats": {"gate": "int4:32"},
        "source": SourceRecord(name="source", files=[]),
        "layers": [layer],
        "shards": {"packed-00003.safetensors": ShardRecord(bytes=1, header_sha256="a", sha256="b")},
    }
    return Manifest(**words | changes)


def save_manifest(directory: Path, words: dict[str, Any]) -> None:
    (directory / "kt_packed.json").write_text(json.dumps(words))
    packed = {"manifest": "kt_packed.json", "sha256": words.get("sha256")}
    config = {"quantization_config": {"quant_method": "kt", "packed": packed}}
    (directory / "config.json").write_text(json.dumps(config))


def test_manifest_round_trip(tmp_path: Path) -> None:
    save_manifest(tmp_path, manifest_document(manifest()))
    actual = read_manifest(tmp_path)
    assert actual == manifest()
    # A text model out of the files of the vision model around it has another name for the same layer.
    assert actual.locate("model.layers.3.mlp.experts") is actual.layers[0]
    with pytest.raises(InputError, match=r"model\.layers\.4\.mlp\.experts: given no expert tensors"):
        actual.locate("model.layers.4.mlp.experts")


def test_altered_manifests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"given no kt_packed\.json, expected a packed directory; run kt quant again"):
        read_manifest(tmp_path)
    words = manifest_document(manifest())
    altered = json.loads(json.dumps(words))
    altered["layers"][0]["experts"] = 3
    save_manifest(tmp_path, altered)
    with pytest.raises(InputError, match="it was altered"):
        read_manifest(tmp_path)
    newer = {key: value for key, value in words.items() if key != "sha256"} | {"version": 2}
    save_manifest(tmp_path, newer | {"sha256": content_hash(newer)})
    with pytest.raises(InputError, match="a manifest of version 2, expected version 1; run kt quant again"):
        read_manifest(tmp_path)
    more = {key: value for key, value in words.items() if key != "sha256"} | {"colour": "blue"}
    save_manifest(tmp_path, more | {"sha256": content_hash(more)})
    with pytest.raises(InputError, match="colour: Extra inputs are not permitted"):
        read_manifest(tmp_path)
    save_manifest(tmp_path, words)
    altered = manifest_document(manifest(conversion="8"))
    (tmp_path / "kt_packed.json").write_text(json.dumps(altered))
    with pytest.raises(InputError, match="the directory has files of two conversions"):
        read_manifest(tmp_path)
    (tmp_path / "kt_packed.json").write_text("{")
    with pytest.raises(InputError, match="expected the manifest of a packed directory"):
        read_manifest(tmp_path)


def enter(journal: ConversionJournal, name: str, data: bytes = b"data") -> None:
    file = journal.directory / name
    file.write_bytes(data)
    journal.record(name, ShardRecord(bytes=len(data), header_sha256="-", sha256=sha256(file)), {"of": name})


def test_journal_resumes_after_an_interruption(tmp_path: Path) -> None:
    plan = {"conversion": "one", "formats": {"down": "int8"}}
    journal = ConversionJournal(tmp_path / "out", plan)
    enter(journal, "a")
    enter(journal, "b")
    with pytest.raises(InputError, match="a conversion that is running"):
        ConversionJournal(tmp_path / "out", plan)
    journal.close()
    text = (journal.directory / JOURNAL_FILE).read_text()
    (journal.directory / JOURNAL_FILE).write_text(text + '{"file": "c", "rec')  # a kill in the middle of a line
    (journal.directory / ".c.partial").write_bytes(b"half")
    (journal.directory / "b").write_bytes(b"dota")
    resumed = ConversionJournal(tmp_path / "out", plan | {"conversion": "two"})
    assert resumed.plan["conversion"] == "one"
    assert set(resumed.shards) == {"a", "b"}
    assert resumed.drop_damaged() == ["b"]
    assert set(resumed.shards) == {"a"} and resumed.details == {"a": {"of": "a"}}
    assert not (resumed.directory / ".c.partial").exists()
    enter(resumed, "b", b"data again")
    assert not (tmp_path / "out").exists()
    resumed.publish()
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == ["a", "b"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_journal_refuses_another_plan(tmp_path: Path) -> None:
    ConversionJournal(tmp_path / "out", {"conversion": "one", "formats": {"down": "int8"}}).close()
    with pytest.raises(
        InputError, match=r'begun differently \(formats \{"down": "int8"\}, now \{"down": "int4:32"\}\)'
    ):
        ConversionJournal(tmp_path / "out", {"conversion": "two", "formats": {"down": "int4:32"}})
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "photo.jpg").write_bytes(b"")
    with pytest.raises(InputError, match=r"given photo\.jpg and no journal"):
        ConversionJournal(tmp_path / "other", {})


def test_shards_depend_on_names_and_sizes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktransformers.checkpoint.rest.SHARD_BYTES", 100)
    values = {
        "a": torch.randn(5, 3).bfloat16(),
        "b": torch.randn(9),
        "c": torch.randn(40),
        "d": torch.tensor([True, False, True]),
    }

    def reader(name: str) -> PlainTensor:
        return PlainTensor(name, values[name].dtype, tuple(values[name].shape), lambda: values[name])

    shards = split_into_shards(map(reader, values), {"format": "pt"})
    assert [(shard.file, [tensor.name for tensor in shard.tensors]) for shard in shards] == [
        ("model-00001-of-00003.safetensors", ["b", "a"]),  # wide dtypes first, so that none is misaligned
        ("model-00002-of-00003.safetensors", ["c"]),
        ("model-00003-of-00003.safetensors", ["d"]),
    ]
    done: list[int] = []
    for shard in shards:
        shard.write(tmp_path, done.append)
        with safe_open(tmp_path / shard.file, framework="pt") as opened:
            for tensor in shard.tensors:
                assert torch.equal(opened.get_tensor(tensor.name), values[tensor.name])
    assert sum(done) == sum(value.nbytes for value in values.values())
    wrong = split_into_shards([PlainTensor("a", torch.float32, (2,), lambda: torch.zeros(3))], {})
    with pytest.raises(InputError, match=r"a: given .* of shape \[3\], expected .* of shape \[2\]"):
        wrong[0].write(tmp_path / ".", done.append)


def test_small_files_are_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for directory in (source, target, source / "additional_chat_templates", source / "onnx"):
        directory.mkdir()
    for name in (
        "tokenizer.json",
        "LICENSE",
        "config.json",
        "model.safetensors",
        "pytorch_model.bin",
        ".gitattributes",
    ):
        (source / name).write_text(name)
    (source / "model.safetensors.index.json").write_text("{}")
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ x }}")
    assert copy_small_files(source, target) == ["LICENSE", "additional_chat_templates", "tokenizer.json"]
    assert (target / "additional_chat_templates" / "tool.jinja").read_text() == "{{ x }}"
