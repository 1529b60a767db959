"""The engine as autograd sees it: one function; its inputs are on the device, its LoRA factors in host memory.

Everything that backward needs is saved as tensors, host copies and the CPU's kept rows among them, so that
checkpointing's hooks can let go of all of it and get it back from the pass that is computed again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from ktransformers.nn.factors import Factors
from ktransformers.nn.store import Dropout
from ktransformers.place.engine import Engine, Kept, Layer
from ktransformers.place.gpu.side import Batch


class _Experts(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ids: Tensor, weights: Tensor, placed: PlacedStore, *given: Any) -> Tensor:
        dropout, retain, roles, scales, *tensors = given
        factors = Factors(roles, tuple(tensors), scales) if roles else None
        batch = Batch(hidden.detach(), ids, weights.detach(), factors, dropout)
        out, kept = placed.engine.forward(placed.layer, batch, retain)
        ctx.save_for_backward(hidden, ids, weights, kept.ids, kept.hidden, kept.keep, kept.cpu, *tensors)
        ctx.placed, ctx.dropout, ctx.roles, ctx.scales = placed, dropout, roles, scales
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        hidden, ids, weights, ids_host, hidden_host, keep, cpu, *tensors = ctx.saved_tensors
        factors = Factors(ctx.roles, tuple(tensors), ctx.scales) if ctx.roles else None
        batch = Batch(hidden.detach(), ids, weights.detach(), factors, ctx.dropout)
        learns = any(ctx.needs_input_grad[8:])
        placed = ctx.placed
        grad_hidden, grad_weights, grads = placed.engine.backward(
            placed.layer, batch, grad_out.contiguous(), Kept(ids_host, hidden_host, keep, cpu), learns
        )
        return (grad_hidden, None, grad_weights, *[None] * 5, *(grads if learns else [None] * len(tensors)))


class PlacedStore:
    """What `nn.operator.place_store` is given for one store."""

    def __init__(self, engine: Engine, layer: Layer) -> None:
        self.engine, self.layer = engine, layer

    def __call__(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, factors: Factors | None, dropout: Dropout, retain: bool
    ) -> Tensor:
        rows, top_k = hidden.reshape(-1, hidden.shape[-1]), ids.shape[-1]
        roles, scales, tensors = (
            (factors.roles, factors.scales, factors.tensors) if factors is not None else ((), (), ())
        )
        out: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
            rows, ids.reshape(-1, top_k), weights.reshape(-1, top_k), self, dropout, retain, roles, scales, *tensors
        )
        return out.view(hidden.shape)
