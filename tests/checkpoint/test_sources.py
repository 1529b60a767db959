"""Released safetensors formats, written by the tests and read back: the source's values bit for bit, or an error that
names the tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ktransformers.checkpoint import Encoded, ExpertShape
from ktransformers.checkpoint.quantisation import accept
from ktransformers.checkpoint.sources import open_source
from ktransformers.ground.errors import InputError
from tests.support.expert_sources import MODULE, numbers, same, save
from tests.support.releases import KINDS

E, H, I = 3, 256, 160  # noqa: E741
SHAPE = ExpertShape(E, H, I)
SIZES = {"gate": (I, H), "up": (I, H), "down": (H, I)}


def written(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(tensors of a checkpoint, numbers by role)."""
    make = KINDS[kind][0]
    tensors, expected = {}, {}
    for role, (n, k) in SIZES.items():
        parts = [make(n, k, 10 * expert + len(role)) for expert in range(E)]
        expected[role] = torch.stack([value for _, value in parts])
        for expert, (endings, _) in enumerate(parts):
            tensors |= {f"{MODULE}.{expert}.{role}_proj.{ending}": tensor for ending, tensor in endings.items()}
    return tensors, expected


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_a_release(kind: str, tmp_path: Path) -> None:
    make, spec, words = KINDS[kind]
    tensors, expected = written(kind)
    attention, value = make(I, H, 77)
    plain = {"model.layers.0.input_layernorm.weight": torch.ones(H), "model.embed_tokens.weight": torch.ones(4, H)}
    tensors |= plain | {f"model.layers.0.self_attn.q_proj.{ending}": part for ending, part in attention.items()}
    source = open_source(save(tmp_path, tensors), words)
    layer = source.layer(MODULE, SHAPE)
    assert layer.formats == dict.fromkeys(SIZES, spec)
    same(numbers(layer), expected)
    assert layer.bytes == sum(t.numel() * t.element_size() for name, t in tensors.items() if "experts" in name)
    rest = {tensor.name: tensor for tensor in source.rest()}
    assert set(rest) == {*plain, "model.layers.0.self_attn.q_proj.weight"}
    projection = rest["model.layers.0.self_attn.q_proj.weight"]
    assert source.quantised and projection.shape == (I, H) and projection.dtype == torch.bfloat16
    assert torch.equal(projection.read(), value.bfloat16())
    source.release()
    same(numbers(layer), expected)  # and again


def test_compressed_tensors_global_scale_is_inverted(tmp_path: Path) -> None:
    """compressed-tensors divides by the global scale; the kernels multiply by its inverse, one rounding apart."""
    make = KINDS["nvfp4 compressed"][0]
    parts, value = make(64, 64, 1)
    parts["weight_global_scale"] = torch.tensor([4096.0 * 1.37])
    (tensor,) = open_source(save(tmp_path, {f"x.{ending}": part for ending, part in parts.items()})).rest()
    expected = value / 1.37
    assert float(((tensor.read().float() - expected).abs() / expected.abs().clamp_min(1e-9)).max()) <= 2**-8


def test_codes_are_not_copied(tmp_path: Path) -> None:
    tensors, _ = written("compressed int4")
    layer = open_source(save(tmp_path, tensors)).layer(MODULE, SHAPE)
    first, second = (next(layer.chunks()).tensors["up"] for _ in range(2))
    assert isinstance(first, Encoded) and isinstance(second, Encoded)
    assert first.qweight.data_ptr() == second.qweight.data_ptr()


def test_mixed_formats(tmp_path: Path) -> None:
    """Matrices of an expert may differ in format; experts of one layer may not."""
    first, expected = written("fp8 blocks")
    second, others = written("compressed int4")
    tensors = {name: part for name, part in first.items() if "down" not in name}
    tensors |= {name: part for name, part in second.items() if "down" in name}
    layer = open_source(save(tmp_path, tensors)).layer(MODULE, SHAPE)
    assert layer.formats == {"gate": "fp8:128x128", "up": "fp8:128x128", "down": "int4:32"}
    same(numbers(layer), expected | {"down": others["down"]})
    odd = {name: part for name, part in tensors.items() if ".2.up_proj" not in name}
    odd |= {name: part for name, part in second.items() if ".2.up_proj" in name}
    with pytest.raises(InputError, match=r"experts\.2\.up_proj\.\w+: given int4:32, expected fp8:128x128"):
        open_source(save(tmp_path, odd)).layer(MODULE, SHAPE)


