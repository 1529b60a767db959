"""`kt quant --layout kt-kernel`: files that equal kt-kernel's own bit for bit, read back by our reader; interrupted and
resumed; what cannot be written is refused, what was damaged is noticed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from ktransformers.checkpoint import ExpertShape, decode
from ktransformers.checkpoint.kt_files import (
    MANIFEST_FILE,
    check_tree,
    merged_name,
    plain_name,
    read_kt_manifest,
    validate_int8_tree,
)
from ktransformers.checkpoint.sources import open_source
from ktransformers.checkpoint.verify import verify
from ktransformers.cli.main import app
from ktransformers.ground.errors import InputError
from ktransformers.nn import load_model
from ktransformers.quant import kt_convert
from ktransformers.quant.kt_convert import KTConverted, convert_kt, estimate_kt, plan_kt
from ktransformers.quant.kt_layers import write_tree_layer
from ktransformers.quant.origin import Origin
from tests.support.expert_sources import numbers
from tests.support.kt_reference import reference_files, reference_rows, reference_tensors
from tests.support.packing import as_fp8, contents, tiny
from tests.support.releases import write_gguf
from tests.support.tiny_models import logits

ROOT = Path(__file__).resolve().parents[2]
SIZES: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 768, "num_experts": 2}
SHAPE = ExpertShape(2, 128, 768)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("kt") / "model", **SIZES)


def write(source: Path, out: Path, bits: int, parts: int, **options: Any) -> KTConverted:
    more = {key: options.pop(key) for key in ("layers", "resume_layer", "progress") if key in options}
    plan = plan_kt(Origin(source, options.pop("experts", None)), bits, parts, threads=2, **options)
    return convert_kt(plan, out, **more)


def matrices(source: Path, layers: int = 2) -> dict[tuple[int, int, str], Tensor]:
    """(layer, expert, role) -> bf16, of a checkpoint with separate experts."""
    tensors = load_file(source / "model.safetensors")
    return {
        (layer, expert, role): tensors[f"model.layers.{layer}.mlp.experts.{expert}.{role}_proj.weight"].bfloat16()
        for layer in range(layers)
        for expert in range(2)
        for role in ("gate", "up", "down")
    }


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("bits", [8, 4])
def test_merged_shards_have_the_reference_bytes(bits: int, parts: int, source: Path, tmp_path: Path) -> None:
    done = write(source, tmp_path / "out", bits, parts)
    assert done.whole and done.directory == tmp_path / "out" and not done.kept_layers
    assert sorted(file.name for file in done.directory.glob("model*")) == [
        *(f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    for layer in range(2):
        stored = load_file(done.directory / f"model-{layer + 1:05}-of-00003.safetensors")
        want: dict[str, Tensor] = {}
        for (number, expert, role), matrix in matrices(source).items():
            if number == layer:
                want |= reference_tensors(matrix, layer, expert, role, bits, parts)
        assert stored.keys() == want.keys()
        for name, tensor in want.items():
            assert stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor), name
    index = json.loads((done.directory / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 0}
    assert index["weight_map"]["blk.0.ffn_down_exps.1.numa.0.scale"] == "model-00001-of-00003.safetensors"
    rest = load_file(done.directory / "model-00003-of-00003.safetensors")
    assert "blk.1.self_attn.q_proj.weight" in rest and "embed_tokens.weight" in rest and "lm_head.weight" in rest
    assert (done.directory / "config.json").read_bytes() == (source / "config.json").read_bytes()
    with safe_open(done.directory / "model-00001-of-00003.safetensors", "pt") as shard:
        recorded = shard.metadata()
    assert recorded["kt_method"] == f"AMXINT{bits}" and recorded["kt_threadpool_count"] == str(parts)
    assert verify(done.directory).whole


@pytest.mark.parametrize(("bits", "parts"), [(8, 2), (4, 1), (4, 3)])
def test_tree_has_the_reference_files(bits: int, parts: int, source: Path, tmp_path: Path) -> None:
    done = write(source, tmp_path / "out", bits, parts, merged=False, backward=True)
    want: dict[str, bytes] = {}
    for (layer, expert, role), matrix in matrices(source).items():
        want |= reference_files(matrix, layer, expert, role, bits, parts, backward=True)
    files = {path.relative_to(done.directory).as_posix(): path for path in done.directory.rglob("*") if path.is_file()}
    assert files.keys() == want.keys() | {MANIFEST_FILE}
    assert [name for name, data in want.items() if files[name].read_bytes() != data] == []
    report = verify(done.directory)
    assert report.whole and report.hashed == len(want) and report.unknown == 0


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize(("bits", "parts"), [(8, 1), (8, 2), (4, 1), (4, 3)])
def test_written_files_are_read_back(bits: int, parts: int, merged: bool, source: Path, tmp_path: Path) -> None:
    done = write(source, tmp_path / "out", bits, parts, merged=merged, backward=merged)
    opened = open_source(done.directory)
    plain = matrices(source)
    for layer in range(2):
        got = numbers(opened.layer(f"model.layers.{layer}.mlp.experts", SHAPE))
        for role, values in got.items():
            width = 768 // parts if role == "down" else None
            for expert in range(2):
                pieces = plain[layer, expert, role].split(width, 1) if width else [plain[layer, expert, role]]
                coded = [reference_rows(piece, bits) for piece in pieces]
                want = [codes.float() * (1 if bits == 8 else 16) * scales[:, None] for codes, scales in coded]
                assert torch.equal(values[expert], torch.cat(want, 1)), (layer, role, expert)
    names = {tensor.name for tensor in opened.rest()}
    assert names == (
        {name for name in load_file(source / "model.safetensors") if ".experts." not in name} if merged else set()
    )


def test_result_is_a_model(source: Path, tmp_path: Path) -> None:
    merged = write(source, tmp_path / "merged", 4, 2).directory
    tree = write(source, tmp_path / "tree", 4, 2, merged=False).directory
    one = load_model(merged, dtype=torch.float32)
    other = load_model(source, experts=tree, dtype=torch.float32)
    assert torch.equal(logits(one), logits(other))
    want = logits(load_model(source, dtype=torch.float32))
    assert 0.01 < (logits(one) - want).norm() / want.norm() < 0.6


def test_fp8_is_decoded_to_bf16_first(tmp_path: Path) -> None:
    """As kt-kernel's converter does it."""
    fp8 = as_fp8(tiny(tmp_path / "fp8", num_hidden_layers=1, **SIZES))
    done = write(fp8, tmp_path / "fp8-int8", 8, 1)
    stored = load_file(done.directory / "model-00001-of-00002.safetensors")
    chunk = next(iter(open_source(fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}).layer(
        "model.layers.0.mlp.experts", SHAPE).chunks()))  # fmt: skip
    for role, matrix in chunk.tensors.items():
        for name, tensor in reference_tensors(decode(matrix)[0].bfloat16(), 0, 0, role, 8, 1).items():  # type: ignore[arg-type]
            assert torch.equal(stored[name], tensor), name
    assert "quantization_config" not in json.loads((done.directory / "config.json").read_text())
    assert torch.isfinite(logits(load_model(done.directory, dtype=torch.float32))).all()


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])  # fused: [E, H, 2I] and [E, 2I, H]
def test_fused_experts_inside_a_larger_model(family: str, tmp_path: Path) -> None:
    """Fused experts are told by their shapes, and names of a text model inside a larger one come back."""
    nested = tiny(tmp_path / "nested", family, **SIZES)
    done = write(nested, tmp_path / "out", 8, 2)
    names = {tensor.name for tensor in open_source(done.directory).rest()}
    assert names == {tensor.name for tensor in open_source(nested).rest()}
    assert any(name.startswith("model.language_model.layers.") for name in names) == (family == "qwen3_vl_moe")
    stored = load_file(done.directory / "model-00002-of-00003.safetensors")
    want = numbers_of_model(load_model(nested, dtype=torch.float32))
    for index, (expert, role) in enumerate((expert, role) for role in ("gate", "up", "down") for expert in range(2)):
        for name, tensor in reference_tensors(want[6 + index].bfloat16(), 1, expert, role, 8, 2).items():
            assert torch.equal(stored[name], tensor), name
    got = numbers_of_model(load_model(done.directory, dtype=torch.float32))
    assert len(want) == 12
    assert all(0 < (actual - value).norm() / value.norm() < 0.015 for actual, value in zip(got, want, strict=True))


