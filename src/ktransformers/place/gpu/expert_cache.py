"""Room on the GPU for packed experts: slots of one size, filled over PCIe, found again by layer and expert.

A slot keeps its expert until the room is wanted, so what a layer's recomputation fetched its backward finds, and what
was fetched ahead is there when the layer is called. Two events guard a slot: `arrived`, behind the copy that fills it,
for those who decode it; and `read`, behind the last decoding, for the next copy into it. The copy stream and the
computing stream never wait for each other otherwise. Copies arrive in the order in which they were queued, so a number
each is enough to know which have, and to wait for several is to wait for the last. On a CPU, for tests, copies are
plain.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.place.gpu.cuda_driver import Run, copy_to_device
from ktransformers.place.gpu.layout import Geometry
from ktransformers.place.gpu.pinned import Registered, Stages


@dataclass(frozen=True)
class LayerBytes:
    """The packed bytes of a layer in host memory."""

    first: Tensor  # uint8 [E, bytes]
    down: Tensor


Key = tuple[int, int]  # layer, expert
# At a time: small copies must not wait longer for the copy engine, and each takes the driver 20 microseconds.
COPY_BYTES = 64 << 20


class ExpertCache:
    def __init__(self, geometry: Geometry, count: int, device: torch.device, registered: Registered | None) -> None:
        """`registered` None: everything is staged."""
        self.geometry, self.device, self.count = geometry, device, count
        self.first = torch.empty(count, geometry.first.expert_bytes, dtype=torch.uint8, device=device)
        self.down = torch.empty(count, geometry.down.expert_bytes, dtype=torch.uint8, device=device)
        self.expert_bytes = geometry.expert_bytes
        self.copied_bytes = 0
        self.link_free = 0.0  # when the copies queued so far will have ended, by the clock
        self.link_rate = 0.0  # bytes a second; 0: not known
        self._registered = registered
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            # Memory that others have just let go of may still be in use there; and copies may be under way when nobody
            # wants them any more, while their memory goes.
            self._stream.wait_stream(torch.cuda.current_stream(device))
            weakref.finalize(self, self._stream.synchronize).atexit = False
        self._stages: Stages | None = None
        self._slot: dict[int, dict[int, int]] = {}  # by layer and expert
        self._owner: list[Key | None] = [None] * count
        self._read: list[torch.cuda.Event | None] = [None] * count
        self._number = [0] * count  # of a slot's copy among all copies
        self._under_way: deque[tuple[int, torch.cuda.Event]] = deque()  # the last number of each queued bundle
        self._arrived = 0  # copies up to this number have
        self._used = [0] * count
        self._clock = self._copies = 0

    @property
    def bytes(self) -> int:
        return self.first.numel() + self.down.numel()

    def backlog(self) -> float:
        """Seconds until the link is free, about."""
        return max(0.0, self.link_free - time.perf_counter())

    def present(self, layer: int) -> frozenset[int]:
        """Experts of a layer that are here or on their way."""
        return frozenset(self._slot.get(layer, ()))

    def coming(self, layer: int) -> tuple[int, ...]:
        """Those of `present` whose copies have not ended, in the order of the queue."""
        self._look()
        numbers, mine = self._number, self._slot.get(layer, {})
        found = sorted((numbers[slot], expert) for expert, slot in mine.items() if numbers[slot] > self._arrived)
        return tuple(expert for _, expert in found)

    def _look(self) -> None:
        """Which copies have arrived."""
        while self._under_way and self._under_way[0][1].query():  # type: ignore[no-untyped-call]
            self._arrived = self._under_way.popleft()[0]

    def direct(self, source: LayerBytes) -> bool:
        """Whether copies from there need no staging; decides it when first asked."""
        if not self._cuda or self._registered is None:
            return False
        return self._registered.take(source.first) and self._registered.take(source.down)

    def forget(self, layer: int) -> None:
        """A layer's experts are fetched anew when they are wanted again."""
        self.retain(layer, frozenset())

    def fetch(
        self, layer: int, source: LayerBytes, experts: Sequence[int], keep: frozenset[Key] = frozenset()
    ) -> list[int]:
        """Slots of these experts; those that are missing are put on their way, in place of the longest unused that
        nobody in `keep` owns. As many as there is room for."""
        self._clock += 1
        mine = self._slot.setdefault(layer, {})
        if missing := [expert for expert in experts if expert not in mine]:
            self._copy(source, self._seat(layer, mine, missing, frozenset(experts), keep))
        found = [mine[expert] for expert in experts if expert in mine]
        for slot in found:
            self._used[slot] = self._clock
        return found

    def _seat(
        self, layer: int, mine: dict[int, int], missing: Sequence[int], wanted: frozenset[int], keep: frozenset[Key]
    ) -> list[tuple[int, int]]:
        """(expert, slot), both in rising order as far as there is room: neighbours travel in one copy."""
        free = [
            slot
            for slot, owner in enumerate(self._owner)
            if owner is None or not (owner in keep or (owner[0] == layer and owner[1] in wanted))
        ]
        free.sort(key=self._used.__getitem__)
        count = min(len(free), len(missing))
        filled = list(zip(sorted(missing[:count]), sorted(free[:count]), strict=True))
        for expert, slot in filled:
            owner = self._owner[slot]
            if owner is not None:
                del self._slot[owner[0]][owner[1]]
            self._owner[slot] = (layer, expert)
            mine[expert] = slot
        return filled

    def retain(self, layer: int, experts: frozenset[int]) -> None:
        """Forget all of a layer but these."""
        mine = self._slot.get(layer, {})
        for expert in [expert for expert in mine if expert not in experts]:
            self._owner[mine.pop(expert)] = None

    def _copy(self, source: LayerBytes, filled: Sequence[tuple[int, int]]) -> None:
        if not filled:
            return
        self.copied_bytes += len(filled) * self.expert_bytes
        if self._stream is None:
            for expert, slot in filled:
                self.first[slot].copy_(source.first[expert])
                self.down[slot].copy_(source.down[expert])
            return
        direct = self.direct(source)
        with torch.cuda.stream(self._stream):
            for event in {id(e): e for _, slot in filled if (e := self._read[slot]) is not None}.values():
                self._stream.wait_event(event)
            pairs = ((self.first, source.first), (self.down, source.down))
            found = runs(filled, max(1, COPY_BYTES // self.expert_bytes))
            if direct:
                copy_to_device(found, pairs, self._stream.cuda_stream)
            for expert, slot, count in () if direct else found:
                for buffer, bytes_ in pairs:
                    self._stage(buffer[slot : slot + count].view(-1), bytes_[expert : expert + count].view(-1))
            arrived = self._stream.record_event()
        for _, slot in filled:
            self._copies += 1
            self._read[slot], self._number[slot] = None, self._copies
        self._look()
        self._under_way.append((self._copies, arrived))
        if self.link_rate:
            self.link_free = max(time.perf_counter(), self.link_free) + len(filled) * self.expert_bytes / self.link_rate

    def _stage(self, target: Tensor, source: Tensor) -> None:
        if self._stages is None:
            self._stages = Stages()
        self._stages.copy(target, source)

    def await_ready(self, slots: Sequence[int]) -> None:
        """The current stream waits until these are filled."""
        last = max((self._number[slot] for slot in slots), default=0)
        for number, arrived in self._under_way:
            if last <= self._arrived:
                return
            if number >= last:
                torch.cuda.current_stream(self.device).wait_event(arrived)
                return

    def done_reading(self, slots: Sequence[int]) -> None:
        """What the current stream was given so far is all that reads these."""
        if self._stream is None:
            return
        event = torch.cuda.current_stream(self.device).record_event()
        for slot in slots:
            self._read[slot] = event


def runs(filled: Sequence[tuple[int, int]], most: int) -> list[Run]:
    """(expert, slot) pairs as (first expert, first slot, count) where both go up by one; at most so many together."""
    found: list[Run] = []
    for expert, slot in filled:
        if found:
            first, at, count = found[-1]
            if count < most and (expert, slot) == (first + count, at + count):
                found[-1] = (first, at, count + 1)
                continue
        found.append((expert, slot, 1))
    return found