@pytest.mark.parametrize("group", [0, 64, 160])
def test_groups_of_compressed_tensors(group: int, tmp_path: Path) -> None:
    from tests.support.releases import packed_int4

    parts, value = packed_int4(64, 320, 1, group or 320)
    source = open_source(save(tmp_path, {f"x.{ending}": part for ending, part in parts.items()}))
    (tensor,) = source.rest()
    assert tensor.name == "x.weight" and torch.equal(tensor.read(), value.bfloat16())


def fused_gpt_oss() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rows of gate and up in turns, 16 bytes for 32 columns."""
    tensors, expected = {}, {}
    for role, (n, k) in {"gate_up": (2 * I, H), "down": (H, I)}.items():
        parts = [KINDS["mxfp4"][0](n, k, expert + n) for expert in range(E)]
        blocks = torch.stack([endings["weight"].view(torch.uint8) for endings, _ in parts])
        scales = torch.stack([endings["scale"].view(torch.uint8) for endings, _ in parts])
        tensors[f"{MODULE}.{role}_proj_blocks"] = blocks.reshape(E, n, k // 32, 16)
        tensors[f"{MODULE}.{role}_proj_scales"] = scales
        tensors[f"{MODULE}.{role}_proj_bias"] = torch.randn(E, n)
        expected[role] = torch.stack([value for _, value in parts])
    both, bias = expected.pop("gate_up"), tensors[f"{MODULE}.gate_up_proj_bias"]
    expected |= {"gate": both[:, 0::2], "up": both[:, 1::2], "gate_bias": bias[:, 0::2], "up_bias": bias[:, 1::2]}
    return tensors, expected | {"down_bias": tensors[f"{MODULE}.down_proj_bias"]}


def test_gpt_oss(tmp_path: Path) -> None:
    """Also against transformers' own dequantisation."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, expected = fused_gpt_oss()
    shape = ExpertShape(E, H, I, biased=True, transposed=True)
    layer = open_source(save(tmp_path, tensors), {"quant_method": "mxfp4"}).layer(MODULE, shape, interleaved=True)
    assert layer.formats == dict.fromkeys(SIZES, "mxfp4")
    actual = numbers(layer)
    same(actual, expected)
    stock = convert_moe_packed_tensors(
        tensors[f"{MODULE}.gate_up_proj_blocks"], tensors[f"{MODULE}.gate_up_proj_scales"], dtype=torch.float32
    )
    assert torch.equal(stock.transpose(1, 2)[:, 0::2], actual["gate"])
    short = tensors | {f"{MODULE}.down_proj_scales": tensors[f"{MODULE}.down_proj_scales"][:, :8].clone()}
    with pytest.raises(InputError, match=r"down_proj_scales: given U8 \[3, 8, 5\], expected U8 \[3, 256, 5\]"):
        open_source(save(tmp_path, short)).layer(MODULE, shape, interleaved=True)


@pytest.mark.parametrize(("inner", "transposed", "spec"), [(128, False, "fp8:128x128"), (160, True, "fp8:1x128")])
def test_fused_fp8(inner: int, transposed: bool, spec: str, tmp_path: Path) -> None:
    """A scale block with rows of gate and of up becomes one scale per row."""
    tensors, values = {}, {}
    for role, (n, k) in {"gate_up": (2 * inner, H), "down": (H, inner)}.items():
        n, k = (k, n) if transposed else (n, k)
        parts = [KINDS["fp8 blocks"][0](n, k, expert + n) for expert in range(E)]
        tensors[f"{MODULE}.{role}_proj"] = torch.stack([endings["weight"] for endings, _ in parts])
        tensors[f"{MODULE}.{role}_proj_scale_inv"] = torch.stack([endings["weight_scale_inv"] for endings, _ in parts])
        stacked = torch.stack([value for _, value in parts])
        values[role] = stacked.transpose(1, 2) if transposed else stacked
    both = values.pop("gate_up")
    source = open_source(save(tmp_path, tensors))
    layer = source.layer(MODULE, ExpertShape(E, H, inner, transposed=transposed))
    assert layer.formats == {"gate": spec, "up": spec, "down": "fp8:128x128"}
    same(numbers(layer), values | {"gate": both[:, :inner], "up": both[:, inner:]})


