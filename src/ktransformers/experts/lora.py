"""LoRA of one expert layer: the factors as the operator takes them, adapters by row, and packing for the native core.

`ExpertLora` has up to four low-rank factors, each for all experts at once (`a` [E, r, in], `b` [E, out, r]), with any
strides, in host memory. Nothing here is a parameter or a module: the factors are views of the tensors that an adapter
framework trains, so gradients flow to those and the framework needs no knowledge of the operator. The operator takes
tensors by role: `gate_a`, `up_a`, `down_a`; `gate_b`, `up_b`, `down_b`; `gate_up_b` [E, 2I, r] has gate's rows before
up's. If `up_a` is absent, up shares gate's A.

`MixedLora` is multi-LoRA inference: one forward pass without gradients in which every row of the batch has its own
adapter or none. The ContextVar `_mixed_lora` carries it past the stock model to each expert layer.

`packed_adapter` packs factors for the core, once: the packed copy is cached per store, by address, shape, strides and
dtype of the tensors, and an entry holds references to them, because a freed address could be reused by another tensor.
It is packed again when the version counter of a tensor has changed. torch's fused optimisers do not increment it, so an
optimiser hook does, after every step of any optimiser; a write through `.data` does not, as in autograd. An optimiser
step changes every layer's factors, and packing takes milliseconds for which the layer's experts would wait. With
attention on a GPU the CPU is idle between two layers, so `LoraPrefetch` packs the factors of the layer that followed in
the previous pass in a thread. A forward pass that needs factors which are being packed waits on the cache's lock.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ktransformers import _core
from ktransformers.experts import buffer_pool
from ktransformers.experts.store import ExpertStore
from ktransformers.ground.errors import InputError
from ktransformers.ground.pool import avoid_pool_cpus

MAX_PACKED_ADAPTERS = 4  # cached per store: the adapter of a training step, and a few that alternate
CORE_ROLES = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")


@dataclass(frozen=True)
class LoraPair:
    """y += scaling * B (A x): a [r, in] and b [out, r], or of all experts a [E, r, in] and b [E, out, r]; any strides,
    and both may carry graphs."""

    a: Tensor
    b: Tensor
    scaling: float = 1.0

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def delta(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """`[out, in]`, or `[E, out, in]`."""
        return (self.b.to(dtype) @ self.a.to(dtype)) * self.scaling


@dataclass(frozen=True, eq=False)
class ExpertLora:
    """The LoRA of one expert layer; each factor may be None.

    `gate_up` is one factor with a shared A whose B has gate's rows before up's (b [E, 2I, r]). Alternatively `gate` and
    `up` are separate (b [E, I, r]); the same tensor object as `a` in both is a shared A too. Experts without a gate use
    `up`. `down` has b [E, H, r]. `dropout` is the probability with which training drops an element of LoRA's input.
    """

    gate_up: LoraPair | None = None
    gate: LoraPair | None = None
    up: LoraPair | None = None
    down: LoraPair | None = None
    dropout: float = 0.0

    @classmethod
    def of_tensors(cls, roles: Sequence[str], tensors: Sequence[Tensor], scales: Sequence[float]) -> ExpertLora:
        """The reverse of `roles`, `tensors` and `scales`."""
        by_role = dict(zip(roles, tensors, strict=True))
        shared = by_role.get("gate_a")

        def factor(name: str, a: Tensor | None, scale: float) -> LoraPair | None:
            b = by_role.get(f"{name}_b")
            return None if a is None or b is None else LoraPair(a, b, scale)

        return cls(
            factor("gate_up", shared, scales[0]),
            factor("gate", shared, scales[0]),
            factor("up", by_role.get("up_a", shared), scales[1]),
            factor("down", by_role.get("down_a"), scales[2]),
        )

    @functools.cached_property
    def by_role(self) -> dict[str, Tensor]:
        """A shared A appears once."""
        tensors: dict[str, Tensor] = {}
        gate, up, down, fused = self.gate, self.up, self.down, self.gate_up
        if fused is not None:
            if gate is not None or up is not None:
                raise InputError("lora", "gate_up with gate or up", "gate_up, or gate and up")
            tensors |= {"gate_a": fused.a, "gate_up_b": fused.b}
        if gate is not None:
            tensors |= {"gate_a": gate.a, "gate_b": gate.b}
        if up is not None:
            if gate is None or up.a is not gate.a:
                tensors["up_a"] = up.a
            tensors["up_b"] = up.b
        if down is not None:
            tensors |= {"down_a": down.a, "down_b": down.b}
        if not tensors:
            raise InputError("lora", "no factor", "at least one of gate_up, gate, up and down")
        return tensors

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.by_role)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.by_role.values())

    @property
    def scales(self) -> tuple[float, float, float]:
        """Of gate, up and down."""
        gate, up, down = (
            1.0 if factor is None else factor.scaling
            for factor in (self.gate_up or self.gate, self.gate_up or self.up, self.down)
        )
        return gate, up, down

    def by_core_role(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Role of the core -> tensor, for tensors in the order of `self.tensors`; `gate_up_b` is split into views."""
        by_role = dict(zip(self.roles, tensors, strict=True))
        fused = by_role.pop("gate_up_b", None)
        if fused is not None:
            half = fused.shape[1] // 2
            by_role |= {"gate_b": fused[:, :half], "up_b": fused[:, half:]}
        return by_role


