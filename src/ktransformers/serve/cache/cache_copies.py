"""Copies of blocks between the cache and rows of the host tier.

On the CPU they are plain copies, one call for each part of all blocks whose rows are adjacent: of single blocks most of
the time is the calls'. On a GPU a block is gathered into a staging buffer on the stream that computes, at the
rate of the GPU's memory, so that it may be overwritten or freed at once; a side stream copies the staging
buffer to pinned memory, or back. Whole blocks cross the link, several in one copy where their rows are adjacent,
because a part of one layer is a few tens of kilobytes and a launch for each would take longer than the copy. Two
staging buffers alternate. Nothing here waits on the host: streams wait for events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ktransformers.serve.cache.cache_blocks import BlockLayout, copy_from_memory, copy_to_memory
from ktransformers.serve.cache.host_tier import HostBlock
from ktransformers.serve.cache.kv_cache import BlockMemory
from ktransformers.serve.cache.snapshots import States

STAGING_BYTES = 64 << 20  # of one staging buffer, or one block
STAGES = 2


def make_event(*, timing: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]


class BlockCopies(Protocol):
    def save(self, memory: BlockMemory, numbers: Sequence[int], blocks: Sequence[HostBlock]) -> None:
        """Copy the blocks with these numbers into rows."""

    def restore(self, memory: BlockMemory, numbers: Sequence[int], blocks: Sequence[HostBlock]) -> PendingCopy | None:
        """Copy rows into the blocks with these numbers; None: it is done. Later kernels see the new contents."""

    def save_states(self, states: States, blocks: Sequence[HostBlock]) -> None:
        """Copy states into the rows of their pieces."""

    def restore_states(self, blocks: Sequence[HostBlock]) -> tuple[States, PendingCopy | None]:
        """The states whose pieces are in these rows."""


@dataclass(frozen=True)
class PendingCopy:
    """A copy from pinned memory that a GPU may not have ended yet."""

    events: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]  # started and ended, of each device

    @property
    def done(self) -> bool:
        return all(ended.query() for _, ended in self.events)  # type: ignore[no-untyped-call]

    @property
    def seconds(self) -> float:
        return max(float(started.elapsed_time(ended)) for started, ended in self.events) / 1e3

    def wait(self) -> None:
        for _, ended in self.events:
            ended.synchronize()


class HostCopies:
    """Of a cache in host memory."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout

    @torch.inference_mode()
    def save(self, memory: BlockMemory, numbers: Sequence[int], blocks: Sequence[HostBlock]) -> None:
        for first, rows in _adjacent_rows(blocks, 0, self._layout.bytes):
            copy_from_memory(memory, iter(self._layout.places), numbers[first : first + rows.shape[0]], rows)

    @torch.inference_mode()
    def restore(self, memory: BlockMemory, numbers: Sequence[int], blocks: Sequence[HostBlock]) -> PendingCopy | None:
        for first, rows in _adjacent_rows(blocks, 0, self._layout.bytes):
            copy_to_memory(memory, iter(self._layout.places), numbers[first : first + rows.shape[0]], rows)
        return None

    @torch.inference_mode()
    def save_states(self, states: States, blocks: Sequence[HostBlock]) -> None:
        for piece, block in zip(self._layout.pack_states(states), blocks, strict=True):
            block.row.copy_(piece)

    @torch.inference_mode()
    def restore_states(self, blocks: Sequence[HostBlock]) -> tuple[States, PendingCopy | None]:
        return self._layout.unpack_states(torch.stack([block.row for block in blocks])), None


@dataclass(frozen=True)
class _Stage:
    buffer: Tensor  # uint8 [n, bytes of this device]
    free: torch.cuda.Event  # after its last use


