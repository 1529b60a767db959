"""The expert layer as registered PyTorch operators with autograd; `apply_experts` is the entry point.

Shapes: hidden `[T, H]`, ids and routing weights `[T, k]`. Packed experts are not a tensor, so an operator takes an
integer handle of their store; LoRA's factors are tensors, passed as a list with their roles. The operator returns the
output and, with `retain`, gate and up of every row as opaque bytes; without, backward recomputes them. Both are outputs
of a registered operator, so selective checkpointing may save or recompute them, and gradient accumulation,
non-reentrant checkpointing and GradScaler work unchanged. Gradients go to hidden states, routing weights and LoRA's
factors; the experts are frozen. Tensors on a GPU are copied to the host and the result back, unless the placement
engine (`place/`) has registered itself for the store with `place_store`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.experts.checkpointing import compute_or_replay
from ktransformers.experts.lora import ExpertLora
from ktransformers.experts.lora_factors import (
    LoraFactors,
    empty_gradients,
    experts_innermost,
    factors_of,
    match_factor_strides,
    packed_adapter,
)
from ktransformers.experts.lora_prefetch import LoraPrefetch
from ktransformers.experts.mixed_lora import MixedLora
from ktransformers.experts.store import Dropout, ExpertStore
from ktransformers.experts.transfer import to_device, to_host

_stores: weakref.WeakValueDictionary[int, ExpertStore] = weakref.WeakValueDictionary()
_handles: weakref.WeakKeyDictionary[ExpertStore, int] = weakref.WeakKeyDictionary()
_next_handle = itertools.count(1)
_lora_prefetch = LoraPrefetch()


def handle_of(store: ExpertStore) -> int:
    """The integer that identifies the store to the operator, for the store's lifetime."""
    if store not in _handles:
        _handles[store] = next(_next_handle)
        _stores[_handles[store]] = store
    return _handles[store]


def _store_of(handle: int) -> ExpertStore:
    store = _stores.get(handle)
    if store is None:
        raise RuntimeError(f"expert store {handle} was deleted; keep the ExpertStore alive as long as its graph")
    return store


class PlacedExperts(Protocol):
    """Computes a store's experts for tensors on `device`; implemented by the placement engine."""

    @property
    def device(self) -> torch.device: ...

    def __call__(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, factors: LoraFactors | None, dropout: Dropout, retain: bool
    ) -> Tensor: ...

    def forward_mixed(self, hidden: Tensor, ids: Tensor, weights: Tensor, lora: MixedLora) -> Tensor:
        """Multi-LoRA inference: every row has its own adapter or none."""
        ...


_placed: weakref.WeakKeyDictionary[ExpertStore, PlacedExperts] = weakref.WeakKeyDictionary()


def place_store(store: ExpertStore, placed: PlacedExperts | None) -> None:
    """Dispatch tensors on `placed.device` to `placed`; None: to the CPU."""
    _placed.pop(store, None)
    if placed is not None:
        _placed[store] = placed


def placed_for(store: ExpertStore, device: torch.device) -> PlacedExperts | None:
    placed = _placed.get(store)
    return placed if placed is not None and placed.device == device else None


def is_placed(store: ExpertStore) -> bool:
    return store in _placed


def _factors(tensors: Sequence[Tensor], roles: str, scales: Sequence[float]) -> LoraFactors:
    gate, up, down = scales
    return LoraFactors(tuple(roles.split()), tuple(tensors), (gate, up, down))


@torch.library.custom_op("ktransformers::experts", mutates_args=(), device_types="cpu")
def experts(
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
) -> tuple[Tensor, Tensor]:
    layer = _store_of(store)

    def compute() -> tuple[Tensor, Tensor]:
        keep = layer.new_keep(*ids.shape) if retain else hidden.new_empty(0, dtype=torch.uint8)
        adapters = [packed_adapter(layer, _factors(lora, roles, scales))] if lora else []
        out = layer.forward(
            hidden,
            ids,
            weights,
            keep=keep if retain else None,
            adapters=adapters,
            dropout=Dropout(dropout, seed),
            needs_grad=True,
        )
        return out, keep

    out, keep = compute_or_replay(compute, layer)
    return out, keep


@experts.register_fake
def _(
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
) -> tuple[Tensor, Tensor]:
    size = _store_of(store).keep_bytes(*ids.shape) if retain else 0
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    return out, hidden.new_empty(size, dtype=torch.uint8)


