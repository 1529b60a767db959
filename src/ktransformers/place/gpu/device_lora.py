"""LoRA of one layer on the device: brought there when it has changed, and its gradients back to host memory.

On the device gate and up have one pair of factors, as the native core has them: their A stacked, their B side by side
with zeros where the other's rank would be, the scale folded into B before rounding, ranks filled up to what products
want. `seats` says where each of PEFT's tensors sits in there; laying them and reading their gradients follow the same
table. Factors live in host memory, trained there by the optimiser; PEFT's B `[E, out, r]` is a view whose experts are
the innermost dimension, so tensors and gradients travel as they lie and are turned on the device. Layers are kept there
within a few bytes, so that the walk back finds what the walk forward brought; their tensors are held on to, because
they are known by their addresses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.nn.lora_factors import LoraFactors
from ktransformers.nn.transfer import DeviceToHost, start_device_to_host
from ktransformers.place.gpu.grouped_mlp import ALIGN, GroupLora, StackedLora

KEPT_BYTES = 256 << 20  # of pairs that stay on the device, two layers at least


@dataclass(frozen=True)
class FactorSlot:
    """Where a tensor of PEFT's is in a pair: a [E, r, in] in A, b [E, out, r] in B."""

    pair: str  # first or down
    side: str  # a or b
    rank: slice
    rows: slice  # of B
    scale: float


def seats(roles: Sequence[str], tensors: Sequence[Tensor], scales: tuple[float, float, float]) -> dict[str, FactorSlot]:
    """By role. `gate_up_b` has gate's scale for both halves, as `factors_of` makes it."""
    sizes = {role: (t.shape[1] if role.endswith("_a") else t.shape[2]) for role, t in zip(roles, tensors, strict=True)}
    outputs = {role: t.shape[1] for role, t in zip(roles, tensors, strict=True)}
    gate = sizes.get("gate_a", 0)
    up = slice(gate, gate + sizes["up_a"]) if "up_a" in sizes else slice(0, gate)
    every = slice(None)
    halved = outputs.get("up_b", outputs.get("gate_b", 0))
    known = {
        "gate_a": FactorSlot("first", "a", slice(0, gate), every, 1.0),
        "gate_b": FactorSlot("first", "b", slice(0, gate), slice(0, halved), scales[0]),
        "gate_up_b": FactorSlot("first", "b", slice(0, gate), every, scales[0]),
        "up_a": FactorSlot("first", "a", up, every, 1.0),
        "up_b": FactorSlot("first", "b", up, slice(-halved, None), scales[1]),
        "down_a": FactorSlot("down", "a", slice(0, sizes.get("down_a", 0)), every, 1.0),
        "down_b": FactorSlot("down", "b", slice(0, sizes.get("down_a", 0)), every, scales[2]),
    }
    return {role: known[role] for role in roles}


def lay(factors: LoraFactors, tensors: Sequence[Tensor], wide: int) -> dict[str, StackedLora]:
    """Tensors in the places of `factors.tensors`, on the device in any float dtype, as pairs; `wide`: outputs of gate
    and up together."""
    table = seats(factors.roles, tensors, factors.scales)
    found = {}
    for name in ("first", "down"):
        mine = [(seat, tensor) for seat, tensor in zip(table.values(), tensors, strict=True) if seat.pair == name]
        if not mine:
            continue
        rank = max(seat.rank.stop for seat, _ in mine)
        rank += -rank % ALIGN
        inputs = next(t.shape[2] for seat, t in mine if seat.side == "a")
        outputs = wide if name == "first" else next(t.shape[1] for seat, t in mine if seat.side == "b")
        experts, device = mine[0][1].shape[0], mine[0][1].device
        a = torch.zeros(experts, rank, inputs, dtype=torch.bfloat16, device=device)
        b = torch.zeros(experts, outputs, rank, dtype=torch.bfloat16, device=device)
        for seat, tensor in mine:
            if seat.side == "a":
                a[:, seat.rank].copy_(tensor)
            else:
                b[:, seat.rows, seat.rank].copy_(tensor if seat.scale == 1 else tensor.float() * seat.scale)
        found[name] = StackedLora(a, b)
    return found


def dims_in_memory(tensor: Tensor) -> list[int]:
    """Dimensions from the outermost to the innermost as they lie in memory."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The same strides up to gaps."""
    order = dims_in_memory(tensor)
    laid = tensor.detach().permute(order)
    if not laid.is_contiguous():
        laid = laid.contiguous()
    return laid.to(device, non_blocking=True).permute([order.index(dim) for dim in range(tensor.dim())])