class _DeviceStages:
    """The side stream and staging buffers of one device."""

    def __init__(self, device: torch.device, first: int, last: int) -> None:
        self.device, self.first, self.last = device, first, last
        self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        count = max(1, STAGING_BYTES // (last - first))
        self._stages = [
            _Stage(torch.empty(count, last - first, dtype=torch.uint8, device=device), make_event())
            for _ in range(STAGES)
        ]
        self._turn = 0

    def chunks(self, count: int) -> Iterator[tuple[int, int, _Stage]]:
        """(first, last + 1, stage) of `count` blocks, as many as a stage holds at a time."""
        step = self._stages[0].buffer.shape[0]
        for first in range(0, count, step):
            self._turn = (self._turn + 1) % STAGES
            yield first, min(first + step, count), self._stages[self._turn]


class DeviceCopies:
    """Of a cache on one GPU, or with layers on several."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self._devices = [_DeviceStages(*segment) for segment in layout.segments]

    @torch.inference_mode()
    def save(self, memory: BlockMemory, numbers: Sequence[int], blocks: Sequence[HostBlock]) -> None:
        ended = []
        for part in self._devices:
            with torch.cuda.device(part.device):
                compute = torch.cuda.current_stream()
                for first, last, stage in part.chunks(len(blocks)):
                    compute.wait_event(stage.free)
                    staged = stage.buffer[: last - first]
                    places = self._layout.places_on(part.device)
                    copy_from_memory(memory, places, numbers[first:last], staged, part.first)
                    part.side.wait_stream(compute)
                    with torch.cuda.stream(part.side):
                        for row, rows in _adjacent_rows(blocks[first:last], part.first, part.last):
                            rows.copy_(staged[row : row + rows.shape[0]], non_blocking=True)
                        stage.free.record(part.side)
                ended.append(make_event())
                ended[-1].record(part.side)
        for block in blocks:
            block.copied = ended

    @torch.inference_mode()
    def restore(self, memory: BlockMemory, numbers: Sequence[int], blocks: Sequence[HostBlock]) -> PendingCopy | None:
        events = []
        for part in self._devices:
            with torch.cuda.device(part.device):
                compute = torch.cuda.current_stream()
                started, ended = (make_event(timing=True) for _ in range(2))
                started.record(part.side)
                for first, last, stage in part.chunks(len(blocks)):
                    part.side.wait_event(stage.free)
                    staged = stage.buffer[: last - first]
                    with torch.cuda.stream(part.side):
                        for row, rows in _adjacent_rows(blocks[first:last], part.first, part.last):
                            staged[row : row + rows.shape[0]].copy_(rows, non_blocking=True)
                    compute.wait_stream(part.side)
                    places = self._layout.places_on(part.device)
                    copy_to_memory(memory, places, numbers[first:last], staged, part.first)
                    stage.free.record(compute)
                ended.record(part.side)
                events.append((started, ended))
        return PendingCopy(events)

    @torch.inference_mode()
    def save_states(self, states: States, blocks: Sequence[HostBlock]) -> None:
        side = self._devices[0].side
        with torch.cuda.device(self._devices[0].device):
            pieces = self._layout.pack_states(states)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for row, rows in _adjacent_rows(blocks, 0, self._layout.bytes):
                    rows.copy_(pieces[row : row + rows.shape[0]], non_blocking=True)
            pieces.record_stream(side)
            ended = make_event()
            ended.record(side)
        for block in blocks:
            block.copied = [ended]

    @torch.inference_mode()
    def restore_states(self, blocks: Sequence[HostBlock]) -> tuple[States, PendingCopy | None]:
        device, side = self._devices[0].device, self._devices[0].side
        with torch.cuda.device(device):
            compute, started, ended = torch.cuda.current_stream(), make_event(timing=True), make_event(timing=True)
            pieces = torch.empty(len(blocks), self._layout.bytes, dtype=torch.uint8, device=device)
            side.wait_stream(compute)  # the memory may have been another tensor's
            started.record(side)
            with torch.cuda.stream(side):
                for row, rows in _adjacent_rows(blocks, 0, self._layout.bytes):
                    pieces[row : row + rows.shape[0]].copy_(rows, non_blocking=True)
            ended.record(side)
            compute.wait_stream(side)
            states = self._layout.unpack_states(pieces)
        return states, PendingCopy([(started, ended)])


def _adjacent_rows(blocks: Sequence[HostBlock], first: int, last: int) -> Iterator[tuple[int, Tensor]]:
    """(number of the first, uint8 `[n, last - first]`) of runs of blocks whose rows are adjacent in memory: one copy
    for each. If bytes `first` .. `last` - 1 are not the whole row, a run would have gaps, which are no single copy."""
    start = 0
    while start < len(blocks):
        row, count = blocks[start].row, 1
        size, storage = row.numel(), row.untyped_storage().data_ptr()
        while last - first == size and start + count < len(blocks):
            other = blocks[start + count].row
            if other.untyped_storage().data_ptr() != storage or other.data_ptr() != row.data_ptr() + count * size:
                break
            count += 1
        yield start, row.as_strided((count, last - first), (size, 1), row.storage_offset() + first)
        start += count


def make_copies(layout: BlockLayout) -> BlockCopies:
    on_gpu = any(device.type == "cuda" for device, _, _ in layout.segments)
    return DeviceCopies(layout) if on_gpu else HostCopies(layout)
