"""LoRA factors on their way into the core: named tensors, packed for one store, packed again when they have changed.

Roles: `gate_a`, `up_a`, `down_a` [E, r, in]; `gate_b`, `up_b`, `down_b` [E, out, r]; `gate_up_b` [E, 2I, r] is gate's
rows before up's. Where `up_a` is absent, up shares gate's A. The surprising decision: what was packed is known by the
memory, strides and version of its tensors, and the tensors are kept, so that an address cannot come to mean another
tensor. Whoever writes through `.data` escapes the version count, as he escapes autograd's.
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
from ktransformers.errors import InputError
from ktransformers.nn import buffer_pool
from ktransformers.nn.lora import ExpertLora, Factor
from ktransformers.nn.store import ExpertStore

KEPT = 4  # packed adapters that a store remembers: those of one step, and a few that alternate


@dataclass(frozen=True)
class LoraFactors:
    """The tensors of one adapter by role, and the scales of gate, up and down."""

    roles: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    scales: tuple[float, float, float]

    def halves(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Tensors in the places of `self.tensors` by the core's roles: `gate_up_b` is cut into views."""
        found = dict(zip(self.roles, tensors, strict=True))
        fused = found.pop("gate_up_b", None)
        if fused is not None:
            half = fused.shape[1] // 2
            found |= {"gate_b": fused[:, :half], "up_b": fused[:, half:]}
        return found


CORE_ROLES = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")


def factors_of(lora: ExpertLora) -> LoraFactors:
    """By role. A shared A appears once."""
    found: dict[str, Tensor] = {}
    gate, up, down, fused = lora.gate, lora.up, lora.down, lora.gate_up
    if fused is not None:
        if gate is not None or up is not None:
            raise InputError("lora", "gate_up beside gate or up", "gate_up, or gate and up")
        found |= {"gate_a": fused.a, "gate_up_b": fused.b}
        gate = up = fused
    else:
        if gate is not None:
            found |= {"gate_a": gate.a, "gate_b": gate.b}
        if up is not None:
            if gate is None or up.a is not gate.a:
                found["up_a"] = up.a
            found["up_b"] = up.b
    if down is not None:
        found |= {"down_a": down.a, "down_b": down.b}
    if not found:
        raise InputError("lora", "no factor", "at least one of gate_up, gate, up and down")
    return LoraFactors(tuple(found), tuple(found.values()), (_scale(gate), _scale(up), _scale(down)))


def _scale(factor: Factor | None) -> float:
    return 1.0 if factor is None else factor.scale


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


@dataclass
class _Packed:
    adapter: _core.Adapter
    factors: LoraFactors  # detached; they keep the memory from being given to others
    versions: tuple[int, ...] | None = None  # None: not packed yet, or not known

    def renew(self) -> None:
        """Packs, if there is something new. Versions are read first: a change meanwhile is found the next time."""
        versions = _versions(self.factors)
        if versions is not None and self.versions == versions:
            return
        views = self.factors.halves(self.factors.tensors)
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
    """What a store has packed, the last used last; one thread at a time packs."""

    def __init__(self) -> None:
        self.known: OrderedDict[tuple[Any, ...], _Packed] = OrderedDict()
        self.lock = threading.Lock()


_shelves: weakref.WeakKeyDictionary[ExpertStore, _PackedCache] = weakref.WeakKeyDictionary()


def packed(store: ExpertStore, factors: LoraFactors) -> _core.Adapter:
    """The factors as the core reads them; packed only if they are new or have changed."""
    shelf = _shelves.setdefault(store, _PackedCache())
    key = _key(factors)
    with shelf.lock:
        entry = shelf.known.get(key)
        if entry is None:
            mine = replace(factors, tensors=tuple(tensor.detach() for tensor in factors.tensors))
            entry = shelf.known[key] = _Packed(_new_adapter(store, mine.halves(mine.tensors)), mine)
            while len(shelf.known) > KEPT:
                shelf.known.popitem(last=False)
        shelf.known.move_to_end(key)
        entry.renew()
    return entry.adapter


def pack_again(store: ExpertStore) -> None:
    """What was last asked for, if it has changed since then; of inference tensors nobody knows."""
    shelf = _shelves.get(store)
    if shelf is not None:
        with shelf.lock:
            last = next(reversed(shelf.known.values()), None)
            if last is not None and _versions(last.factors) is not None:
                last.renew()


def is_packed(store: ExpertStore, factors: LoraFactors) -> bool:
    """Whether `packed` would have nothing to do."""
    shelf = _shelves.get(store)
    entry = None if shelf is None else shelf.known.get(_key(factors))
    return entry is not None and entry.versions is not None and entry.versions == _versions(factors)


def _key(factors: LoraFactors) -> tuple[Any, ...]:
    return (factors.roles, factors.scales, *(_identity(tensor) for tensor in factors.tensors))


def _versions(factors: LoraFactors) -> tuple[int, ...] | None:
    """None: inference tensors count none, so they are packed every time."""
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


def gradients_like(factors: LoraFactors, pinned: bool = False) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
    """New tensors for the gradients, in the places of `factors.tensors`, and the same memory in the core's order."""
    empty = functools.partial(torch.empty, pin_memory=True) if pinned else buffer_pool.empty
    made = [empty(tensor.shape, dtype=tensor.dtype) for tensor in factors.tensors]
    views = factors.halves(made)
    return made, tuple(views.get(role) for role in CORE_ROLES)


def experts_innermost(tensor: Tensor) -> bool:
    """`[E, out, r]` that lies as `[out, r, E]`."""
    return tensor.shape[0] > 1 and tensor[0].numel() > 1 and tensor.permute(1, 2, 0).is_contiguous()


def turned(store: ExpertStore, factors: LoraFactors, grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients with the strides of their factors. PEFT's B has the experts innermost, and autograd would turn its
    gradient by one thread, in the worst order for a cache."""
    found = []
    for tensor, grad in zip(factors.tensors, grads, strict=True):
        if experts_innermost(tensor):
            experts = tensor.shape[0]
            laid = buffer_pool.empty((*tensor.shape[1:], experts), tensor.dtype)
            store.transpose(grad.view(experts, -1), laid.view(-1, experts))
            grad = laid.permute(2, 0, 1)
        found.append(grad)
    return found