@dataclass(frozen=True)
class _OnDevice:
    versions: tuple[int, ...]
    held: tuple[Tensor, ...]
    pairs: dict[str, StackedLora]

    @property
    def bytes(self) -> int:
        return sum(2 * (pair.a.numel() + pair.b.numel()) for pair in self.pairs.values())


class DeviceFactors:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: OrderedDict[tuple[object, ...], _OnDevice] = OrderedDict()

    def of(self, factors: LoraFactors, wide: int) -> dict[str, StackedLora]:
        """Pairs for all experts of the layer."""
        if any(tensor.is_inference() for tensor in factors.tensors):
            return self._lay(factors, wide)
        key = (factors.scales, *((t.data_ptr(), t.shape, t.stride()) for t in factors.tensors))
        versions = tuple(tensor._version for tensor in factors.tensors)
        found = self._known.pop(key, None)
        if found is None or found.versions != versions:
            held = tuple(tensor.detach() for tensor in factors.tensors)
            found = _OnDevice(versions, held, self._lay(factors, wide))
        self._known[key] = found
        while len(self._known) > 2 and sum(one.bytes for one in self._known.values()) > KEPT_BYTES:
            self._known.popitem(last=False)
        return found.pairs

    def _lay(self, factors: LoraFactors, wide: int) -> dict[str, StackedLora]:
        return lay(factors, [to_device(tensor, self._device) for tensor in factors.tensors], wide)


def chosen(pairs: Mapping[str, StackedLora], experts: Tensor, ends: Tensor) -> GroupLora:
    """Of these experts, in this order."""
    found = {name: StackedLora(p.a.index_select(0, experts), p.b.index_select(0, experts)) for name, p in pairs.items()}
    return GroupLora(ends, found.get("first"), found.get("down"))


def empty_like_factors(factors: LoraFactors | None, device: torch.device) -> list[Tensor]:
    """Dense, with the strides of PEFT's tensors up to gaps."""
    found = []
    for tensor in () if factors is None else factors.tensors:
        order = dims_in_memory(tensor)
        dense = torch.empty([tensor.shape[dim] for dim in order], dtype=tensor.dtype, device=device)
        found.append(dense.permute([order.index(dim) for dim in range(tensor.dim())]))
    return found


def parts_of(factors: LoraFactors, grads: Mapping[str, tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Gradients of pairs, of some experts, as those of `factors.tensors`."""
    found = []
    table = seats(factors.roles, factors.tensors, factors.scales)
    for (role, seat), tensor in zip(table.items(), factors.tensors, strict=True):
        a, b = grads[seat.pair]
        part = a[:, seat.rank] if role.endswith("_a") else b[:, seat.rows, seat.rank]
        found.append(part.to(tensor.dtype) if seat.scale == 1 else (part.float() * seat.scale).to(tensor.dtype))
    return found


class FactorGradients:
    """Gradients of the factors for the experts of a device, in the order of the walk, on their way to host memory."""

    def __init__(self, factors: LoraFactors | None) -> None:
        self._factors = factors
        self._parts: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

    def add(self, grads: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Of the next experts in the order given."""
        for name, pair in grads.items():
            for parts, part in zip(self._parts.setdefault(name, ([], [])), pair, strict=True):
                parts.append(part)

    def lay(self, experts: Tensor) -> list[Tensor]:
        """In the places of `factors.tensors`, with their strides, on the device: zero for all but these experts."""
        if self._factors is None or not self._parts:
            return []
        whole = {name: (_joined(a), _joined(b)) for name, (a, b) in self._parts.items()}
        found = empty_like_factors(self._factors, experts.device)
        for laid, part in zip(found, parts_of(self._factors, whole), strict=True):
            laid.zero_().index_copy_(0, experts, part)
        return found


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@dataclass(frozen=True)
class PendingCopies:
    """Tensors on their way into host memory, with the strides that they had."""

    descent: DeviceToHost
    tensors: list[Tensor]  # pinned; to be read when `finish` is back

    def finish(self) -> list[Tensor]:
        self.descent.finish()
        return self.tensors


def start_to_host(laid: Sequence[Tensor]) -> PendingCopies:
    orders = [dims_in_memory(tensor) for tensor in laid]
    descent = start_device_to_host([tensor.permute(order) for order, tensor in zip(orders, laid, strict=True)])
    found = zip(orders, descent.targets, strict=True)
    return PendingCopies(
        descent, [dense.permute([order.index(d) for d in range(dense.dim())]) for order, dense in found]
    )
