"""LoRA factors of one layer on the device: uploaded when they have changed, and their gradients back to host memory.

On the device gate and up have one stacked pair of factors, as in the native core: their A on top of each other, their B
side by side with zeros where the other's rank would be, the scale folded into B before rounding, ranks padded to a
multiple of 8. `factor_slots` says which part of a pair each of PEFT's tensors is; stacking and reading gradients use
the same table. Factors live in host memory, where the optimiser updates them. PEFT's B `[E, out, r]` is a view whose
experts are the innermost dimension, so tensors and gradients are copied in memory order and permuted on the device.
Stacked factors are cached on the device within a byte budget, so that backward finds what forward uploaded; the cache
holds references to the tensors, because they are identified by address.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.experts.lora import ExpertLora, LoraPair
from ktransformers.experts.transfer import DeviceToHost, start_device_to_host
from ktransformers.place.gpu.grouped_mlp import ALIGN, GroupLora
from ktransformers.place.gpu.pinned import RegisteredMemory
from ktransformers.plan.memory import ENGINE_LIMITS

CACHED_BYTES = ENGINE_LIMITS.factor_bytes


@dataclass(frozen=True)
class FactorSlot:
    """The part of a stacked pair that one of PEFT's tensors is: a [E, r, in] in A, b [E, out, r] in B."""

    pair: str  # first or down
    factor: str  # a or b
    rank: slice
    rows: slice  # outputs of B
    scale: float


def factor_slots(
    roles: Sequence[str], tensors: Sequence[Tensor], scales: tuple[float, float, float]
) -> dict[str, FactorSlot]:
    """By role. `gate_up_b` has gate's scale for both halves, as in `ExpertLora`."""
    sizes = {role: (t.shape[1] if role.endswith("_a") else t.shape[2]) for role, t in zip(roles, tensors, strict=True)}
    outputs = {role: t.shape[1] for role, t in zip(roles, tensors, strict=True)}
    gate = sizes.get("gate_a", 0)
    up = slice(gate, gate + sizes["up_a"]) if "up_a" in sizes else slice(0, gate)
    all_rows = slice(None)
    half_rows = outputs.get("up_b", outputs.get("gate_b", 0))
    slots = {
        "gate_a": FactorSlot("first", "a", slice(0, gate), all_rows, 1.0),
        "gate_b": FactorSlot("first", "b", slice(0, gate), slice(0, half_rows), scales[0]),
        "gate_up_b": FactorSlot("first", "b", slice(0, gate), all_rows, scales[0]),
        "up_a": FactorSlot("first", "a", up, all_rows, 1.0),
        "up_b": FactorSlot("first", "b", up, slice(-half_rows, None), scales[1]),
        "down_a": FactorSlot("down", "a", slice(0, sizes.get("down_a", 0)), all_rows, 1.0),
        "down_b": FactorSlot("down", "b", slice(0, sizes.get("down_a", 0)), all_rows, scales[2]),
    }
    return {role: slots[role] for role in roles}


def stack_factors(factors: ExpertLora, tensors: Sequence[Tensor], gate_up_rows: int) -> dict[str, LoraPair]:
    """Stacked pairs of `tensors`, which are `factors.tensors` on the device in any float dtype; `gate_up_rows`: outputs
    of gate and up together."""
    table = factor_slots(factors.roles, tensors, factors.scales)
    stacked = {}
    for name in ("first", "down"):
        members = [(slot, tensor) for slot, tensor in zip(table.values(), tensors, strict=True) if slot.pair == name]
        if not members:
            continue
        rank = max(slot.rank.stop for slot, _ in members)
        rank += -rank % ALIGN
        inputs = next(t.shape[2] for slot, t in members if slot.factor == "a")
        outputs = gate_up_rows if name == "first" else next(t.shape[1] for slot, t in members if slot.factor == "b")
        experts, device = members[0][1].shape[0], members[0][1].device
        a = torch.zeros(experts, rank, inputs, dtype=torch.bfloat16, device=device)
        b = torch.zeros(experts, outputs, rank, dtype=torch.bfloat16, device=device)
        for slot, tensor in members:
            if slot.factor == "a":
                a[:, slot.rank].copy_(tensor)
            else:
                b[:, slot.rows, slot.rank].copy_(tensor if slot.scale == 1 else tensor.float() * slot.scale)
        stacked[name] = LoraPair(a, b)
    return stacked


def dims_in_memory(tensor: Tensor) -> list[int]:
    """Dimensions from the outermost to the innermost in memory."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy with the same order of dimensions in memory, without gaps."""
    order = dims_in_memory(tensor)
    dense = tensor.detach().permute(order)
    if not dense.is_contiguous():
        dense = dense.contiguous()
    return dense.to(device, non_blocking=True).permute([order.index(dim) for dim in range(tensor.dim())])


@dataclass(frozen=True)
class _CacheEntry:
    versions: tuple[int, ...]
    source: tuple[Tensor, ...]
    pairs: dict[str, LoraPair]

    @property
    def bytes(self) -> int:
        return sum(2 * (pair.a.numel() + pair.b.numel()) for pair in self.pairs.values())


