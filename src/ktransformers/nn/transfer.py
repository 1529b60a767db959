"""What the experts of one layer need, from a GPU into host memory and back: hidden states `[T, H]`, expert ids and
routing weights `[T, k]` go down, results `[T, H]` go up, and gradients the other way.

Each direction is a copy through pinned memory on a stream of its own, so that it overlaps with whatever else the GPU
does. Down, the thread waits for one event behind all three tensors and for nothing queued later; up, nobody waits but
the current stream. `start_*` and `finish` are apart, so that work may come to stand between them.

The surprising decision: there is no ring of buffers. What comes down is saved for backward, for how long only autograd
knows, so buffers are ordinary tensors of torch's caching host allocator. It is what keeps them safe: a non-blocking
copy notes its stream at the pinned block, and a block that was let go of is given out again only when all streams noted
on it have passed that point. On the device the same holds by these rules:
- down, the sources live until their event has passed (`Descent.sources`). A descent that is dropped half-way writes
  into memory that nobody reads, and that the host allocator holds back until then.
- up, the targets are allocated on the side stream, where no other work can still be using their memory, so the copy
  waits for nothing on the current stream; `record_stream` keeps them until the current stream is through with them.

A device other than CUDA's gets plain copies.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ktransformers.errors import InputError


@dataclass(frozen=True)
class Streams:
    """The side streams of one device: a GPU copies in both directions at once."""

    down: torch.cuda.Stream
    up: torch.cuda.Stream


@functools.cache
def side_streams(device: torch.device) -> Streams:
    down, up = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
    return Streams(down, up)


@dataclass(frozen=True)
class DeviceToHost:
    """Copies on their way into host memory."""

    sources: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    arrived: torch.cuda.Event | None  # None: they are there

    def ready(self) -> bool:
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call]

    def finish(self) -> tuple[Tensor, ...]:
        """The tensors in host memory, readable at once; the thread sleeps or spins without the GIL until then."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.targets


@dataclass(frozen=True)
class HostToDevice:
    """Copies on their way to a device."""

    targets: tuple[Tensor, ...]
    arrived: torch.cuda.Event | None

    def finish(self) -> tuple[Tensor, ...]:
        """The tensors on the device, for the current stream, which waits; the thread does not."""
        if self.arrived is not None:
            for target in self.targets:
                current = torch.cuda.current_stream(target.device)
                current.wait_event(self.arrived)
                target.record_stream(current)
        return self.targets


def start_down(tensors: Sequence[Tensor]) -> DeviceToHost:
    """From the device that all are on, as they are when the current stream gets here; contiguous when they arrive."""
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise InputError("experts", f"tensors on {device} and {tensor.device}", "all of a layer on one device")
    if device.type != "cuda":
        rows = torch.contiguous_format
        return DeviceToHost(
            (), tuple(tensor.detach().to("cpu", copy=True, memory_format=rows) for tensor in tensors), None
        )
    sources = tuple(tensor.detach().contiguous() for tensor in tensors)
    side = side_streams(device).down
    side.wait_stream(torch.cuda.current_stream(device))
    targets = tuple(torch.empty(source.shape, dtype=source.dtype, pin_memory=True) for source in sources)
    with torch.cuda.stream(side):
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        return DeviceToHost(sources, targets, side.record_event())


def start_up(tensors: Sequence[Tensor], device: torch.device) -> HostToDevice:
    """From host memory. A tensor that is pinned goes as it lies and must not be written to any more."""
    if device.type != "cuda":
        return HostToDevice(tuple(tensor.detach().to(device, copy=True) for tensor in tensors), None)
    staged = [pinned(tensor.detach()) for tensor in tensors]
    side = side_streams(device).up
    with torch.cuda.stream(side):
        targets = tuple(tensor.to(device, non_blocking=True) for tensor in staged)
        return HostToDevice(targets, side.record_event())


def pinned(tensor: Tensor) -> Tensor:
    """As it lies, or a copy in pinned memory."""
    if tensor.is_pinned() and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


class _DownBuffers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        found = start_down((hidden, ids, weights)).finish()
        ctx.device = hidden.device
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(found[1])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Runs in the thread that called backward, on its current stream: what autograd takes a node for that has no
        output on a GPU. The streams of those who read the gradients are made to wait by autograd."""
        wanted = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=True)]
        there = iter(start_up([grad for grad in wanted if grad is not None], ctx.device).finish())
        return tuple(None if grad is None else next(there) for grad in wanted)


class _UpBuffers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, device: torch.device) -> Tensor:
        ctx.set_materialize_grads(False)
        return start_up((result,), device).finish()[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return None if grad is None else start_down((grad,)).finish()[0], None


def down(hidden: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three in host memory, ready to be read; gradients of the first and the last go back up."""
    on_host: tuple[Tensor, Tensor, Tensor] = _DownBuffers.apply(hidden, ids, weights)  # type: ignore[no-untyped-call]
    return on_host


def up(result: Tensor, device: torch.device) -> Tensor:
    """A result in host memory to the device, in the order of its current stream; the gradient comes down."""
    on_device: Tensor = _UpBuffers.apply(result, device)  # type: ignore[no-untyped-call]
    return on_device
