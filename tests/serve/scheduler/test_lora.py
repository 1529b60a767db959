"""Binding of adapters to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.adapters import LoraPair, adapter_from_tensors
from ktransformers.ground.errors import InputError
from tests.support.serving import EngineHarness


def pair(*shape: int) -> LoraPair:
    return LoraPair(torch.ones(*shape[:-2], 2, shape[-1]), torch.ones(*shape[:-2], shape[-2], 2), 1.0)


@pytest.mark.parametrize(
    ("experts", "linears", "words"),
    [
        ({}, {"model.layers.0.self_attn.nothing": pair(64, 64)}, r"self_attn\.nothing.*no such layer"),
        ({}, {"lm_head": pair(6400, 64)}, "lm_head.*no such layer"),
        ({}, {"model.layers.9.self_attn.q_proj": pair(64, 64)}, r"layers\.9"),
        ({}, {"model.layers.0.self_attn.q_proj": pair(64, 32)}, "64 by 32, expected 64 by 64"),
        ({"model.layers.5.mlp": {"down": pair(6, 64, 40)}}, {}, r"layers\.5"),
        ({"model.layers.0.mlp": {"down": pair(5, 64, 40)}}, {}, "down"),
    ],
)
def test_adapter_without_matching_module_is_refused(
    harness: EngineHarness, experts: Any, linears: Any, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        harness.lora_modules.bind(adapter_from_tensors(experts, linears), "saves/x", "x", 1)


def test_modified_adapter_is_refused(harness: EngineHarness, adapters: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    copy = tmp_path / "copy"
    shutil.copytree(adapters["one"], copy)
    tensors = load_file(copy / "adapter_model.safetensors")
    name = next(iter(tensors))
    tensors[name] = tensors[name] + 1
    save_file(tensors, copy / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=name):
        harness.lora_modules.open(copy, "copy", 1, str(harness.directory))