class DeviceFactors:
    """LRU cache of stacked factors, refreshed when the optimiser has changed them."""

    def __init__(self, device: torch.device, registered: RegisteredMemory | None = None) -> None:
        """`registered`: trained factors are registered with the driver, which otherwise blocks the host until the
        device has reached their copy."""
        self._device, self._registered = device, registered if device.type == "cuda" else None
        self._entries: OrderedDict[tuple[object, ...], _CacheEntry] = OrderedDict()

    def get(self, factors: ExpertLora, gate_up_rows: int, trained: bool = False) -> dict[str, LoraPair]:
        """Stacked pairs of all experts of a layer. `trained`: nothing writes to the factors until backward is over, so
        their copies need not be waited for."""
        if trained and self._registered is not None:
            for tensor in factors.tensors:
                self._registered.try_register(tensor.detach())
        if any(tensor.is_inference() for tensor in factors.tensors):
            return self._stack(factors, gate_up_rows)
        key = (factors.scales, *((t.data_ptr(), t.shape, t.stride()) for t in factors.tensors))
        versions = tuple(tensor._version for tensor in factors.tensors)
        cached = self._entries.pop(key, None)
        if cached is None or cached.versions != versions:
            source = tuple(tensor.detach() for tensor in factors.tensors)
            cached = _CacheEntry(versions, source, self._stack(factors, gate_up_rows))
        self._entries[key] = cached
        while len(self._entries) > 2 and sum(entry.bytes for entry in self._entries.values()) > CACHED_BYTES:
            self._entries.popitem(last=False)
        return cached.pairs

    def _stack(self, factors: ExpertLora, gate_up_rows: int) -> dict[str, LoraPair]:
        return stack_factors(factors, [to_device(tensor, self._device) for tensor in factors.tensors], gate_up_rows)


def select_experts(pairs: Mapping[str, LoraPair], experts: Tensor, ends: Tensor) -> GroupLora:
    """The factors of these experts, in this order."""
    selected = {name: LoraPair(p.a.index_select(0, experts), p.b.index_select(0, experts)) for name, p in pairs.items()}
    return GroupLora(ends, selected.get("first"), selected.get("down"))


def empty_like_factors(factors: ExpertLora | None, device: torch.device) -> list[Tensor]:
    """Dense tensors with the memory order of PEFT's."""
    tensors = []
    for tensor in () if factors is None else factors.tensors:
        order = dims_in_memory(tensor)
        dense = torch.empty([tensor.shape[dim] for dim in order], dtype=tensor.dtype, device=device)
        tensors.append(dense.permute([order.index(dim) for dim in range(tensor.dim())]))
    return tensors


def split_gradients(factors: ExpertLora, grads: Mapping[str, tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Gradients of stacked pairs, of some experts, as gradients of `factors.tensors`."""
    parts = []
    table = factor_slots(factors.roles, factors.tensors, factors.scales)
    for (role, slot), tensor in zip(table.items(), factors.tensors, strict=True):
        a, b = grads[slot.pair]
        part = a[:, slot.rank] if role.endswith("_a") else b[:, slot.rows, slot.rank]
        parts.append(part.to(tensor.dtype) if slot.scale == 1 else (part.float() * slot.scale).to(tensor.dtype))
    return parts


class FactorGradients:
    """Gradients of the factors collected group by group, in the order of the sweep."""

    def __init__(self, factors: ExpertLora | None) -> None:
        self._factors = factors
        self._parts: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

    def add(self, grads: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Append the gradients of the next group of experts."""
        for name, pair in grads.items():
            for parts, part in zip(self._parts.setdefault(name, ([], [])), pair, strict=True):
                parts.append(part)

    def scatter(self, experts: Tensor) -> list[Tensor]:
        """Gradients of `factors.tensors` on the device, in their memory order: zero for all but these experts."""
        if self._factors is None or not self._parts:
            return []
        gradients = {name: (_concatenate(a), _concatenate(b)) for name, (a, b) in self._parts.items()}
        tensors = empty_like_factors(self._factors, experts.device)
        for dense, part in zip(tensors, split_gradients(self._factors, gradients), strict=True):
            dense.zero_().index_copy_(0, experts, part)
        return tensors


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@dataclass(frozen=True)
class PendingCopies:
    """Copies of tensors to host memory that are under way, in the memory order of the originals."""

    copy: DeviceToHost
    tensors: list[Tensor]  # pinned; complete after `finish`

    def finish(self) -> list[Tensor]:
        self.copy.finish()
        return self.tensors


def start_to_host(tensors: Sequence[Tensor]) -> PendingCopies:
    orders = [dims_in_memory(tensor) for tensor in tensors]
    dense = [tensor.permute(order) for order, tensor in zip(orders, tensors, strict=True)]
    copy = start_device_to_host(dense, sleeps=True)  # a thread of autograd waits while the CPU computes the next layer
    on_host = [
        target.permute([order.index(dim) for dim in range(target.dim())])
        for order, target in zip(orders, copy.targets, strict=True)
    ]
    return PendingCopies(copy, on_host)
