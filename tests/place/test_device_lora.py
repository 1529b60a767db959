"""LoRA factors are uploaded when they are new or have changed, and cached within a byte budget."""

from __future__ import annotations

import pytest
import torch

from ktransformers.experts.lora import ExpertLora, LoraPair
from ktransformers.place.gpu import device_lora as module
from ktransformers.place.gpu.device_lora import DeviceFactors


def layer(seed: int) -> ExpertLora:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(*sizes, generator=generator) for sizes in ((2, 8, 16), (2, 32, 8)))
    return ExpertLora(gate_up=LoraPair(a, b, 1.0))


def test_unchanged_factors_are_not_uploaded_again() -> None:
    known, layers = DeviceFactors(torch.device("cpu")), [layer(seed) for seed in range(6)]
    first = [known.get(one, 32) for one in layers]
    assert all(known.get(one, 32) is pairs for one, pairs in zip(layers, first, strict=True))
    layers[2].tensors[0].mul_(2)
    changed = known.get(layers[2], 32)["first"].a
    assert torch.equal(changed[:, :8], layers[2].tensors[0].bfloat16()) and len(known._entries) == 6
    assert known.get(layers[3], 32) is first[3]


def test_cache_keeps_two_layers_over_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHED_BYTES", 0)
    known, layers = DeviceFactors(torch.device("cpu")), [layer(seed) for seed in range(4)]
    last = [known.get(one, 32) for one in layers][-2:]
    assert len(known._entries) == 2 and [known.get(one, 32) for one in layers[-2:]] == last
