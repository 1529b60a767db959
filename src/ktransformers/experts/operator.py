"""The expert layer as a registered PyTorch operator with autograd; `apply_experts` is the entry point.

Shapes: hidden `[T, H]`, ids and routing weights `[T, k]`. Packed experts are not a tensor, so the operator takes an
integer handle of the `ExpertBackend` that computes them (`experts/backend.py`); LoRA's factors are tensors, passed as a
list with their roles. Everything that backward needs besides the inputs is an output: of local experts gate and up of
every row as opaque bytes (`retain`; without, backward recomputes them). So activation checkpointing may keep all of it
and never compute a layer again (`experts/checkpointing.py`), or drop all of it, and gradient accumulation and
GradScaler work unchanged. Gradients go to hidden states, routing weights and LoRA's factors; the experts are frozen.

A backend on a GPU returns gradients of the factors, which are in host memory, while they are still being copied there.
Its factors therefore pass through `WaitForGradients`, which does nothing forward; its tensors are in host memory, so
autograd calls its backward in another thread than the device's, and that thread waits for the copies while the device's
thread launches the layer before.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ktransformers.experts.backend import ExpertBackend, ExpertBatch
from ktransformers.experts.checkpointing import compute_or_replay
from ktransformers.experts.lora import ExpertLora, LoraPrefetch, MixedLora, experts_innermost
from ktransformers.experts.store import NO_DROPOUT, Dropout
from ktransformers.experts.transfer import to_device, to_host

_backends: weakref.WeakValueDictionary[int, ExpertBackend] = weakref.WeakValueDictionary()
_handles: weakref.WeakKeyDictionary[ExpertBackend, int] = weakref.WeakKeyDictionary()
_next_handle = itertools.count(1)
_lora_prefetch = LoraPrefetch()


def handle_of(backend: ExpertBackend) -> int:
    """The integer that identifies the backend to the operator, for the backend's lifetime."""
    if backend not in _handles:
        _handles[backend] = next(_next_handle)
        _backends[_handles[backend]] = backend
    return _handles[backend]


def _backend_of(handle: int) -> ExpertBackend:
    backend = _backends.get(handle)
    if backend is None:
        raise RuntimeError(f"expert backend {handle} was deleted; keep the model alive as long as its graph")
    return backend


class PendingGradients:
    """Copies of one call's factor gradients to host memory that are under way."""

    def __init__(self) -> None:
        self.waits: list[Callable[[], object]] = []
        self.handle = next(_next_handle)
        _pending[self.handle] = self

    def finish(self) -> None:
        while self.waits:
            self.waits.pop()()


_pending: weakref.WeakValueDictionary[int, PendingGradients] = weakref.WeakValueDictionary()


class WaitForGradients(torch.autograd.Function):
    """Identity forward; backward waits until the gradients have arrived in host memory."""

    @staticmethod
    def forward(ctx: Any, pending: PendingGradients, *lora: Tensor) -> tuple[Tensor, ...]:
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        return lora

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.pending.finish()
        return None, *grads


def _batch(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    lora: Sequence[Tensor],
    roles: str,
    scales: Sequence[float],
    dropout: float,
    seed: int,
) -> ExpertBatch:
    factors = ExpertLora.of_tensors(roles.split(), lora, scales) if lora else None
    return ExpertBatch(hidden, ids, weights, factors, Dropout(dropout, seed), needs_grad=True)


@torch.library.custom_op("ktransformers::experts", mutates_args=())
def experts(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    lora: Sequence[Tensor],
    backend: int,
    roles: str,
    scales: Sequence[float],
    retain: bool,
    dropout: float,
    seed: int,
    pending: int,
) -> tuple[Tensor, list[Tensor]]:
    """The layer's output, and what backward needs besides the inputs. `pending` is a handle of `PendingGradients`, or
    0."""
    computes, batch = _backend_of(backend), _batch(hidden, ids, weights, lora, roles, scales, dropout, seed)

    def compute() -> tuple[Tensor, ...]:
        out, saved = computes.forward(batch, retain)
        return out, *saved

    out, *saved = compute_or_replay(compute, computes.store)
    return out, saved


