"""The one door from PyTorch to the expert kernels: `apply_experts`, an operator that autograd knows.

Shapes: hidden `[T, H]`, ids and routing weights `[T, k]`. The packed experts are no tensor, so the operator gets them
as a handle, an integer that leads to a living store. It returns the output and, with `retain`, gate and up of every row
as opaque bytes; without, backward computes them again. Both being outputs of a registered operator, selective
checkpointing may keep them or let go of them, and gradient accumulation, non-reentrant checkpointing and GradScaler
need nothing from us. Gradients go to hidden states and routing weights; the experts are frozen.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from ktransformers.nn.store import ExpertStore

_stores: weakref.WeakValueDictionary[int, ExpertStore] = weakref.WeakValueDictionary()
_handles: weakref.WeakKeyDictionary[ExpertStore, int] = weakref.WeakKeyDictionary()
_count = itertools.count(1)


def handle_of(store: ExpertStore) -> int:
    """The number by which the operator finds this store, as long as the store lives."""
    if store not in _handles:
        _handles[store] = next(_count)
        _stores[_handles[store]] = store
    return _handles[store]


def _store_of(handle: int) -> ExpertStore:
    store = _stores.get(handle)
    if store is None:
        raise RuntimeError(f"expert store {handle} is gone; keep the ExpertStore alive as long as its graph")
    return store


@torch.library.custom_op("ktransformers::experts", mutates_args=(), device_types="cpu")
def experts(hidden: Tensor, ids: Tensor, weights: Tensor, store: int, retain: bool) -> tuple[Tensor, Tensor]:
    found = _store_of(store)
    keep = found.new_keep(*ids.shape) if retain else hidden.new_empty(0, dtype=torch.uint8)
    return found.forward(hidden, ids, weights, keep=keep if retain else None), keep


@experts.register_fake
def _(hidden: Tensor, ids: Tensor, weights: Tensor, store: int, retain: bool) -> tuple[Tensor, Tensor]:
    size = _store_of(store).keep_bytes(*ids.shape) if retain else 0
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    return out, hidden.new_empty(size, dtype=torch.uint8)


@torch.library.custom_op("ktransformers::experts_backward", mutates_args=(), device_types="cpu")
def experts_backward(
    grad_out: Tensor, hidden: Tensor, ids: Tensor, weights: Tensor, keep: Tensor, store: int
) -> tuple[Tensor, Tensor]:
    grad_hidden, grad_weights = _store_of(store).backward(
        grad_out.contiguous(), hidden, ids, weights, keep=keep if keep.numel() else None
    )
    return grad_hidden, grad_weights.to(weights.dtype)


@experts_backward.register_fake
def _(
    grad_out: Tensor, hidden: Tensor, ids: Tensor, weights: Tensor, keep: Tensor, store: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden, memory_format=torch.contiguous_format), torch.empty_like(weights)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, ids, weights, store, _ = inputs
    ctx.save_for_backward(hidden, ids, weights, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.store = store


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    hidden, ids, weights, keep = ctx.saved_tensors
    grad_hidden, grad_weights = experts_backward(grad_out, hidden, ids, weights, keep, ctx.store)
    return grad_hidden, None, grad_weights, None, None


experts.register_autograd(_backward, setup_context=_save)


def apply_experts(store: ExpertStore, hidden: Tensor, ids: Tensor, weights: Tensor, *, retain: bool = True) -> Tensor:
    """Sum over k of weight * expert(hidden), in hidden's shape and dtype; all tensors in CPU memory.

    `retain` keeps gate and up for backward (2 I numbers a row); without, backward computes them again.
    """
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad)
    if not learns and type(hidden) is Tensor:  # plain inference pays for no operator
        return store.forward(hidden, ids, weights)
    rows, top_k = hidden.reshape(-1, hidden.shape[-1]), ids.shape[-1]
    out, _ = experts(rows, ids.reshape(-1, top_k), weights.reshape(-1, top_k), handle_of(store), retain and learns)
    result: Tensor = out.view(hidden.shape)
    return result
