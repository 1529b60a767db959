"""The placement engine as an operator of autograd: inputs on the device, LoRA factors in host memory.

Everything that backward needs besides the inputs is an output: a host copy of the ids, the rows that the CPU kept, and
which experts the CPU computed. So activation checkpointing may keep all of them and never recompute a layer
(`experts/checkpointing.py`), or drop all of them. The placed layer is passed as a handle, as the store is in the
operator without an engine (`experts/operator.py`).

Gradients of the factors are returned while the device still computes them. Factors pass through `WaitForGradients`,
which does nothing forward; its tensors are in host memory, so autograd calls its backward in another thread than the
device's, and that thread waits for the copies while the device's thread launches the layer before.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ktransformers.experts.checkpointing import compute_or_replay
from ktransformers.experts.lora_factors import LoraFactors
from ktransformers.experts.store import Dropout
from ktransformers.place.dispatch import PlacedLayer
from ktransformers.place.engine import ExpertEngine, SavedForBackward
from ktransformers.place.gpu.device_lora import PendingCopies
from ktransformers.place.gpu.executor import ExpertBatch

_handles = itertools.count(1)


class Placed(Protocol):
    """A layer with the engine that computes it."""

    engine: ExpertEngine
    layer: PlacedLayer


_placed_layers: weakref.WeakValueDictionary[int, Placed] = weakref.WeakValueDictionary()


def register(placed: Placed) -> int:
    """A handle by which the operator finds it as long as it lives."""
    handle = next(_handles)
    _placed_layers[handle] = placed
    return handle


class PendingFactorGradients:
    """Copies of one pass's factor gradients to host memory that are under way."""

    def __init__(self) -> None:
        self.leaving: list[PendingCopies] = []
        self.handle = next(_handles)
        _awaited[self.handle] = self

    def finish(self) -> None:
        while self.leaving:
            self.leaving.pop().finish()


_awaited: weakref.WeakValueDictionary[int, PendingFactorGradients] = weakref.WeakValueDictionary()


class WaitForGradients(torch.autograd.Function):
    """Identity forward; backward waits until the gradients have arrived in host memory."""

    @staticmethod
    def forward(ctx: Any, awaited: PendingFactorGradients, *lora: Tensor) -> tuple[Tensor, ...]:
        ctx.awaited = awaited
        ctx.set_materialize_grads(False)
        return lora

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.awaited.finish()
        return None, *grads


def _placed(handle: int) -> Placed:
    placed = _placed_layers.get(handle)
    if placed is None:
        raise RuntimeError(f"placed experts {handle} are gone; keep the placement as long as its graph")
    return placed


def _factors(tensors: Sequence[Tensor], roles: str, scales: Sequence[float]) -> LoraFactors | None:
    if not roles:
        return None
    gate, up, down = scales
    return LoraFactors(tuple(roles.split()), tuple(tensors), (gate, up, down))


@torch.library.custom_op("ktransformers::placed_experts", mutates_args=())
def placed_experts(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    lora: Sequence[Tensor],
    store: int,
    roles: str,
    scales: Sequence[float],
    retain: bool,
    dropout: float,
    seed: int,
    awaited: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    placed = _placed(store)

    def compute() -> tuple[Tensor, ...]:
        batch = ExpertBatch(
            hidden, ids, weights, _factors(lora, roles, scales), Dropout(dropout, seed), needs_grad=True
        )
        out, saved = placed.engine.forward(placed.layer, batch, retain)
        return out, saved.ids, saved.keep, saved.cpu

    out, ids_host, keep, cpu = compute_or_replay(compute, placed.layer.store)
    return out, ids_host, keep, cpu


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, ids, weights, lora, store, roles, scales, _, dropout, seed, awaited = inputs
    ctx.save_for_backward(hidden, ids, weights, *output[1:], *lora)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # zeros as large as what is kept would be made for it
    ctx.placed, ctx.roles, ctx.scales, ctx.dropout = _placed(store), roles, scales, Dropout(dropout, seed)
    ctx.awaited = awaited
    ctx.factors, ctx.needs_grad = len(lora), any(tensor.requires_grad for tensor in lora)


def _backward(ctx: Any, grad_out: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if grad_out is None:
        return (None,) * 3 + ([None] * ctx.factors,) + (None,) * 7
    hidden, ids, weights, *rest = ctx.saved_tensors
    saved, lora = SavedForBackward(*rest[:3]), rest[3:]
    batch = ExpertBatch(hidden.detach(), ids, weights.detach(), _factors(lora, ctx.roles, ctx.scales), ctx.dropout)
    placed = ctx.placed
    with torch.no_grad():
        grad_hidden, grad_weights, grads, leaving = placed.engine.backward(
            placed.layer, batch, grad_out.contiguous(), saved, ctx.needs_grad
        )
    if leaving is not None:
        _awaited[ctx.awaited].leaving.append(leaving)
    return (grad_hidden, None, grad_weights, grads if ctx.needs_grad else [None] * len(lora), *[None] * 7)


placed_experts.register_autograd(_backward, setup_context=_save)


def apply_placed(
    handle: int,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    factors: LoraFactors | None,
    dropout: Dropout,
    retain: bool,
) -> Tensor:
    """Hidden `[..., H]` through a placed layer, with gradients."""
    rows, top_k = hidden.reshape(-1, hidden.shape[-1]), ids.shape[-1]
    awaited, tensors = PendingFactorGradients(), ()
    if factors is not None:
        tensors = WaitForGradients.apply(awaited, *factors.tensors)  # type: ignore[no-untyped-call]
    out: Tensor = placed_experts(
        rows,
        ids.reshape(-1, top_k),
        weights.reshape(-1, top_k),
        list(tensors),
        handle,
        " ".join(factors.roles) if factors is not None else "",
        list(factors.scales) if factors is not None else [1.0] * 3,
        retain,
        dropout.rate,
        dropout.seed,
        awaited.handle,
    )[0]
    return out.view(hidden.shape)
