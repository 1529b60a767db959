"""LRU cache of packed experts on the GPU: slots of one size, filled over PCIe, looked up by layer and expert.

A slot keeps its expert until it is evicted, so backward finds what the recomputation of the layer fetched, and a
prefetched expert is there when its layer runs. Two events guard a slot: one after the copy that fills it, which
dequantisation waits for, and one after its last dequantisation, which the next copy into it waits for. Otherwise the
copy stream and the compute stream never wait for each other. Copies finish in the order in which they were queued, so a
sequence number per slot says which have finished, and waiting for several slots is waiting for the last of them. On a
CPU, for tests, copies are plain.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktransformers.place.gpu.copy_plan import plan_copies, runs
from ktransformers.place.gpu.cuda_driver import copy_to_device
from ktransformers.place.gpu.pinned import RegisteredMemory, StagingRing
from ktransformers.quantized.gpu.layout import Geometry


@dataclass(frozen=True)
class ExpertPart:
    """A range of every expert's bytes of one matrix: all of them, or those on one NUMA node."""

    offset: int  # of the range in an expert's bytes
    bytes: Tensor  # uint8 [E, width], dense


@dataclass(frozen=True)
class LayerBytes:
    """The packed experts of a layer in host memory: parts of gate and up, and of down."""

    first: tuple[ExpertPart, ...]
    down: tuple[ExpertPart, ...]
    verify: Callable[[Sequence[int]], None] = lambda experts: None  # before experts are read for the first time
    place: Callable[[], None] = lambda: None  # before all pages are read in: each on its NUMA node


Key = tuple[int, int]  # layer, expert
PartCopies = tuple[Tensor, Tensor, NDArray[np.uint64]]  # slots and a part, uint8 [bytes]; rows of `plan_copies`
# Of one copy: larger ones would delay small copies on the copy engine, and each takes the driver 20 microseconds.
COPY_BYTES = 64 << 20


