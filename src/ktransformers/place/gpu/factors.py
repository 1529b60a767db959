"""LoRA of one layer on the device: brought there in bf16 when it has changed, and its gradients back to host memory.

Factors live in host memory, trained there by the optimiser; A `[E, r, in]` lies row by row, PEFT's B `[E, out, r]` is a
view whose experts are the innermost dimension, so a tensor travels as it lies and is turned on the device. Two layers
are kept: recomputation and the backward pass behind it share one copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ktransformers.nn.factors import Factors

KEPT = 2


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The same strides up to gaps, in bf16."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    laid = tensor.detach().permute(order)
    if not laid.is_contiguous():
        laid = laid.contiguous()
    there = laid.to(device, non_blocking=True).to(torch.bfloat16)
    return there.permute([order.index(dim) for dim in range(tensor.dim())])


class DeviceFactors:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: OrderedDict[tuple[object, ...], dict[str, Tensor]] = OrderedDict()

    def of(self, factors: Factors) -> dict[str, Tensor]:
        """By the core's roles, for all experts of the layer."""
        key: tuple[object, ...] = ()
        if not any(tensor.is_inference() for tensor in factors.tensors):
            key = tuple((t.data_ptr(), t.shape, t.stride(), t._version) for t in factors.tensors)
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        found = factors.halves([to_device(tensor, self._device) for tensor in factors.tensors])
        if key:
            self._known[key] = found
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return found


class Gradients:
    """Sums of the factors' gradients by expert, for the experts of a device; `finish` lays them into host tensors."""

    def __init__(self, experts: Sequence[int]) -> None:
        self._experts = list(experts)
        self._parts: dict[str, list[Tensor]] = {}

    def add(self, grads: Mapping[str, Tensor]) -> None:
        """Of the next experts in the order given."""
        for role, grad in grads.items():
            self._parts.setdefault(role, []).append(grad)

    def start(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The copies down, under way; `like` has the dtypes that are wanted."""
        found = {}
        for role, parts in self._parts.items():
            whole = torch.cat(parts).to(like[role].dtype)
            pinned = whole.is_cuda
            found[role] = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=pinned).copy_(
                whole, non_blocking=pinned
            )
        return found

    def lay(self, arrived: Mapping[str, Tensor], views: Mapping[str, Tensor]) -> None:
        """Into the rows of these experts, which nobody else has written."""
        rows = torch.tensor(self._experts, dtype=torch.int64)
        for role, part in arrived.items():
            views[role].index_copy_(0, rows, part)
