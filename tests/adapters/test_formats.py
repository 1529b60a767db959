"""Every adapter format into every other and back: the same deltas, the same ranks, whatever the adapter is like."""

from __future__ import annotations

import itertools
import json
import logging
import re
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktransformers.adapters import ADAPTER_FORMATS, convert, read_adapter, write_adapter
from ktransformers.adapters.content import open_content
from ktransformers.adapters.formats import detect_format
from ktransformers.ground.errors import InputError
from tests.support.adapter_samples import Recipe, ranks, same_deltas, sample, write_model_config

NAMES = [adapter_format.name for adapter_format in ADAPTER_FORMATS]
QUICK = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def recipes(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> Recipe:
    shared = draw(st.booleans())
    gate = draw(st.integers(1, 3))
    return Recipe(
        family=draw(st.sampled_from(["qwen3_moe", "mixtral", "gpt_oss"])),
        layers=draw(st.integers(1, 2)),
        experts=draw(st.integers(2, 4)),
        ranks=(gate, gate if shared else draw(st.integers(1, 3)), draw(st.integers(1, 3))),
        rank=draw(st.integers(1, 3)),
        scalings=(draw(st.sampled_from([0.5, 2.0])), draw(st.sampled_from([1.0, 2.0]))),
        shared=shared,
        dtype=draw(st.sampled_from(dtypes)),
        zero_b=not shared and draw(st.integers(0, 5)) == 0,
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("first,second", list(itertools.permutations(NAMES, 2)))
@QUICK
@given(recipe=recipes())
def test_round_trip_between_every_pair_of_dialects(first: str, second: str, recipe: Recipe) -> None:
    start = sample(recipe)
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync"):  # hundreds of files that nobody will miss
        root = Path(folder)
        write_adapter(start, root / "a", first)
        once = read_adapter(root / "a")
        assert once.shared == start.shared
        same_deltas(start, once)
        found = ranks(once)
        convert(root / "a", root / "b", second)
        convert(root / "b", root / "c", first)
        again = read_adapter(root / "c")
        same_deltas(start, again)
        if recipe.zero_b:  # where gate's ranks end and up's begin cannot be told, but none may be added
            assert max(ranks(again).values()) <= max(found.values())
        else:
            assert ranks(again) == found == ranks(start)


@pytest.mark.parametrize("name", NAMES)
def test_format_is_detected_by_content(name: str, tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "adapter", name)
    assert detect_format(open_content(tmp_path / "adapter")).name == name
    for file in (tmp_path / "adapter").iterdir():
        if file.suffix in (".safetensors", ".gguf"):
            suffix = ".safetensors" if file.suffix == ".safetensors" else ""
            file.rename(file.with_name(f"renamed_{file.stem}{suffix}"))
    assert detect_format(open_content(tmp_path / "adapter")).name == name


@pytest.mark.parametrize("name", ["peft", "per-expert", "sglang", "gguf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtypes_are_kept(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    start = sample(Recipe(dtype=dtype, ranks=(3, 2, 1), shared=False))
    write_adapter(start, tmp_path / "a", name)
    back = read_adapter(tmp_path / "a")
    same_deltas(start, back)
    assert {form.dtype for form in back.forms()} == {dtype}


def test_scaling_ratio_other_than_power_of_two_uses_f32(tmp_path: Path) -> None:
    start = sample(Recipe(scalings=(2.0, 16 / 12), rank=3))
    for name in NAMES:
        write_adapter(start, tmp_path / name, name)
        same_deltas(start, read_adapter(tmp_path / name), tolerance=0 if name in ("peft", "per-expert") else 2**-23)


def test_prefix_of_a_larger_model_survives(tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "peft", "peft")
    from safetensors.torch import load_file, save_file

    file = tmp_path / "peft" / "adapter_model.safetensors"
    renamed = {key.replace("model.layers", "model.language_model.layers"): t for key, t in load_file(file).items()}
    save_file(renamed, file)
    (tmp_path / "peft" / "kt_manifest.json").unlink()
    model = write_model_config(Recipe(), tmp_path / "model")
    for name in ("kt", "sglang", "gguf", "per-expert"):
        convert(tmp_path / "peft", tmp_path / name, name, base_model_name_or_path=model)
        (tmp_path / name / "kt_manifest.json").unlink()
        convert(tmp_path / name, tmp_path / f"{name}-back", "peft", base_model_name_or_path=model)
        assert set(load_file(tmp_path / f"{name}-back" / "adapter_model.safetensors")) == set(renamed)
    keys = load_file(tmp_path / "sglang" / "adapter_model.safetensors")
    assert "model.layers.0.mlp.experts.0.gate_proj.lora_A.weight" in keys
    assert "model.language_model.layers.0.self_attn.q_proj.lora_A.weight" in keys


def test_old_peft_layout_is_read(tmp_path: Path) -> None:
    """PEFT took `[E, out, in]` parameters for `[E, in, out]` once: A and B are then each other's."""
    from safetensors.torch import load_file, save_file

    recipe = Recipe(ranks=(2, 2, 2), shared=True)
    start = sample(recipe)
    write_adapter(start, tmp_path / "a", "peft")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    for key in [key for key in tensors if "experts" in key and "lora_A" in key]:
        partner = key.replace("lora_A", "lora_B")
        a = tensors[key].reshape(recipe.experts, 2, -1)
        b = tensors[partner].reshape(-1, 2, recipe.experts)
        tensors[key], tensors[partner] = _swap(a, b)
    save_file(tensors, file)
    (tmp_path / "a" / "kt_manifest.json").unlink()
    model = write_model_config(recipe, tmp_path / "model")
    same_deltas(start, read_adapter(tmp_path / "a", model=model))


def _swap(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a [E, r, in] and b [out, r, E] -> the old file's A [E*r, out] and B [in, r*E]."""
    old_a = b.permute(2, 1, 0).reshape(-1, b.shape[0]).contiguous()
    return old_a, a.permute(2, 1, 0).reshape(a.shape[2], -1).contiguous()


def test_rslora_and_patterns_are_resolved(tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "a", "per-expert")
    file = tmp_path / "a" / "adapter_config.json"
    config = json.loads(file.read_text())
    plain = read_adapter(tmp_path / "a")
    file.write_text(json.dumps(config | {"use_rslora": True, "alpha_pattern": {"q_proj": 7}}))
    other = read_adapter(tmp_path / "a")
    scalings = {module.name.rpartition(".")[2]: module.form.scaling for module in other.modules}
    assert scalings["q_proj"] == pytest.approx(7 / 2**0.5)
    assert scalings["k_proj"] == pytest.approx(4 / 2**0.5)
    assert {module.form.scaling for module in plain.modules} == {2.0}


def test_gguf_names_are_those_of_llama_cpp() -> None:
    gguf = pytest.importorskip("gguf")
    from ktransformers.adapters.formats.gguf import ARCHITECTURES, EXPERT_TENSORS

    for arch in ARCHITECTURES.values():
        kind = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[arch.name]
        names = gguf.get_tensor_name_map(kind, 4)
        for leaf, path in arch.tensors.items():
            assert names.get_name(f"model.layers.3.{path}") == f"blk.3.{leaf}", (arch.name, path)
        for leaf, role in EXPERT_TENSORS.items():
            assert names.get_name(f"model.layers.3.mlp.experts.{role}_proj") == f"blk.3.{leaf}"
        assert names.get_name("lm_head") == "output"


def test_gguf_matches_llama_cpp_reader(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    start = sample(Recipe(family="mixtral", scalings=(2.0, 1.0)))
    write_adapter(start, tmp_path / "a", "gguf")
    reader = gguf.GGUFReader(str(tmp_path / "a" / "adapter.gguf"))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.type"] == "adapter" and fields["adapter.type"] == "lora"
    assert fields["general.architecture"] == "llama"
    tensors = {one.name: one for one in reader.tensors}
    a, b = (tensors[f"blk.1.ffn_down_exps.weight.lora_{half}"] for half in "ab")
    assert [int(n) for n in a.shape] == [6, 2, 3] and [int(n) for n in b.shape] == [2, 8, 3]  # ggml's order
    # delta = alpha / rank * b @ a, rank being b's first dimension; rows of q are permuted within each head
    alpha = fields["adapter.lora.alpha"]
    q_a, q_b = (_torch(tensors[f"blk.0.attn_q.weight.lora_{half}"]) for half in "ab")
    delta = (q_b.double() @ q_a.double()) * alpha / q_b.shape[1]
    expected = start.modules[0].read().delta()
    permuted = expected.reshape(2, 2, 2, 8).swapaxes(1, 2).reshape(8, 8)
    assert torch.equal(delta, permuted)


def _torch(one: object) -> torch.Tensor:
    shape = [int(n) for n in one.shape[::-1]]  # type: ignore[attr-defined]
    return torch.from_numpy(one.data.copy().reshape(-1)).view(torch.bfloat16).reshape(shape)  # type: ignore[attr-defined]


@pytest.mark.parametrize("to", NAMES)
def test_rslora_is_folded_before_it_is_rounded(to: str, tmp_path: Path) -> None:
    """In PEFT's own names gate and up have twice the rank of down, so rsLoRA scales them by another square root."""
    recipe = Recipe(ranks=(3, 3, 3), rank=2, dtype=torch.float32)
    model = write_model_config(recipe, tmp_path / "model")
    write_adapter(sample(recipe), tmp_path / "a", "peft")
    (tmp_path / "a" / "kt_manifest.json").unlink()
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_rslora": True}))
    start = read_adapter(tmp_path / "a", model=model)
    scalings = {form.scaling for form in start.forms()}
    assert len(scalings) == 3
    if to == "kt":
        with pytest.raises(InputError, match="--dtype bfloat16 rounds them"):
            convert(tmp_path / "a", tmp_path / "refused", to, base_model_name_or_path=model)
    convert(tmp_path / "a", tmp_path / "b", to, base_model_name_or_path=model, dtype="bfloat16")
    written = read_adapter(tmp_path / "b", model=model)
    same_deltas(start, written, tolerance=3 * 2.0**-8)  # A and B are rounded once each
    assert {form.dtype for form in written.forms()} == {torch.bfloat16}
    scaling = {layer.layer: layer for layer in start.experts}
    for layer in written.experts:
        for role, pair in layer.read().items():
            exact = scaling[layer.layer].read()[role]
            b = (exact.b.double() * (exact.scaling / pair.scaling)).bfloat16()
            assert torch.equal(pair.b[..., : b.shape[-1]], b), "rounded twice"


@pytest.mark.parametrize("adapter_format", NAMES)
def test_every_tensor_is_logged_under_both_names(adapter_format: str, tmp_path: Path) -> None:
    recipe = Recipe(family="mixtral")
    model = write_model_config(recipe, tmp_path / "model")
    write_adapter(sample(recipe), tmp_path / "a", adapter_format)
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ktransformers.adapters.convert")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        adapter = read_adapter(tmp_path / "a", model=model)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    pairs = [line.removeprefix("Loaded adapter weight: ").split(" -> ") for line in lines]
    assert {theirs for theirs, _ in pairs} == set(open_content(tmp_path / "a").tensors)
    assert len(pairs) == len(lines) == len({ours for _, ours in pairs})
    modules = {module.name for module in adapter.modules} | {f"{layer.root}.experts" for layer in adapter.experts}
    for _, ours in pairs:
        module = re.sub(r"(\.experts)\..*", r"\1", ours.removesuffix(".lora_A").removesuffix(".lora_B"))
        assert module in modules, ours
