"""Writes a checkpoint to a folder and reads an expert layer back as decoded tensors, for tests of all sources."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ktransformers.checkpoint import Encoded, decode
from ktransformers.checkpoint.sources import LayerSource

MODULE = "model.layers.0.mlp.experts"


def numbers(layer: LayerSource) -> dict[str, Tensor]:
    """All experts by role, in float32; every piece is one expert."""
    actual: dict[str, list[Tensor]] = {}
    for expert, piece in enumerate(layer.chunks()):
        assert piece.first_expert == expert and not piece.fused
        for role, part in piece.tensors.items():
            if isinstance(part, Encoded):
                assert layer.formats[role] == part.format
            actual.setdefault(role, []).append(decode(part)[0] if isinstance(part, Encoded) else part.float())
    return {role: torch.stack(parts) for role, parts in actual.items()}


def save(directory: Path, tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for role, value in expected.items():
        assert torch.equal(actual[role], value), role