def test_experts_of_a_gguf_file(source: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    tensors: dict[str, tuple[Any, str]] = {}
    decoded: dict[tuple[int, str], Tensor] = {}
    for layer in range(2):
        for seed, (role, size) in enumerate((("gate", (2, 768, 128)), ("up", (2, 768, 128)), ("down", (2, 128, 768)))):
            plain = torch.randn(size, generator=torch.Generator().manual_seed(9 * layer + seed)).numpy()
            data = gguf.quants.quantize(plain, gguf.GGMLQuantizationType.Q8_0)
            tensors[f"blk.{layer}.ffn_{role}_exps.weight"] = (data, "Q8_0")
            decoded[layer, role] = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q8_0))
    write_gguf(tmp_path / "experts.gguf", "qwen3moe", {}, tensors)
    done = write(source, tmp_path / "out", 4, 2, experts=tmp_path / "experts.gguf")
    for (layer, role), matrices_of_layer in decoded.items():
        stored = load_file(done.directory / f"model-{layer + 1:05}-of-00003.safetensors")
        for expert in range(2):
            want = reference_tensors(matrices_of_layer[expert].bfloat16(), layer, expert, role, 4, 2)
            assert all(torch.equal(stored[name], tensor) for name, tensor in want.items())


def numbers_of_model(model: Any) -> list[Tensor]:
    stores = [module.kt.store for module in model.modules() if hasattr(module, "kt")]
    roles = ("gate", "up", "down")
    return [store.decode(role, expert).float() for store in stores for role in roles for expert in range(2)]