def _increment_versions(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        increment_version([parameter for parameter in group["params"] if parameter.device.type == "cpu"])


register_optimizer_step_post_hook(_increment_versions)


@dataclass(frozen=True)
class MixedLora:
    """`rows` is in host memory, except in a pass that is captured as a CUDA graph: there it is on the device, and every
    replay reads it (`place/host_callback.py`). `factors` has the adapters as tensors, for a device that computes
    experts itself; without them the CPU computes all experts."""

    rows: Tensor  # int32 [T], in the order of the hidden states: index into `adapters`, or -1
    adapters: Sequence[_core.Adapter]  # of a layer on several nodes: `SharedLora` of serve/nodes/remote_layer.py
    factors: Sequence[ExpertLora] = ()


_mixed_lora: ContextVar[Mapping[nn.Module, MixedLora] | None] = ContextVar("mixed_lora", default=None)


@contextmanager
def use_mixed_lora(layers: Mapping[nn.Module, MixedLora]) -> Iterator[None]:
    token = _mixed_lora.set(layers)
    try:
        yield
    finally:
        _mixed_lora.reset(token)


def current_mixed_lora(module: nn.Module) -> MixedLora | None:
    """The adapters of this layer in the running pass; None: experts without LoRA, or no multi-LoRA pass."""
    layers = _mixed_lora.get()
    return None if layers is None else layers.get(module)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


@dataclass
class _PackedAdapter:
    adapter: _core.Adapter
    factors: ExpertLora  # detached; these references keep their memory from being reused
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


def packed_adapter(store: ExpertStore, factors: ExpertLora) -> _core.Adapter:
    """The factors in the core's layout; packed only if they are not cached or have changed."""
    cache = _caches.setdefault(store, _PackedCache())
    key = _key(factors)
    with cache.lock:
        entry = cache.entries.get(key)
        if entry is None:
            detached = ExpertLora.of_tensors(
                factors.roles, [tensor.detach() for tensor in factors.tensors], factors.scales
            )
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


def _key(factors: ExpertLora) -> tuple[Any, ...]:
    return (factors.roles, factors.scales, *(_identity(tensor) for tensor in factors.tensors))


def _versions(factors: ExpertLora) -> tuple[int, ...] | None:
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


def empty_gradients(factors: ExpertLora, pinned: bool = False) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
    """Uninitialised tensors for the gradients, in the order of `factors.tensors`, and views of them in the order of
    `CORE_ROLES`."""
    empty = functools.partial(torch.empty, pin_memory=True) if pinned else buffer_pool.empty
    grads = [empty(tensor.shape, dtype=tensor.dtype) for tensor in factors.tensors]
    views = factors.by_core_role(grads)
    return grads, tuple(views.get(role) for role in CORE_ROLES)


def experts_innermost(tensor: Tensor) -> bool:
    """Whether a tensor `[E, out, r]` is stored as `[out, r, E]`."""
    return tensor.shape[0] > 1 and tensor[0].numel() > 1 and tensor.permute(1, 2, 0).is_contiguous()


def match_factor_strides(store: ExpertStore, factors: ExpertLora, grads: Sequence[Tensor]) -> list[Tensor]:
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


class LoraPrefetch:
    """Learns the order of layers from the forward passes. Without a `worker` it starts a thread of its own."""

    def __init__(self, worker: Executor | None = None) -> None:
        self._worker = worker
        self._previous: weakref.ReferenceType[ExpertStore] | None = None
        self._successors: weakref.WeakKeyDictionary[ExpertStore, weakref.ReferenceType[ExpertStore]]
        self._successors = weakref.WeakKeyDictionary()

    def layer_done(self, store: ExpertStore) -> None:
        """A layer with LoRA has been computed. Recomputation inside a backward pass is ignored: its factors are packed
        already, and its layers run in another order."""
        if torch._C._current_graph_task_id() != -1:
            return
        previous = None if self._previous is None else self._previous()
        if previous is not None and previous is not store:
            self._successors[previous] = weakref.ref(store)
        self._previous = weakref.ref(store)
        successor = self._successors.get(store)
        if successor is not None and (target := successor()) is not None:
            self._executor().submit(repack_last, target)

    def _executor(self) -> Executor:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "kt-pack", initializer=avoid_pool_cpus)
        return self._worker
