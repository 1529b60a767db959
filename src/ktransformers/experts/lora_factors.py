"""LoRA factors packed for the native core: tensors by role, cached per store, packed again when they have changed.

Roles: `gate_a`, `up_a`, `down_a` [E, r, in]; `gate_b`, `up_b`, `down_b` [E, out, r]; `gate_up_b` [E, 2I, r] has gate's
rows before up's. If `up_a` is absent, up shares gate's A. The cache key is the address, shape, strides and dtype of the
tensors, and an entry holds references to them, because a freed address could be reused by another tensor. A changed
version counter invalidates the packed copy; a write through `.data` does not increment it, as in autograd.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.experts import buffer_pool
from ktransformers.experts.lora import ExpertLora, Factor
from ktransformers.experts.store import ExpertStore
from ktransformers.ground.errors import InputError

MAX_PACKED_ADAPTERS = 4  # cached per store: the adapter of a training step, and a few that alternate


@dataclass(frozen=True)
class LoraFactors:
    """The tensors of one adapter by role, and the scales of gate, up and down."""

    roles: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    scales: tuple[float, float, float]

    def by_core_role(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Role of the core -> tensor, for tensors in the order of `self.tensors`; `gate_up_b` is split into views."""
        by_role = dict(zip(self.roles, tensors, strict=True))
        fused = by_role.pop("gate_up_b", None)
        if fused is not None:
            half = fused.shape[1] // 2
            by_role |= {"gate_b": fused[:, :half], "up_b": fused[:, half:]}
        return by_role


CORE_ROLES = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")


def factors_of(lora: ExpertLora) -> LoraFactors:
    """The factors' tensors by role. A shared A appears once."""
    by_role: dict[str, Tensor] = {}
    gate, up, down, fused = lora.gate, lora.up, lora.down, lora.gate_up
    if fused is not None:
        if gate is not None or up is not None:
            raise InputError("lora", "gate_up with gate or up", "gate_up, or gate and up")
        by_role |= {"gate_a": fused.a, "gate_up_b": fused.b}
        gate = up = fused
    else:
        if gate is not None:
            by_role |= {"gate_a": gate.a, "gate_b": gate.b}
        if up is not None:
            if gate is None or up.a is not gate.a:
                by_role["up_a"] = up.a
            by_role["up_b"] = up.b
    if down is not None:
        by_role |= {"down_a": down.a, "down_b": down.b}
    if not by_role:
        raise InputError("lora", "no factor", "at least one of gate_up, gate, up and down")
    return LoraFactors(tuple(by_role), tuple(by_role.values()), (_scale(gate), _scale(up), _scale(down)))


def _scale(factor: Factor | None) -> float:
    return 1.0 if factor is None else factor.scale


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


@dataclass
class _PackedAdapter:
    adapter: _core.Adapter
    factors: LoraFactors  # detached; these references keep their memory from being reused
    versions: tuple[int, ...] | None = None  # None: not packed yet, or inference tensors

    def pack_if_changed(self) -> None:
        """Versions are read before packing, so a write during packing is detected by the next call."""
        versions = _versions(self.factors)
        if versions is not None and self.versions == versions:
            return
        views = self.factors.by_core_role(self.factors.tensors)
        gate, up, down = self.factors.scales
        self.adapter.pack(
            views.get("gate_a"),
            views.get("gate_b"),
            views.get("up_a"),
            views.get("up_b"),
            views.get("down_a"),
            views.get("down_b"),
            gate_scale=gate,
            up_scale=up,
            down_scale=down,
        )
        self.versions = versions


class _PackedCache:
    """LRU cache of a store's packed adapters, least recently used first. The lock is held while packing."""

    def __init__(self) -> None:
        self.entries: OrderedDict[tuple[Any, ...], _PackedAdapter] = OrderedDict()
        self.lock = threading.Lock()


_caches: weakref.WeakKeyDictionary[ExpertStore, _PackedCache] = weakref.WeakKeyDictionary()