def test_layer_from_tensors(source: Path, tmp_path: Path) -> None:
    plain = matrices(source)
    experts = {
        role: torch.stack([plain[1, expert, role] for expert in range(2)]).float() for role in ("gate", "up", "down")
    }
    for _ in range(2):  # the second call replaces the first one's
        files = write_tree_layer(tmp_path, 5, experts, 8, 2, backward=True)
    want: dict[str, bytes] = {}
    for (layer, expert, role), matrix in plain.items():
        if layer == 1:
            want |= reference_files(matrix, 5, expert, role, 8, 2, backward=True)
    assert {file.path for file in files} == want.keys()
    assert all((tmp_path / name).read_bytes() == data for name, data in want.items())
    with pytest.raises(InputError, match=r"down: given shape \[2, 768, 128\], expected \[2, 128, 768\]"):
        write_tree_layer(tmp_path, 5, experts | {"down": experts["gate"]}, 8, 2)
    with pytest.raises(InputError, match="layer 5: given gate of 768 x 128 in 5 NUMA parts"):
        write_tree_layer(tmp_path, 5, experts, 8, 5)


def test_codes_of_a_tree_are_kept(source: Path, tmp_path: Path) -> None:
    """A tree for one NUMA node becomes files for another number of them without being quantised again."""
    tree = write(source, tmp_path / "tree", 4, 1, merged=False).directory
    again = write(source, tmp_path / "again", 4, 3, experts=tree).directory
    for layer in range(2):
        module = f"model.layers.{layer}.mlp.experts"
        one, other = (numbers(open_source(path).layer(module, SHAPE)) for path in (tree, again))
        assert all(torch.equal(one[role], other[role]) for role in one)


