"""A step that ran out of memory leaves nothing to the next one, although its exception is part of a reference cycle."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ktransformers.train import out_of_memory
from ktransformers.train.out_of_memory import TrainingMemoryError, reporting_out_of_memory

LARGE = 8


def test_hooks_of_a_failed_checkpoint_do_not_reach_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "remedies", lambda *_: [])
    weight = torch.randn(4, requires_grad=True)
    computed: list[int] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        computed.append(len(x))
        product = (x * weight).sin()
        if len(x) == LARGE:
            kept: Any = SimpleNamespace()
            try:
                raise torch.OutOfMemoryError("tried to allocate 128.00 MiB")
            except torch.OutOfMemoryError as error:
                kept.error = error  # refers to this frame, which refers to it
                raise
        return product

    def step(rows: int) -> torch.Tensor:
        weight.grad = None
        checkpoint(block, torch.ones(rows, 4), use_reentrant=False).sum().backward()
        assert weight.grad is not None
        return weight.grad

    expected = step(2).clone()
    gc.disable()
    try:
        with pytest.raises(TrainingMemoryError), reporting_out_of_memory(SimpleNamespace()):  # type: ignore[arg-type]
            step(LARGE)
        computed.clear()
        assert torch.equal(step(2), expected)
        assert computed == [2, 2], "the first pass and its recomputation"
    finally:
        gc.enable()