def packed_adapter(store: ExpertStore, factors: LoraFactors) -> _core.Adapter:
    """The factors in the core's layout; packed only if they are not cached or have changed."""
    cache = _caches.setdefault(store, _PackedCache())
    key = _key(factors)
    with cache.lock:
        entry = cache.entries.get(key)
        if entry is None:
            detached = replace(factors, tensors=tuple(tensor.detach() for tensor in factors.tensors))
            adapter = _new_adapter(store, detached.by_core_role(detached.tensors))
            entry = cache.entries[key] = _PackedAdapter(adapter, detached)
            while len(cache.entries) > MAX_PACKED_ADAPTERS:
                cache.entries.popitem(last=False)
        cache.entries.move_to_end(key)
        entry.pack_if_changed()
    return entry.adapter


def repack_last(store: ExpertStore) -> None:
    """Pack the most recently used adapter if it has changed. Inference tensors have no version and are skipped."""
    cache = _caches.get(store)
    if cache is not None:
        with cache.lock:
            last = next(reversed(cache.entries.values()), None)
            if last is not None and _versions(last.factors) is not None:
                last.pack_if_changed()


def is_adapter_packed(store: ExpertStore, factors: LoraFactors) -> bool:
    """Whether `packed_adapter` would return a cached adapter without packing."""
    cache = _caches.get(store)
    entry = None if cache is None else cache.entries.get(_key(factors))
    return entry is not None and entry.versions is not None and entry.versions == _versions(factors)


def _key(factors: LoraFactors) -> tuple[Any, ...]:
    return (factors.roles, factors.scales, *(_identity(tensor) for tensor in factors.tensors))


def _versions(factors: LoraFactors) -> tuple[int, ...] | None:
    """None for inference tensors, which have no version counter and are packed at every call."""
    if any(tensor.is_inference() for tensor in factors.tensors):
        return None
    return tuple(tensor._version for tensor in factors.tensors)


def _new_adapter(store: ExpertStore, views: dict[str, Tensor]) -> _core.Adapter:
    def rank(role: str) -> int:
        tensor = views.get(role)
        if tensor is None:
            return 0
        if not isinstance(tensor, Tensor) or tensor.dim() != 3:
            raise InputError(role, f"shape {list(tensor.shape)}", "[experts, out, rank]")
        return tensor.shape[2]

    shared = "gate_a" in views and "up_b" in views and "up_a" not in views
    return store.new_adapter(rank("gate_b"), rank("up_b"), rank("down_b"), shared=shared)


def empty_gradients(factors: LoraFactors, pinned: bool = False) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
    """Uninitialised tensors for the gradients, in the order of `factors.tensors`, and views of them in the order of
    `CORE_ROLES`."""
    empty = functools.partial(torch.empty, pin_memory=True) if pinned else buffer_pool.empty
    grads = [empty(tensor.shape, dtype=tensor.dtype) for tensor in factors.tensors]
    views = factors.by_core_role(grads)
    return grads, tuple(views.get(role) for role in CORE_ROLES)


def experts_innermost(tensor: Tensor) -> bool:
    """Whether a tensor `[E, out, r]` is stored as `[out, r, E]`."""
    return tensor.shape[0] > 1 and tensor[0].numel() > 1 and tensor.permute(1, 2, 0).is_contiguous()


def match_factor_strides(store: ExpertStore, factors: LoraFactors, grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients with the strides of their factors. PEFT's B has the experts innermost, and autograd would transpose
    its gradient in one thread with strided, cache-missing accesses."""
    strided = []
    for tensor, grad in zip(factors.tensors, grads, strict=True):
        if experts_innermost(tensor):
            experts = tensor.shape[0]
            transposed = buffer_pool.empty((*tensor.shape[1:], experts), tensor.dtype)
            store.transpose(grad.view(experts, -1), transposed.view(-1, experts))
            grad = transposed.permute(2, 0, 1)
        strided.append(grad)
    return strided