@pytest.mark.parametrize("merged", [True, False])
def test_interrupted_conversion_resumes(
    merged: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write(source, tmp_path / "whole", 8, 2, merged=merged).directory
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    real = kt_convert.store_matrix

    def fail(weight: Any, role: str, expert: int, *rest: Any) -> None:
        if rest[-1] == "model.layers.1.mlp.experts.1.down":
            raise RuntimeError("the power went out")
        real(weight, role, expert, *rest)

    monkeypatch.setattr(kt_convert, "store_matrix", fail)
    with pytest.raises(RuntimeError, match="the power went out"):
        write(source, out, 8, 2, merged=merged)
    monkeypatch.undo()
    assert not out.exists() and partial.exists()
    with pytest.raises(InputError, match=r"begun differently \(threadpool_count 2, now 1\)"):
        write(source, out, 8, 1, merged=merged)
    with pytest.raises(InputError, match=r"resume-layer: given 2, and layer 1 is not in"):
        write(source, out, 8, 2, merged=merged, resume_layer=2)
    seen: list[str] = []
    done = write(source, out, 8, 2, merged=merged, resume_layer=1, progress=lambda _, __, word: seen.append(word))
    assert done.whole and done.kept_layers == 1 and set(done.layer_seconds) == {1} and not partial.exists()
    assert "model.layers.0.mlp.experts" not in seen
    if merged:
        got, want = contents(out), contents(whole)
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    else:
        files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
        assert all((out / file).read_bytes() == (whole / file).read_bytes() for file in files)
        assert len(files) == sum(path.is_file() for path in out.rglob("*"))


@pytest.mark.parametrize("merged", [True, False])
def test_damaged_layer_is_written_again(merged: bool, source: Path, tmp_path: Path) -> None:
    done = write(source, tmp_path / "out", 4, 1, merged=merged, layers={0})
    assert not done.whole and done.directory == tmp_path / "out.partial"
    name = "model-00001-of-00003.safetensors" if merged else "_layer_0"
    file = done.directory / name
    file = file if merged else next(file.rglob("*quant_.kt"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    again = write(source, tmp_path / "out", 4, 1, merged=merged)
    assert again.whole and again.redone == [name] and again.kept_layers == 0
    assert open_source(again.directory).layer("model.layers.0.mlp.experts", SHAPE)


def test_biases_and_other_gates_are_kept(tmp_path: Path) -> None:
    """gpt-oss: clamped gates, biases, fused and transposed matrices."""
    model = tiny(tmp_path / "oss", "gpt_oss", hidden_size=128, intermediate_size=128)
    plan = plan_kt(Origin(model), 8, 1, threads=2)
    assert plan.origin.notes[-1].startswith("swiglu_oai gates with limit 7 and biases: ktransformers computes them")
    done = convert_kt(plan, tmp_path / "out")
    shape = plan.origin.layers[0].contract.shape
    module = plan.origin.layers[0].module
    chunks, opened = list(open_source(done.directory).layer(module, shape).chunks()), open_source(model)
    for expert, matrices in plan.origin.layers[0].experts():
        for role in ("gate_bias", "up_bias", "down_bias"):
            assert torch.equal(chunks[expert].tensors[role], matrices[role][0].float())
    assert {tensor.name for tensor in open_source(done.directory).rest()} == {tensor.name for tensor in opened.rest()}
    expected, found = (
        logits(load_model(model, dtype=torch.float32)),
        logits(load_model(done.directory, dtype=torch.float32)),
    )
    assert float((found - expected).norm() / expected.norm()) < 0.03
    with pytest.raises(InputError, match="biases in"):
        open_source(done.directory).layer(module, replace(shape, biased=False))


def test_impossible_conversions_are_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory, bits, parts, message in (
        (tiny(tmp_path / "small"), 4, 1, r"gate of 64 x 64 in 1 NUMA parts, expected .* 128 columns for INT4"),
        (source, 8, 0, "threadpool-count: given 0"),
        (source, 8, 5, "gate of 768 x 128 in 5 NUMA parts"),
    ):
        with pytest.raises(InputError, match=message):
            write(directory, tmp_path / "out", bits, parts)
    with pytest.raises(InputError, match=r"given biases, and a tree of \.kt files"):
        write(tiny(tmp_path / "oss", "gpt_oss"), tmp_path / "out", 8, 1, merged=False)
    with pytest.raises(InputError, match=r"layers: given 7, expected layers with experts, 0 to 1"):
        write(source, tmp_path / "out", 8, 1, layers={7})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InputError, match="something that exists"):
        write(source, tmp_path / "full", 8, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(InputError, match=r"0\.0 GB free on its disk"):
        write(source, tmp_path / "out", 8, 1)
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    broken = tiny(tmp_path / "broken", num_hidden_layers=1, **SIZES)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.mlp.experts.1.up_proj.weight"][5, 5] = float("inf")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"experts\.1\.up_proj\.weight: given NaN or infinite numbers"):
        write(broken, tmp_path / "out", 8, 1)
    assert not (tmp_path / "out").exists()


def rewrite(file: Path, changes: dict[str, str]) -> None:
    """A shard with other metadata."""
    with safe_open(file, "pt") as shard:
        metadata = shard.metadata()
    save_file(load_file(file), file, metadata=metadata | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kt_threadpool_count": "2"}, r"threadpool_count: given 2 recorded, expected 1 for model\.layers\.0"),
        ({"kt_hidden_size": "256"}, r"hidden_size: given 256 recorded, expected 128"),
        ({"kt_expert_num": "x"}, r"kt_expert_num: given 'x', expected a number"),
        ({"kt_version": "2"}, r"kt_version 2, expected 1; read it with"),
        ({"kt_layout": "rows"}, r"given AMXINT8 in rows, expected AMXINT8 in kt-int8"),
        ({"kt_method": "AMXINT4", "kt_layout": "kt-int4-n32-k128-v1"}, r"given INT8, expected INT4, as recorded"),
    ],
)
def test_files_are_held_to_their_header(changes: dict[str, str], message: str, source: Path, tmp_path: Path) -> None:
    done = write(source, tmp_path / "out", 8, 1)
    for number in (1, 2):
        rewrite(done.directory / f"model-{number:05}-of-00003.safetensors", changes)
    with pytest.raises(InputError, match=message):
        open_source(done.directory).layer("model.layers.0.mlp.experts", SHAPE)


def test_shards_of_two_conversions_are_refused(source: Path, tmp_path: Path) -> None:
    one, other = (write(source, tmp_path / name, 8, 1).directory for name in ("one", "other"))
    shutil.copy(one / "model-00001-of-00003.safetensors", other)
    with pytest.raises(InputError, match="expected shards of one conversion"):
        open_source(other)


def test_tree_is_held_to_its_manifest(source: Path, tmp_path: Path) -> None:
    root = write(source, tmp_path / "out", 8, 2, merged=False).directory
    manifest = read_kt_manifest(root)
    assert manifest is not None
    document = json.loads((root / MANIFEST_FILE).read_text())
    assert {key: value for key, value in document.items() if key != "layers"} == {
        "schema_version": 2,
        "state": "ready",
        "expert_weight_format": "int8",
        "layout": "kt-int8-n32-k64-vnni-v1",
        "threadpool_count": 2,
        "expert_num": 2,
        "hidden_size": 128,
        "intermediate_size": 768,
        "bytes": sum(file.stat().st_size for file in root.rglob("*.kt")),
    }
    assert [(layer["index"], layer["numa_count"], layer["state"]) for layer in document["layers"]] == [
        (0, 2, "ready"),
        (1, 2, "ready"),
    ]
    wanted: dict[str, Any] = {"layer_indices": [0, 1], "numa_count": 2, "expert_num": 2, "hidden_size": 128}
    wanted |= {"intermediate_size": 768, "verify_hashes": True}
    assert validate_int8_tree(root, **wanted) == manifest
    for changes, message in (
        ({"numa_count": 1}, "threadpool_count: given 2, expected 1"),
        ({"expert_num": 4}, "expert_num: given 2, expected 4"),
        ({"layer_indices": [0]}, r"layers: given \[0, 1\], expected \[0\]"),
    ):
        with pytest.raises(InputError, match=message):
            validate_int8_tree(root, **wanted | changes)
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(InputError, match="a directory that is not a link"):
        validate_int8_tree(tmp_path / "link", **wanted)

    file = next(root.glob("_layer_1/_numa_1/INT8_up_1_*_quant_.kt"))
    intact = file.read_bytes()
    file.write_bytes(bytes([intact[0] ^ 1]) + intact[1:])
    check_tree(root, manifest)
    with pytest.raises(InputError, match="do not fit their SHA-256"):
        validate_int8_tree(root, **wanted)
    assert not verify(root).whole
    for damage, message in (
        (lambda: file.write_bytes(intact[:-5]), f"{len(intact) - 5} bytes, expected a file of {len(intact)} bytes"),
        (file.unlink, "no such file"),
    ):
        damage()
        with pytest.raises(InputError, match=message):
            open_source(root)
    file.write_bytes(intact)
    extra = file.with_name("INT8_up_2_64Byte_scale_.kt")
    extra.write_bytes(bytes(64))
    with pytest.raises(InputError, match="a file that the manifest does not list"):
        open_source(root)
    extra.unlink()
    with pytest.raises(InputError, match="intermediate_size: given 768 recorded"):
        open_source(root).layer("model.layers.0.mlp.experts", ExpertShape(2, 128, 1536))
    for changes, message in (
        ({"state": "writing"}, "state: given 'writing', expected 'ready'"),
        ({"layout": "rows"}, "layout: given rows, expected kt-int8-n32-k64-vnni-v1"),
        ({"expert_num": 10**9}, "24 files, expected 12000000000 by its shapes"),
        ({"hidden_size": 256}, "the files by its shapes"),
        ({"schema_version": 1}, "schema_version: given 1, expected 2"),
    ):
        (root / MANIFEST_FILE).write_text(json.dumps(document | changes))
        with pytest.raises(InputError, match=message):
            open_source(root)
    document["layers"][0]["files"].pop()
    (root / MANIFEST_FILE).write_text(json.dumps(document))
    with pytest.raises(InputError, match="23 files, expected 24 by its shapes"):
        open_source(root)


def test_names_in_merged_files() -> None:
    for name, short in (
        ("model.layers.3.input_layernorm.weight", "blk.3.input_layernorm.weight"),
        ("model.language_model.layers.3.mlp.gate.weight", "blk.3.mlp.gate.weight"),
        ("language_model.model.layers.3.mlp.gate.weight", "blk.3.mlp.gate.weight"),
        ("model.embed_tokens.weight", "embed_tokens.weight"),
        ("model.visual.blocks.0.norm1.weight", "visual.blocks.0.norm1.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ):
        assert merged_name(name) == short
        assert plain_name(short) == name or "language_model" in name


def kt(*words: object) -> str:
    done = CliRunner().invoke(app, ["quant", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_command(source: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(source, tmp_path / "Model")
    shown = kt(mine, "--layout", "kt-kernel", "-m", "int8", "--numa-nodes", 2, "--threads", 2)
    out = tmp_path / "Model-AMXINT8-NUMA2"
    assert shown.startswith(f"{out} (") and "AMXINT8 for kt-kernel with threadpool_count 2" in shown
    assert (out / "model.safetensors.index.json").is_file()
    words = json.loads(kt(mine, "--layout", "kt-kernel", "--numa-nodes", 3, "--dry-run", "--json"))
    assert words["method"] == "AMXINT4" and words["layers"] == 2 and words["seconds"] >= 0
    done = json.loads(
        kt(mine, "--layout", "kt-kernel", "--numa-nodes", 3, "--no-merge", "-o", tmp_path / "tree", "--json")
    )
    assert done["whole"] and done["out_bytes"] == sum(file.stat().st_size for file in (tmp_path / "tree").rglob("*.kt"))
    assert words["out_bytes"] - words["rest_bytes"] == done["out_bytes"]
    for flags, message in (
        (("--group", 64), "group: given 64 with --layout kt-kernel"),
        (("--format", "fp8:row"), "int4 or int8 with --layout kt-kernel"),
        (("--layout", "sglang"), "layout: given sglang, expected packed or kt-kernel"),
    ):
        with pytest.raises(InputError, match=message):
            kt(mine, "--layout", "kt-kernel", *flags)
    older = json.loads(kt(mine, "--layout", "kt-kernel", "--quant-method", "moe_int8", "--dry-run", "--json"))
    assert older["method"] == "AMXINT8"
    odd = tiny(tmp_path / "odd", hidden_size=128, moe_intermediate_size=1408, num_experts=2)
    words = ["--layout", "kt-kernel", "--threadpool-count", 2, "-o", tmp_path / "odd-int4", "--json"]
    assert json.loads(kt(odd, *words))["threadpool_count"] == 1  # 704 columns are no multiple of 128
    with pytest.raises(InputError, match="--layout kt-kernel --format int4"):
        kt(mine, "--format", "AMXINT4", "-o", tmp_path / "packed")


def test_script_of_the_guides(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("convert_cpu_weights", ROOT / "scripts" / "convert_cpu_weights.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def run(*words: object) -> None:
        monkeypatch.setattr(sys, "argv", ["convert_cpu_weights.py", *map(str, words)])
        script.main()

    run("-i", source, "--input-type", "bf16", "-o", tmp_path / "tree", "--quant-method", "int8", "--gpu", "--profile",
        "--no-merge-safetensor", "--save-backward-weights", "--cpuinfer-threads", 2)  # fmt: skip
    output = capsys.readouterr()
    assert "--gpu has no effect here" in output.err and "layer 1: " in output.out
    assert len(list((tmp_path / "tree").glob("_layer_1/_numa_1/INT8_*_bwd_*_.kt"))) == 2 * 3 * 2
    run("--input-path", source, "--output", tmp_path / "merged", "--threadpool-count", 1)
    layer = open_source(tmp_path / "merged").layer("model.layers.0.mlp.experts", SHAPE)
    assert layer.formats["down"] == "int4:0:f32"
    run("--input-path", source, "--output", tmp_path / "packed", "--layout", "packed")
    assert (tmp_path / "packed" / "kt_packed.json").is_file()
    with pytest.raises(SystemExit, match="convert_cpu_weights: format: given awq"):
        run("-i", source, "-o", tmp_path / "awq", "--quant-method", "awq")


def test_estimate_and_plan(source: Path) -> None:
    plan = plan_kt(Origin(source), 4, 2, backward=True)
    assert plan.layer_bytes == 2 * (3 * 128 * 768 // 2 * 2 + 4 * (768 + 768 + 2 * 128) + 4 * (2 * 2 * 128 + 768))
    assert estimate_kt(plan) > 0
    assert plan.file(plan.origin.layers[0]) == "model-00001-of-00003.safetensors"
    assert plan.rest_file == "model-00003-of-00003.safetensors"
