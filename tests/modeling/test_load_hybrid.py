"""Routed experts from a GGUF file beside the FP8 release of the same model, the form of guides for one-bit experts:
logits are those of both decoded, and experts of another model are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ktransformers.checkpoint.encoded import decode
from ktransformers.checkpoint.encoder import encode
from ktransformers.ground.errors import InputError
from ktransformers.nn import load_model
from tests.support.gguf_blocks import random_blocks
from tests.support.gguf_models import gguf_fields, to_gguf
from tests.support.loaded_models import EXACT, stores, training_logits
from tests.support.packing import as_fp8
from tests.support.releases import write_gguf
from tests.support.tiny_models import build, logits, save

SIZES: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}
FAMILIES: dict[
    str, tuple[str, dict[str, Any]]
] = {  # architecture of the file and sizes; DeepSeek's first layer is dense
    "qwen3_moe": ("qwen3moe", {"num_experts": 4}),
    "deepseek_v3": ("deepseek2", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}),
}


def random_experts(model: Any, tensors: dict[str, tuple[Any, str]], kind: str) -> None:
    """Replaces the experts by random blocks of a type, in the file and, decoded, in the model."""
    import gguf

    random, numbers = np.random.default_rng(0), model.state_dict()
    quantised = gguf.GGMLQuantizationType[kind]
    for layer in range(SIZES["num_hidden_layers"]):
        if f"blk.{layer}.ffn_gate_exps.weight" not in tensors:
            continue
        gate_up = numbers[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        down = numbers[f"model.layers.{layer}.mlp.experts.down_proj"]
        for role, matrix in zip(("gate", "up", "down"), (gate_up[:, :256], gate_up[:, 256:], down), strict=True):
            data = random_blocks(kind.lower(), matrix.shape[:2], 256, random)
            read = torch.from_numpy(gguf.quants.dequantize(data, quantised))
            shrink = 2.0 ** round(math.log2(0.1 / read.std().item()))
            data = random_blocks(kind.lower(), matrix.shape[:2], 256, random, 0.01 * shrink)
            tensors[f"blk.{layer}.ffn_{role}_exps.weight"] = (data, kind)
            matrix.copy_(torch.from_numpy(gguf.quants.dequantize(data, quantised)).bfloat16())


def pair(folder: Path, kind: str, change: Any = None, family: str = "qwen3_moe") -> tuple[Path, Path, Tensor]:
    """(the FP8 directory, the GGUF file, logits of both decoded); `change` edits the tensors of the file."""
    pytest.importorskip("gguf")
    arch, sizes = FAMILIES[family]
    model = build(family, **SIZES, **sizes)
    fp8 = as_fp8(save(model, folder / "fp8"))
    tensors = to_gguf(model, arch, dict.fromkeys(("gate", "up", "down"), "Q8_0"))
    random_experts(model, tensors, kind)
    if change is not None:
        change(tensors)
    write_gguf(folder / "experts.gguf", arch, gguf_fields(model.config, arch), tensors)
    for name in load_file(folder / "fp8" / "model.safetensors"):
        if name.endswith("_proj.weight") and ".experts." not in name:
            parameter = model.get_parameter(name)
            parameter.data = decode(encode(parameter.detach(), "fp8:128x128"))[0].bfloat16().float()
    return fp8, folder / "experts.gguf", logits(model)


@pytest.mark.parametrize(("family", "kind"), [("qwen3_moe", "IQ1_S"), ("qwen3_moe", "Q4_K"), ("deepseek_v3", "IQ1_S")])
def test_logits_are_those_of_both_decoded(family: str, kind: str, tmp_path: Path) -> None:
    """With shared experts and latent attention too, as users of DeepSeek-V3 pair a GGUF with the FP8 release."""
    fp8, experts, want = pair(tmp_path, kind, family=family)
    model = load_model(fp8, experts=experts, dtype=torch.float32)
    assert stores(model)[0].formats == dict.fromkeys(("gate", "up", "down"), kind.lower())
    torch.testing.assert_close(training_logits(model), want, rtol=EXACT, atol=EXACT)
    codes = load_model(fp8, experts=experts, dtype=torch.float32, rest="keep")
    assert float((logits(codes) - want).norm() / want.norm()) < 1e-2


@pytest.mark.parametrize(
    ("name", "change"),
    [("model.norm.weight", lambda norm: norm * 1.5), ("mlp.gate.weight", lambda router: router[:, ::-1].copy())],
)
def test_experts_of_another_model_are_refused(name: str, change: Any, tmp_path: Path) -> None:
    """Shapes are the same; a norm or a router is not."""
    stored = {
        "model.norm.weight": ("output_norm.weight",),
        "mlp.gate.weight": [f"blk.{n}.ffn_gate_inp.weight" for n in (0, 1)],
    }

    def edit(tensors: dict[str, tuple[Any, str]]) -> None:
        for key in stored[name]:
            tensors[key] = (change(tensors[key][0]), tensors[key][1])

    fp8, experts, _ = pair(tmp_path, "Q4_K", edit)
    with pytest.raises(InputError, match=f"{name} that differs from the model's by .*experts of this very model"):
        load_model(fp8, experts=experts, dtype=torch.float32)


def test_another_number_of_layers_is_refused(tmp_path: Path) -> None:
    fp8, experts, _ = pair(tmp_path, "Q4_K")
    shards = load_file(fp8 / "model.safetensors")
    renamed = {name.replace("layers.0.mlp.experts", "layers.7.mlp.experts"): one for name, one in shards.items()}
    save_file(renamed, fp8 / "model.safetensors")
    with pytest.raises(InputError, match="experts in layer 0 of one of"):
        load_model(fp8, experts=experts, dtype=torch.float32)
