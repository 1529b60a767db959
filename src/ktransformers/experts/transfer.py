"""Copies between a GPU and host memory for the experts of one layer: hidden states `[T, H]`, expert ids and routing
weights `[T, k]` go to the host, outputs `[T, H]` to the device, and gradients the other way.

Each direction copies through pinned memory on a CUDA stream of its own and overlaps with other GPU work. To the host,
the thread synchronises with one event after all three tensors and with nothing queued later; to the device, only the
current stream waits. `start_*` and `finish` are separate, so that work can run between them.

There is no ring of staging buffers: the host copies are saved for backward, for a time that only autograd knows, so
they are ordinary tensors of torch's caching host allocator. That allocator makes their reuse safe: a non-blocking copy
records its stream on the pinned block, and a freed block is reused only after all recorded streams have passed that
point. On the device two rules make it safe:
- To the host, the sources are referenced until their event has passed (`DeviceToHost.sources`). A copy whose result is
  dropped writes into a block that the host allocator does not reuse until the copy is done.
- To the device, the targets are allocated on the copy stream, where no other work can still use their memory, so the
  copy does not wait for the current stream; `record_stream` keeps them until the current stream has passed.

Devices other than CUDA use synchronous copies.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ktransformers.ground.errors import InputError


@dataclass(frozen=True)
class CopyStreams:
    """The copy streams of one device: a GPU copies in both directions at once."""

    to_host: torch.cuda.Stream
    to_device: torch.cuda.Stream


@functools.cache
def copy_streams(device: torch.device) -> CopyStreams:
    to_host, to_device = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
    return CopyStreams(to_host, to_device)


@dataclass(frozen=True)
class DeviceToHost:
    """Copies to host memory in flight."""

    sources: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    copied: torch.cuda.Event | None  # None: the copies are complete

    def ready(self) -> bool:
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]

    def finish(self) -> tuple[Tensor, ...]:
        """The tensors in host memory, after the copies are complete; the thread waits without the GIL."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.targets


@dataclass(frozen=True)
class HostToDevice:
    """Copies to a device in flight."""

    targets: tuple[Tensor, ...]
    copied: torch.cuda.Event | None

    def finish(self) -> tuple[Tensor, ...]:
        """The tensors on the device, ordered after the copies on the current stream; the thread does not wait."""
        if self.copied is not None:
            for target in self.targets:
                current = torch.cuda.current_stream(target.device)
                current.wait_event(self.copied)
                target.record_stream(current)
        return self.targets


def start_device_to_host(tensors: Sequence[Tensor], *, sleeps: bool = False) -> DeviceToHost:
    """Copy tensors of one device, in the order of its current stream, to contiguous tensors in host memory. `sleeps`:
    the thread that waits for them gives up its CPU, which takes it some 30 microseconds longer; otherwise it spins, and
    where each of the core's threads has a CPU, it slows all of them."""
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise InputError("experts", f"tensors on {device} and {tensor.device}", "all of a layer on one device")
    if device.type != "cuda":
        dense = torch.contiguous_format
        return DeviceToHost(
            (), tuple(tensor.detach().to("cpu", copy=True, memory_format=dense) for tensor in tensors), None
        )
    sources = tuple(tensor.detach().contiguous() for tensor in tensors)
    stream = copy_streams(device).to_host
    stream.wait_stream(torch.cuda.current_stream(device))
    targets = tuple(torch.empty(source.shape, dtype=source.dtype, pin_memory=True) for source in sources)
    with torch.cuda.stream(stream):
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        return DeviceToHost(sources, targets, stream.record_event(torch.cuda.Event(blocking=sleeps)))  # type: ignore[no-untyped-call]


def start_host_to_device(tensors: Sequence[Tensor], device: torch.device) -> HostToDevice:
    """Copy tensors from host memory. A pinned one is copied without staging and must not be modified afterwards."""
    if device.type != "cuda":
        return HostToDevice(tuple(tensor.detach().to(device, copy=True) for tensor in tensors), None)
    staged = [as_pinned(tensor.detach()) for tensor in tensors]
    stream = copy_streams(device).to_device
    with torch.cuda.stream(stream):
        targets = tuple(tensor.to(device, non_blocking=True) for tensor in staged)
        return HostToDevice(targets, stream.record_event())


def as_pinned(tensor: Tensor) -> Tensor:
    """The tensor itself if it is pinned and contiguous, otherwise a copy in pinned memory."""
    if tensor.is_pinned() and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        copies = start_device_to_host((hidden, ids, weights)).finish()
        ctx.device = hidden.device
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(copies[1])
        return copies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Runs in the thread that called backward, on its current stream, as autograd does for a node without outputs
        on a GPU. Autograd synchronises the streams that consume the gradients."""
        needed = [grad if needs else None for grad, needs in zip(grads, ctx.needs_input_grad, strict=True)]
        on_device = iter(start_host_to_device([grad for grad in needed if grad is not None], ctx.device).finish())
        return tuple(None if grad is None else next(on_device) for grad in needed)


class _ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, device: torch.device) -> Tensor:
        ctx.set_materialize_grads(False)
        return start_host_to_device((result,), device).finish()[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return None if grad is None else start_device_to_host((grad,)).finish()[0], None


def to_host(hidden: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copies in host memory, complete when it returns; gradients of hidden and weights are copied to the device."""
    on_host: tuple[Tensor, Tensor, Tensor] = _ToHost.apply(hidden, ids, weights)  # type: ignore[no-untyped-call]
    return on_host


def to_device(result: Tensor, device: torch.device) -> Tensor:
    """The result on the device, in the order of its current stream; its gradient is copied to the host."""
    on_device: Tensor = _ToDevice.apply(result, device)  # type: ignore[no-untyped-call]
    return on_device