@experts.register_fake
def _(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    lora: Any,
    backend: int,
    roles: str,
    scales: Any,
    retain: bool,
    *_: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Of local experts; a layer that other devices or processes compute too cannot be traced."""
    store = _backend_of(backend).store
    size = store.keep_bytes(*ids.shape) if retain and store is not None else 0
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    return out, [hidden.new_empty(size, dtype=torch.uint8)]


def _experts_backward(
    grad_out: Tensor,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    saved: Sequence[Tensor],
    lora: Sequence[Tensor],
    backend: int,
    roles: str,
    scales: Sequence[float],
    lora_needs_grad: bool,
    dropout: float,
    seed: int,
    pending: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`lora_needs_grad`: compute gradients of the factors; without, the list is empty."""
    batch = _batch(hidden.detach(), ids, weights.detach(), lora, roles, scales, dropout, seed)
    with torch.no_grad():
        grads = _backend_of(backend).backward(batch, grad_out.contiguous(), tuple(saved), lora_needs_grad)
    if grads.wait is not None:
        _pending[pending].waits.append(grads.wait)
    return grads.hidden, grads.weights, grads.factors if lora_needs_grad else []


# What torch.compile traces.
experts_backward = torch.library.custom_op("ktransformers::experts_backward", _experts_backward, mutates_args=())


@experts_backward.register_fake
def _(grad_out: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    hidden, _, weights, _, lora, _, _, _, lora_needs_grad, *_ = inputs
    grads = []
    for tensor in lora if lora_needs_grad else ():
        memory_format = torch.preserve_format if experts_innermost(tensor) else torch.contiguous_format
        grads.append(torch.empty_like(tensor, memory_format=memory_format))
    return torch.empty_like(hidden, memory_format=torch.contiguous_format), torch.empty_like(weights), grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    hidden, ids, weights, lora, backend, roles, scales, _, dropout, seed, pending = inputs
    saved = output[1]
    ctx.save_for_backward(hidden, ids, weights, *saved, *lora)
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)  # else torch allocates zeros of the size of the retained bytes
    ctx.alive = _backend_of(backend)  # until the graph is released
    ctx.backend, ctx.saved, ctx.options = backend, len(saved), (roles, scales, dropout, seed, pending)
    ctx.factors, ctx.lora_needs_grad = len(lora), any(tensor.requires_grad for tensor in lora)


def _backward(ctx: Any, grad_out: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad_out is None:
        return (None,) * 3 + ([None] * ctx.factors,) + (None,) * 7
    hidden, ids, weights, *rest = ctx.saved_tensors
    saved, lora = rest[: ctx.saved], rest[ctx.saved :]
    roles, scales, *options = ctx.options
    inputs = (grad_out, hidden, ids, weights, saved, lora, ctx.backend, roles, scales, ctx.lora_needs_grad)
    backward = _experts_backward if type(grad_out) is Tensor else experts_backward
    grad_hidden, grad_weights, grads = backward(*inputs, *options)
    return (grad_hidden, None, grad_weights, grads if ctx.lora_needs_grad else [None] * len(lora), *[None] * 7)


experts.register_autograd(_backward, setup_context=_save)


def apply_experts(
    backend: ExpertBackend,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    lora: ExpertLora | None = None,
    mixed: MixedLora | None = None,
    retain: bool = True,
    training: bool = False,
) -> Tensor:
    """Sum over k of weight * expert(hidden), in hidden's shape and dtype, on its device; LoRA is in host memory.
    Tensors on another device than the backend's are copied there and the result back.

    `retain` keeps what backward would recompute: gate and up of local experts, 2 I elements per row. Dropout of LoRA's
    inputs draws its seed from torch's generator, so recomputation under checkpointing drops the same elements; without
    gradients nothing is dropped. `mixed`: inference, each row with an adapter of its own or none. `training`: weights
    are rounded as in a pass with gradients even if none are needed, as in the first of the two passes of reentrant
    checkpointing.
    """
    tensors = () if lora is None else lora.tensors
    needs_grad = mixed is None and torch.is_grad_enabled() and any(t.requires_grad for t in (hidden, weights, *tensors))
    if needs_grad and backend.store is not None and backend.store.w8a8:
        backend.store.refuse_gradients()
    if hidden.device != backend.device:
        inputs = to_host(hidden, ids, weights)
        out = apply_experts(backend, *inputs, lora=lora, mixed=mixed, retain=retain, training=training)
        if lora is not None and needs_grad and backend.store is not None:
            _lora_prefetch.layer_done(backend.store)
        return to_device(out, hidden.device)
    rows, top_k = hidden.reshape(-1, hidden.shape[-1]), ids.shape[-1]
    ids, row_weights = ids.reshape(-1, top_k), weights.reshape(-1, top_k)
    if mixed is not None or (not needs_grad and type(hidden) is Tensor):  # inference skips the operator's dispatch
        rounds = training and mixed is None
        return backend.infer(ExpertBatch(rows, ids, row_weights, lora, NO_DROPOUT, mixed, rounds)).view(hidden.shape)
    rate = lora.dropout if lora is not None and needs_grad else 0.0
    seed = int(torch.randint(2**62, ())) if rate else 0
    pending = PendingGradients() if tensors and backend.copies_gradients else None
    if pending is not None:
        tensors = WaitForGradients.apply(pending, *tensors)  # type: ignore[no-untyped-call]
    roles, scales = ("", (1.0, 1.0, 1.0)) if lora is None else (" ".join(lora.roles), lora.scales)
    options = (roles, list(scales), retain and needs_grad, rate, seed, 0 if pending is None else pending.handle)
    out, _ = experts(rows, ids, row_weights, list(tensors), handle_of(backend), *options)
    result: Tensor = out.view(hidden.shape)
    return result
