"""The engine as autograd sees it: an operator whose inputs are on the device and whose LoRA factors are in host memory.

Everything that backward needs besides the inputs is an output: a host copy of the ids, the CPU's kept rows, and which
experts the CPU had. So checkpointing may keep them all and never compute a layer again
(`nn/checkpointing.py`), or let go of all of them. What computes is a handle, as the store is for the operator without
an engine (`nn/operator.py`). The surprising decision: gradients of the factors are returned while the device still
computes them. Factors pass through a function of their own, `Arrival`, which does nothing forward. Its tensors are in
host memory, so autograd calls it back in another thread than the device's, and there it waits for the copies; the
device's thread goes on to the layer before.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ktransformers.nn.checkpointing import compute_or_replay
from ktransformers.nn.lora_factors import LoraFactors
from ktransformers.nn.store import Dropout
from ktransformers.place.choose import PlacedLayer
from ktransformers.place.engine import ExpertEngine, Kept
from ktransformers.place.gpu.device_lora import PendingCopies
from ktransformers.place.gpu.executor import ExpertBatch

_count = itertools.count(1)
_known: weakref.WeakValueDictionary[int, PlacedStore] = weakref.WeakValueDictionary()


class Awaited:
    """Gradients of one pass's factors that are on their way."""

    def __init__(self) -> None:
        self.leaving: list[PendingCopies] = []
        self.handle = next(_count)
        _awaited[self.handle] = self

    def finish(self) -> None:
        while self.leaving:
            self.leaving.pop().finish()


_awaited: weakref.WeakValueDictionary[int, Awaited] = weakref.WeakValueDictionary()


class Arrival(torch.autograd.Function):
    """Factors as they are; their gradients, when they have come."""

    @staticmethod
    def forward(ctx: Any, awaited: Awaited, *lora: Tensor) -> tuple[Tensor, ...]:
        ctx.awaited = awaited
        ctx.set_materialize_grads(False)
        return lora

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.awaited.finish()
        return None, *grads


def _placed(handle: int) -> PlacedStore:
    found = _known.get(handle)
    if found is None:
        raise RuntimeError(f"placed experts {handle} are gone; keep the placement as long as its graph")
    return found


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
    def compute() -> tuple[Tensor, ...]:
        placed = _placed(store)
        batch = ExpertBatch(hidden, ids, weights, _factors(lora, roles, scales), Dropout(dropout, seed), learns=True)
        out, kept = placed.engine.forward(placed.layer, batch, retain)
        return out, kept.ids, kept.keep, kept.cpu

    out, ids_host, keep, cpu = compute_or_replay(compute)
    return out, ids_host, keep, cpu


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, ids, weights, lora, store, roles, scales, _, dropout, seed, awaited = inputs
    ctx.save_for_backward(hidden, ids, weights, *output[1:], *lora)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # zeros as large as what is kept would be made for it
    ctx.placed, ctx.roles, ctx.scales, ctx.dropout = _placed(store), roles, scales, Dropout(dropout, seed)
    ctx.awaited = awaited
    ctx.factors, ctx.learns = len(lora), any(tensor.requires_grad for tensor in lora)


def _backward(ctx: Any, grad_out: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if grad_out is None:
        return (None,) * 3 + ([None] * ctx.factors,) + (None,) * 7
    hidden, ids, weights, *rest = ctx.saved_tensors
    kept, lora = Kept(*rest[:3]), rest[3:]
    batch = ExpertBatch(hidden.detach(), ids, weights.detach(), _factors(lora, ctx.roles, ctx.scales), ctx.dropout)
    placed = ctx.placed
    with torch.no_grad():
        grad_hidden, grad_weights, grads, leaving = placed.engine.backward(
            placed.layer, batch, grad_out.contiguous(), kept, ctx.learns
        )
    if leaving is not None:
        _awaited[ctx.awaited].leaving.append(leaving)
    return (grad_hidden, None, grad_weights, grads if ctx.learns else [None] * len(lora), *[None] * 7)


placed_experts.register_autograd(_backward, setup_context=_save)


class PlacedStore:
    """What `nn.operator.place_store` is given for one store."""

    def __init__(self, engine: ExpertEngine, layer: PlacedLayer) -> None:
        self.engine, self.layer = engine, layer
        self.handle = next(_count)
        _known[self.handle] = self

    def __call__(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, factors: LoraFactors | None, dropout: Dropout, retain: bool
    ) -> Tensor:
        rows, top_k = hidden.reshape(-1, hidden.shape[-1]), ids.shape[-1]
        awaited, tensors = Awaited(), ()
        if factors is not None:
            tensors = Arrival.apply(awaited, *factors.tensors)  # type: ignore[no-untyped-call]
        out: Tensor = placed_experts(
            rows,
            ids.reshape(-1, top_k),
            weights.reshape(-1, top_k),
            list(tensors),
            self.handle,
            " ".join(factors.roles) if factors is not None else "",
            list(factors.scales) if factors is not None else [1.0] * 3,
            retain,
            dropout.rate,
            dropout.seed,
            awaited.handle,
        )[0]
        return out.view(hidden.shape)