@torch.library.custom_op("ktransformers::experts_backward", mutates_args=(), device_types="cpu")
def experts_backward(
    grad_out: Tensor,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    keep: Tensor,
    lora: Sequence[Tensor],
    store: int,
    roles: str,
    scales: Sequence[float],
    lora_needs_grad: bool,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`lora_needs_grad`: compute gradients of the factors; without, the list is empty."""
    layer = _store_of(store)
    adapters: list[_core.Adapter] = []
    grads: list[Tensor] = []
    targets = None
    factors = _factors(lora, roles, scales)
    if lora:
        adapters = [packed_adapter(layer, factors)]
        if lora_needs_grad:
            grads, views = empty_gradients(factors)
            targets = [views]
    grad_hidden, grad_weights = layer.backward(
        grad_out.contiguous(),
        hidden,
        ids,
        weights,
        keep=keep if keep.numel() else None,
        adapters=adapters,
        factors=targets,
        dropout=Dropout(dropout, seed),
    )
    return grad_hidden, grad_weights.to(weights.dtype), match_factor_strides(layer, factors, grads) if grads else grads


@experts_backward.register_fake
def _(
    grad_out: Tensor,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    keep: Tensor,
    lora: Sequence[Tensor],
    store: int,
    roles: str,
    scales: Sequence[float],
    lora_needs_grad: bool,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    grads = []
    for tensor in lora if lora_needs_grad else ():
        memory_format = torch.preserve_format if experts_innermost(tensor) else torch.contiguous_format
        grads.append(torch.empty_like(tensor, memory_format=memory_format))
    return torch.empty_like(hidden, memory_format=torch.contiguous_format), torch.empty_like(weights), grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, ids, weights, lora, store, roles, scales, _, dropout, seed = inputs
    ctx.save_for_backward(hidden, ids, weights, output[1], *lora)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else torch allocates zeros of the size of the retained bytes
    ctx.store, ctx.roles, ctx.scales, ctx.dropout, ctx.seed = store, roles, scales, dropout, seed
    ctx.factors, ctx.lora_needs_grad = len(lora), any(tensor.requires_grad for tensor in lora)


def _backward(ctx: Any, grad_out: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if grad_out is None:
        return (None,) * 3 + ([None] * ctx.factors,) + (None,) * 6
    hidden, ids, weights, keep, *lora = ctx.saved_tensors
    options = (ctx.store, ctx.roles, ctx.scales, ctx.lora_needs_grad, ctx.dropout, ctx.seed)
    grad_hidden, grad_weights, grads = experts_backward(grad_out, hidden, ids, weights, keep, lora, *options)
    return (grad_hidden, None, grad_weights, grads if ctx.lora_needs_grad else [None] * len(lora), *[None] * 6)


experts.register_autograd(_backward, setup_context=_save)


def apply_experts(
    store: ExpertStore,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    lora: ExpertLora | None = None,
    retain: bool = True,
    training: bool = False,
) -> Tensor:
    """Sum over k of weight * expert(hidden), in hidden's shape and dtype, on its device; LoRA is in host memory.

    `retain` keeps gate and up for backward (2 I elements per row); without, backward recomputes them. Dropout of LoRA's
    inputs draws its seed from torch's generator, so recomputation under checkpointing drops the same elements; without
    gradients nothing is dropped. `training`: weights are rounded as in a pass with gradients even if none are needed,
    as in the first of the two passes of reentrant checkpointing.
    """
    factors = LoraFactors((), (), (1.0, 1.0, 1.0)) if lora is None else factors_of(lora)
    inputs = (hidden, weights, *factors.tensors)
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    if needs_grad and store.w8a8:
        store.refuse_gradients()
    rate = lora.dropout if lora is not None and needs_grad else 0.0
    placed = placed_for(store, hidden.device)
    if placed is None and hidden.device.type != "cpu":
        out = apply_experts(store, *to_host(hidden, ids, weights), lora=lora, retain=retain, training=training)
        out = to_device(out, hidden.device)
        if lora is not None and needs_grad:
            _lora_prefetch.layer_done(store)
        return out
    if placed is not None:
        dropout = Dropout(rate, int(torch.randint(2**62, ())) if rate else 0)
        return placed(hidden, ids, weights, factors if factors.roles else None, dropout, retain and needs_grad)
    if not needs_grad and type(hidden) is Tensor:  # inference skips the operator's dispatch
        adapters = [packed_adapter(store, factors)] if factors.roles else []
        return store.forward(hidden, ids, weights, adapters=adapters, needs_grad=training)
    rows, top_k = hidden.reshape(-1, hidden.shape[-1]), ids.shape[-1]
    seed = int(torch.randint(2**62, ())) if rate else 0
    out, _ = experts(
        rows,
        ids.reshape(-1, top_k),
        weights.reshape(-1, top_k),
        list(factors.tensors),
        handle_of(store),
        " ".join(factors.roles),
        list(factors.scales),
        retain and needs_grad,
        rate,
        seed,
    )
    result: Tensor = out.view(hidden.shape)
    return result
