"""The one door from PyTorch to the expert kernels: `apply_experts`, operators that autograd knows.

Shapes: hidden `[T, H]`, ids and routing weights `[T, k]`. The packed experts are no tensor, so an operator gets them as
a handle, an integer that leads to a living store; LoRA's factors are tensors, given as a list with their roles. It
returns the output and, with `retain`, gate and up of every row as opaque bytes; without, backward computes them again.
Both being outputs of a registered operator, selective checkpointing may keep them or let go of them, and gradient
accumulation, non-reentrant checkpointing and GradScaler need nothing from us. Gradients go to hidden states, routing
weights and LoRA's factors; the experts are frozen. Without LoRA backward does no work for it. Tensors on another device
come down and go up again, unless the placement engine (`place/`) has taken the store over: it is told here, from above.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.nn.checkpointing import computed
from ktransformers.nn.lora import ExpertLora
from ktransformers.nn.lora_factors import LoraFactors, experts_innermost, factors_of, gradients_like, packed, turned
from ktransformers.nn.lora_prefetch import LoraPrefetch
from ktransformers.nn.mixed_lora import MixedLora
from ktransformers.nn.store import Dropout, ExpertStore
from ktransformers.nn.transfer import down, up

_stores: weakref.WeakValueDictionary[int, ExpertStore] = weakref.WeakValueDictionary()
_handles: weakref.WeakKeyDictionary[ExpertStore, int] = weakref.WeakKeyDictionary()
_count = itertools.count(1)
_ahead = LoraPrefetch()


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


class PlacedExperts(Protocol):
    """Whoever computes a store's experts for tensors on its device."""

    @property
    def device(self) -> torch.device: ...

    def __call__(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, factors: LoraFactors | None, dropout: Dropout, retain: bool
    ) -> Tensor: ...

    def several(self, hidden: Tensor, ids: Tensor, weights: Tensor, lora: MixedLora) -> Tensor:
        """Without gradients, each row with an adapter of its own or none."""
        ...


_placed: weakref.WeakKeyDictionary[ExpertStore, PlacedExperts] = weakref.WeakKeyDictionary()


def place_store(store: ExpertStore, placed: PlacedExperts | None) -> None:
    """From now on `placed` computes what comes from its device; None: the CPU does, as before."""
    _placed.pop(store, None)
    if placed is not None:
        _placed[store] = placed


def placed_for(store: ExpertStore, device: torch.device) -> PlacedExperts | None:
    found = _placed.get(store)
    return found if found is not None and found.device == device else None


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
    def compute() -> tuple[Tensor, Tensor]:
        found = _store_of(store)
        keep = found.new_keep(*ids.shape) if retain else hidden.new_empty(0, dtype=torch.uint8)
        adapters = [packed(found, _factors(lora, roles, scales))] if lora else []
        drop, kept = Dropout(dropout, seed), keep if retain else None
        out = found.forward(hidden, ids, weights, keep=kept, adapters=adapters, dropout=drop, learns=True)
        return out, keep

    out, keep = computed(compute)
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
    learns: bool,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`learns`: gradients of the factors are wanted; without, the list is empty."""
    found = _store_of(store)
    adapters: list[_core.Adapter] = []
    grads: list[Tensor] = []
    targets = None
    factors = _factors(lora, roles, scales)
    if lora:
        adapters = [packed(found, factors)]
        if learns:
            grads, views = gradients_like(factors)
            targets = [views]
    grad_hidden, grad_weights = found.backward(
        grad_out.contiguous(),
        hidden,
        ids,
        weights,
        keep=keep if keep.numel() else None,
        adapters=adapters,
        factors=targets,
        dropout=Dropout(dropout, seed),
    )
    return grad_hidden, grad_weights.to(weights.dtype), turned(found, factors, grads) if grads else grads


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
    learns: bool,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    orders = [torch.preserve_format if experts_innermost(tensor) else torch.contiguous_format for tensor in lora]
    grads = [torch.empty_like(t, memory_format=order) for t, order in zip(lora, orders, strict=True)] if learns else []
    return torch.empty_like(hidden, memory_format=torch.contiguous_format), torch.empty_like(weights), grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, ids, weights, lora, store, roles, scales, _, dropout, seed = inputs
    ctx.save_for_backward(hidden, ids, weights, output[1], *lora)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # zeros as large as what is kept would be made for it
    ctx.store, ctx.roles, ctx.scales, ctx.dropout, ctx.seed = store, roles, scales, dropout, seed
    ctx.factors, ctx.learns = len(lora), any(tensor.requires_grad for tensor in lora)


def _backward(ctx: Any, grad_out: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if grad_out is None:
        return (None,) * 3 + ([None] * ctx.factors,) + (None,) * 6
    hidden, ids, weights, keep, *lora = ctx.saved_tensors
    given = (ctx.store, ctx.roles, ctx.scales, ctx.learns, ctx.dropout, ctx.seed)
    grad_hidden, grad_weights, grads = experts_backward(grad_out, hidden, ids, weights, keep, lora, *given)
    return (grad_hidden, None, grad_weights, grads if ctx.learns else [None] * len(lora), *[None] * 6)


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

    `retain` keeps gate and up for backward (2 I numbers a row); without, backward computes them again. Dropout of
    LoRA's inputs draws its seed from torch's generator, so recomputation under checkpointing drops the same elements;
    without gradients nothing is dropped. `training`: weights are those of a backward pass even where no gradients are
    wanted, as in the first of the two passes of reentrant checkpointing.
    """
    factors = LoraFactors((), (), (1.0, 1.0, 1.0)) if lora is None else factors_of(lora)
    inputs = (hidden, weights, *factors.tensors)
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    if learns and store.w8a8:
        store.refuse_gradients()
    share = lora.dropout if lora is not None and learns else 0.0
    placed = placed_for(store, hidden.device)
    if placed is None and hidden.device.type != "cpu":
        rows, places, shares = down(hidden, ids, weights)
        out = apply_experts(store, rows, places, shares, lora=lora, retain=retain, training=training)
        out = up(out, hidden.device)
        if lora is not None and learns:
            _ahead.passed(store)
        return out
    if placed is not None:
        dropout = Dropout(share, int(torch.randint(2**62, ())) if share else 0)
        return placed(hidden, ids, weights, factors if factors.roles else None, dropout, retain and learns)
    if not learns and type(hidden) is Tensor:  # plain inference pays for no operator
        adapters = [packed(store, factors)] if factors.roles else []
        return store.forward(hidden, ids, weights, adapters=adapters, learns=training)
    rows, top_k = hidden.reshape(-1, hidden.shape[-1]), ids.shape[-1]
    seed = int(torch.randint(2**62, ())) if share else 0
    out, _ = experts(
        rows,
        ids.reshape(-1, top_k),
        weights.reshape(-1, top_k),
        list(factors.tensors),
        handle_of(store),
        " ".join(factors.roles),
        list(factors.scales),
        retain and learns,
        share,
        seed,
    )
    result: Tensor = out.view(hidden.shape)
    return result