class ExpertCache:
    def __init__(
        self, geometry: Geometry, count: int, device: torch.device, registered: RegisteredMemory | None
    ) -> None:
        """`registered` None: every copy goes through pinned staging buffers."""
        self.geometry, self.device, self.count = geometry, device, count
        self.first = torch.empty(count, geometry.first.expert_bytes, dtype=torch.uint8, device=device)
        self.down = torch.empty(count, geometry.down.expert_bytes, dtype=torch.uint8, device=device)
        self.expert_bytes = geometry.expert_bytes
        self.copied_bytes = 0
        self.link_free = 0.0  # time at which the copies queued so far will have finished
        self.link_rate = 0.0  # bytes per second; 0: not measured
        self.registered = registered
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            # The cache may reuse memory that kernels on the current stream still read; and copies may still be running
            # when the cache is freed.
            self._stream.wait_stream(torch.cuda.current_stream(device))
            weakref.finalize(self, self._stream.synchronize).atexit = False
        self._staging: StagingRing | None = None
        self._slots: dict[int, dict[int, int]] = {}  # layer -> expert -> slot
        self._owner: list[Key | None] = [None] * count
        self._last_read: list[torch.cuda.Event | None] = [None] * count
        self._copy_number = [0] * count  # sequence number of the copy that filled each slot
        # The last number of each queued batch of copies.
        self._queued_copies: deque[tuple[int, torch.cuda.Event]] = deque()
        self._copies_done = 0  # copies up to this number have finished
        self._last_used = [0] * count
        self._clock = self._copies_queued = 0

    @property
    def bytes(self) -> int:
        return self.first.numel() + self.down.numel()

    def backlog(self) -> float:
        """Estimated seconds until the link is free."""
        return max(0.0, self.link_free - time.perf_counter())

    def present(self, layer: int) -> frozenset[int]:
        """Experts of a layer that are in the cache or whose copies are queued."""
        return frozenset(self._slots.get(layer, ()))

    def in_flight(self, layer: int) -> tuple[int, ...]:
        """Experts of `present` whose copies have not finished, in the order of the queue."""
        self._poll_copies()
        copy_numbers, slots = self._copy_number, self._slots.get(layer, {})
        unfinished = sorted(
            (copy_numbers[s], expert) for expert, s in slots.items() if copy_numbers[s] > self._copies_done
        )
        return tuple(expert for _, expert in unfinished)

    def _poll_copies(self) -> None:
        """Note which copies have finished."""
        while self._queued_copies and self._queued_copies[0][1].query():  # type: ignore[no-untyped-call]
            self._copies_done = self._queued_copies.popleft()[0]

    def can_copy_directly(self, source: LayerBytes) -> bool:
        """Whether the copy engine reads `source` without staging; registers it with the driver at the first call."""
        if not self._cuda or self.registered is None:
            return False
        return all(self.registered.register(part.bytes, source.place) for part in (*source.first, *source.down))

    def evict_layer(self, layer: int) -> None:
        """Evict all experts of a layer."""
        self.evict_except(layer, frozenset())

    def fetch(
        self, layer: int, source: LayerBytes, experts: Sequence[int], keep: frozenset[Key] = frozenset()
    ) -> list[int]:
        """Slots of these experts; copies of missing ones are queued, evicting the least recently used that are not in
        `keep`. Shorter than `experts` if the cache is too small."""
        self._clock += 1
        slots = self._slots.setdefault(layer, {})
        if missing := [expert for expert in experts if expert not in slots]:
            source.verify(missing)
            assigned = self._assign_slots(layer, slots, missing, frozenset(experts), keep)
            try:
                self._copy(source, assigned)
            except BaseException:  # no memory for staging buffers, for example: a slot must not claim what it lacks
                for expert, slot in assigned:
                    self._owner[slot] = None
                    del slots[expert]
                raise
        fetched = [slots[expert] for expert in experts if expert in slots]
        for slot in fetched:
            self._last_used[slot] = self._clock
        return fetched

    def _assign_slots(
        self, layer: int, slots: dict[int, int], missing: Sequence[int], wanted: frozenset[int], keep: frozenset[Key]
    ) -> list[tuple[int, int]]:
        """(expert, slot) for as many as fit, both ascending, so that neighbours are copied together."""
        free = [
            slot
            for slot, owner in enumerate(self._owner)
            if owner is None or not (owner in keep or (owner[0] == layer and owner[1] in wanted))
        ]
        free.sort(key=self._last_used.__getitem__)
        count = min(len(free), len(missing))
        assigned = list(zip(sorted(missing[:count]), sorted(free[:count]), strict=True))
        for expert, slot in assigned:
            owner = self._owner[slot]
            if owner is not None:
                del self._slots[owner[0]][owner[1]]
            self._owner[slot] = (layer, expert)
            slots[expert] = slot
        return assigned

    def evict_except(self, layer: int, experts: frozenset[int]) -> None:
        """Evict all experts of a layer but these."""
        slots = self._slots.get(layer, {})
        for expert in [expert for expert in slots if expert not in experts]:
            self._owner[slots.pop(expert)] = None

    def _copy(self, source: LayerBytes, assigned: Sequence[tuple[int, int]]) -> None:
        if not assigned:
            return
        self.copied_bytes += len(assigned) * self.expert_bytes
        copies = self._plan(source, assigned)
        if self._stream is None:
            for target, part, rows in copies:
                for to, origin, count in rows.tolist():
                    target[to : to + count].copy_(part[origin : origin + count])
            return
        direct = self.can_copy_directly(source)
        with torch.cuda.stream(self._stream):
            for event in {id(e): e for _, slot in assigned if (e := self._last_read[slot]) is not None}.values():
                self._stream.wait_event(event)
            if direct:
                copy_to_device(with_addresses(copies), self._stream.cuda_stream)
            for target, part, rows in () if direct else copies:
                for to, origin, count in rows.tolist():
                    self._stage(target[to : to + count], part[origin : origin + count])
            done = self._stream.record_event()
        for _, slot in assigned:
            self._copies_queued += 1
            self._last_read[slot], self._copy_number[slot] = None, self._copies_queued
        self._poll_copies()
        self._queued_copies.append((self._copies_queued, done))
        if self.link_rate:
            self.link_free = (
                max(time.perf_counter(), self.link_free) + len(assigned) * self.expert_bytes / self.link_rate
            )

    def _plan(self, source: LayerBytes, assigned: Sequence[tuple[int, int]]) -> list[PartCopies]:
        merged = runs(assigned, max(1, COPY_BYTES // self.expert_bytes))
        return [
            (slots.view(-1), part.bytes.view(-1), plan_copies(merged, part.offset, part.bytes.shape[1], slots.shape[1]))
            for slots, parts in ((self.first, source.first), (self.down, source.down))
            for part in parts
        ]

    def _stage(self, target: Tensor, source: Tensor) -> None:
        if self._staging is None:
            self._staging = StagingRing()
        self._staging.copy(target, source)

    def wait_for_copies(self, slots: Sequence[int]) -> None:
        """The current stream waits until these slots are filled."""
        last = max((self._copy_number[slot] for slot in slots), default=0)
        for number, done in self._queued_copies:
            if last <= self._copies_done:
                return
            if number >= last:
                torch.cuda.current_stream(self.device).wait_event(done)
                return

    def mark_read(self, slots: Sequence[int]) -> None:
        """Nothing after the work queued on the current stream so far reads these slots."""
        if self._stream is None:
            return
        event = torch.cuda.current_stream(self.device).record_event()
        for slot in slots:
            self._last_read[slot] = event


def with_addresses(copies: Sequence[PartCopies]) -> NDArray[np.uint64]:
    """Rows (target address, source address, bytes) of all copies."""
    return np.concatenate(
        [rows + np.array([target.data_ptr(), part.data_ptr(), 0], np.uint64) for target, part, rows in copies]
    )