def refuse(directory: Path, tensors: dict[str, Tensor], message: str, words: dict[str, Any] | None = None) -> None:
    with pytest.raises(InputError, match=message):
        layer = open_source(save(directory, tensors), words).layer(MODULE, SHAPE)
        list(layer.chunks())


def test_unsupported_tensors_are_refused_by_name(tmp_path: Path) -> None:
    tensors, _ = written("fp8 blocks")
    name = f"{MODULE}.1.up_proj.weight"
    without = {key: part for key, part in tensors.items() if key != f"{name}_scale_inv"}
    refuse(tmp_path, without, r"experts\.1\.up_proj\.weight: given F8_E4M3 \[160, 256\], expected .* a scale with it")
    odd = tensors | {f"{name}_scale_inv": torch.ones(7, 3)}
    refuse(tmp_path, odd, r"up_proj\.weight_scale_inv: given F32 \[7, 3\], expected \[2, 2\] \(blocks of 128 x 128\)")
    refuse(tmp_path, tensors | {name: tensors[name][:100]}, r"up_proj\.weight: given shape \[100, 256\]")
    wide = tensors[name].float().to(torch.float8_e5m2)
    refuse(tmp_path, tensors | {name: wide}, r"up_proj\.weight: given F8_E5M2")

    tensors, _ = written("compressed int4")
    name = f"{MODULE}.2.down_proj.weight"
    refuse(tmp_path, tensors | {f"{name}_zero_point": torch.zeros(1)}, r"down_proj\.weight_zero_point: .*symmetric")
    refuse(tmp_path, tensors | {f"{name}_shape": torch.tensor([3, 4])}, r"down_proj\.weight_shape: given \[3, 4\]")
    refuse(
        tmp_path, tensors | {f"{name}_scale": torch.ones(H, 7)}, r"down_proj\.weight_scale: .*multiple of 32 columns"
    )

    tensors, _ = written("gptq")
    name, words = f"{MODULE}.0.gate_proj", KINDS["gptq"][2]
    refuse(tmp_path, tensors | {f"{name}.qzeros": torch.zeros(8, 20, dtype=torch.int32)}, r"gate_proj\.qzeros: .*asymm")
    turned = tensors | {f"{name}.g_idx": tensors[f"{name}.g_idx"].flip(0)}
    refuse(tmp_path, turned, r"gate_proj\.g_idx: given columns in order of activation \(desc_act\)", words)
    refuse(tmp_path, tensors, r"gate_proj\.g_idx: given columns in order of", words | {"desc_act": True})
    refuse(tmp_path, tensors, r"gate_proj\.qzeros: .*expected 8 throughout", words | {"checkpoint_format": "gptq_v2"})

    tensors, _ = written("gptq zeros")
    name, words = f"{MODULE}.0.gate_proj", KINDS["gptq zeros"][2]
    full = tensors | {f"{name}.qzeros": torch.full_like(tensors[f"{name}.qzeros"], -1)}
    refuse(tmp_path, full, r"gate_proj\.qzeros: given stored zeros of 15, which programs read in two ways", words)
    wide = tensors | {f"{name}.scales": tensors[f"{name}.scales"].float()}
    refuse(tmp_path, wide, r"gate_proj\.scales: .*expected F16 or BF16 scales with zeros", words)

    tensors, _ = written("nvfp4 compressed")
    name = f"{MODULE}.0.gate_proj.weight"
    refuse(tmp_path, tensors | {f"{name}_global_scale": torch.ones(3)}, r"weight_global_scale: .*one F32 number")
    tensors, _ = written("mxfp4")
    refuse(tmp_path, tensors | {f"{MODULE}.0.gate_proj.scale": torch.ones(I, 8)}, r"gate_proj\.scale: .*e8m0 scales")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"quant_method": "hqq", "bits": 4}, r"quantised with 'hqq' \(bits 4\), expected one of fp8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv', expected 'gemm'"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3, expected bits 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"symmetric": False}}}},
            "symmetric false",
        ),
        ({"bits": 4}, "'an unnamed method'"),
    ],
)
def test_methods_are_refused_by_name(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        accept("config.json", words)


def test_path_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="given no such file or directory"):
        open_source(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match="no supported weights"):
        open_source(tmp_path)
