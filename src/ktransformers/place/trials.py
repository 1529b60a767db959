"""Which way walks over a model's layers go under `auto`, by measured seconds: all on the CPU, residents on the GPU and
the others on the CPU (asked for, or by host functions that nobody waits for), all streamed (who is wanted, or everybody
unasked), or some streamed and some on the CPU.

Costs foretell, and are wrong by more than two sides gain: who waits for whom, what Python takes beside threads that
multiply, what copies take from the CPU's memory is in no formula. So a walk (one pass over the layers, forward or back)
goes one way from end to end and is timed by the device's own clock, by events that nobody waits for. The first walk of
a kind (a direction and a size of batch) goes the better pure way by the costs; a way that they find worth it is tried
once, and stays if it was faster by a margin. The first walk of a try does not count, nor does one in which something
was made that later ones find: copies and buffers were another way's, and what is recorded is faster than what will be.
The surprising decision: what lost narrowly is tried again, but after pauses that double, so that noise costs a step in
a hundred and a change of the machine is still found out. Where a layer takes a millisecond, timing it is not free
either: such walks, once settled, are timed one in a few.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

WHOLE = "whole"  # all experts of a layer are streamed, so that nobody has to wait for who is wanted
QUEUED = "queued"  # a few tokens by host functions: nobody waits for who is wanted either
WAYS = (WHOLE, "both", "cpu", "stream", "resident", QUEUED)  # in the order in which they are tried
# Of `split`. Residents are computed where they lie in every way but `cpu`.
POLICY = {"both": "auto", "cpu": "cpu", "stream": "stream", "resident": "resident", WHOLE: "stream", QUEUED: "resident"}
ENOUGH = 8  # layers that a pure way was timed over before it is judged; a mixture has to find its measure first
LONGER = 2  # times as many where a layer takes less than BRIEF
MARGIN, MIXED = 0.03, 0.05  # by which a way must be faster than the one it replaces; a mixture
REACH = 1.6  # a pure way that costs say takes longer than that times the other is not tried
BRIEF = 3e-3  # seconds of a layer, unless they say that it takes less than that: costs cannot tell such apart
EVERY = 8  # settled walks over brief layers: one of them is timed, and others are thought of then
WARM = 4  # walks of a try that may go by in making what later ones find
NEAR = 1.25  # a way that was slower than that times the best is not tried again while nothing changes
SOON, PATIENCE, LONGEST = 2, 64, 1024  # walks until another try: what seems faster now; what lost; at most
FADE = 0.3  # weight of the newest walk
STRAY = 3.0  # one layer counts at most so many times the median

Kind = tuple[str, int]  # direction and size of the batch
Predicted = Mapping[str, float]  # seconds of a layer by way; a mixture that gains too little is not in it


class Timeline:
    """Moments as a device passes them, in the order of its current stream; without CUDA the host's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def mark(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, first: Any, last: Any) -> float | None:
        """Seconds; None: the device has not come by yet."""
        if self._device is None:
            return float(last - first)
        return first.elapsed_time(last) / 1e3 if last.query() and first.query() else None


def size_of(tokens: int) -> int:
    """Batches of one size are alike: half octaves."""
    return round(2 * math.log2(max(1, tokens)))


@dataclass
class Record:
    seconds: float = 0.0  # of a layer with all that lies between two; 0: never measured
    layers: int = 0  # timed since the way was last taken up
    tried: int = 0  # the turn in which it last lost
    patience: int = PATIENCE


class Trial:
    """One kind of batch. `hint`: that of a neighbouring size, whose verdicts hold until this one has its own. `walks`
    have gone the way since it was taken up."""

    def __init__(self, hint: Trial | None = None) -> None:
        self.records = {way: Record() for way in WAYS}
        self.way = self.best = ""
        self.settled = False
        self.walks = self._turn = 0
        self._hint = hint.best if hint is not None else ""
        self._hopeless = frozenset() if hint is None else hint.lost()

    def lost(self) -> frozenset[str]:
        """Ways that were far behind."""
        known = {way: record.seconds for way, record in self.records.items() if record.seconds}
        return frozenset(way for way, seconds in known.items() if seconds > NEAR * known.get(self.best, math.inf))

    def begin(self, predict: Callable[[], Predicted]) -> str:
        """The way of the next walk."""
        self._turn += 1
        self.walks += 1
        if not self.way:
            predicted = predict()
            pure = min((way for way in predicted if way != "both"), key=lambda way: predicted[way])
            self.way = self.best = self._hint if self._hint in predicted else pure
            return self.way
        if not self.timed or self.records[self.way].layers < self._needed(self.way):
            return self.way
        if self.way != self.best:
            winner, loser = (self.way, self.best) if self._beats(self.way) else (self.best, self.way)
            beaten = self.records[loser]
            beaten.tried, beaten.patience = self._turn, min(LONGEST, 2 * beaten.patience)
            self.best = winner
        found = self._candidate(predict)
        self.settled = found is None and not any(self._seems_faster(way) for way in WAYS)
        if (chosen := found or self.best) != self.way:
            self.way, self.walks, self.records[chosen].layers = chosen, 1, 0
        return self.way

    @property
    def timed(self) -> bool:
        """Whether this walk is."""
        return not self.settled or self.records[self.best].seconds > BRIEF or self._turn % EVERY == 0

    def end(self, way: str, seconds: float, layers: int) -> None:
        record = self.records[way]
        if not record.layers:
            record.seconds = seconds
        elif record.layers < self._needed(way):  # the mean of the walks of a try
            record.seconds += (seconds - record.seconds) * layers / (record.layers + layers)
        else:
            record.seconds += FADE * (seconds - record.seconds)
        if way == self.way:
            record.layers += layers

    def _needed(self, way: str) -> int:
        """Brief layers vary more than others: a thread that slept, a host function that came late."""
        enough = ENOUGH * (LONGER if 0 < self.records[way].seconds < BRIEF else 1)
        return enough if way != "both" and way != self.best else 2 * enough

    def _beats(self, way: str) -> bool:
        """A mixture yields to a pure way that is not slower."""
        margin = 0.0 if self.best == "both" else MIXED if way == "both" else MARGIN
        return self.records[way].seconds <= (1 - margin) * self.records[self.best].seconds

    def _seems_faster(self, way: str) -> bool:
        """By what was measured last; a walk is timed after the one that follows it has begun."""
        return way != self.best and self.records[way].seconds > 0 and self._beats(way)

    def _candidate(self, predict: Callable[[], Predicted]) -> str | None:
        """A way that is worth a try."""
        predicted: Predicted | None = None
        for way in WAYS:
            record = self.records[way]
            if way == self.best:
                continue
            if record.seconds:
                waited, over = self._turn - record.tried, record.seconds / self.records[self.best].seconds
                if (waited >= SOON and self._seems_faster(way)) or (waited >= record.patience and over <= NEAR):
                    return way
            elif way not in self._hopeless:
                predicted = predict() if predicted is None else predicted
                # A mixture that is the best by the clock may be none by the costs, which then know nothing of it.
                near = max(BRIEF, REACH * predicted.get(self.best, min(predicted.values(), default=0.0)))
                if way in predicted and (way == "both" or predicted[way] <= near):
                    return way
        return None


@dataclass
class Walk:
    trial: Trial
    kind: Kind
    way: str
    fresh: bool  # the first of its kind that goes this way, or something is made in it
    timed: bool
    visited: set[tuple[int, str]] = field(default_factory=set)  # layers and phases
    begun: list[Any] = field(default_factory=list)  # moments, a layer each
    ended: Any = None  # the last layer's

    def seconds(self, timeline: Timeline) -> float | None:
        """Mean of its layers, from one's beginning to the next one's; None: not known yet."""
        moments = [*self.begun, self.ended]
        taken = []
        for first, last in itertools.pairwise(moments):
            found = timeline.between(first, last)
            if found is None:
                return None
            taken.append(found)
        most = STRAY * sorted(taken)[len(taken) // 2]
        return sum(min(one, most) for one in taken) / len(taken)


class Trials:
    """Of one engine's layers."""

    def __init__(self, device: torch.device) -> None:
        self._timeline = Timeline(device)
        self._trials: dict[Kind, Trial] = {}
        self._walk: Walk | None = None
        self._untold: deque[Walk] = deque()  # over, and not yet timed

    @property
    def fresh(self) -> bool:
        """What is measured now is of a way that has just been taken up."""
        return self._walk is not None and self._walk.fresh

    def enter(self, direction: str, tokens: int, place: tuple[int, str], predict: Callable[[], Predicted]) -> str:
        """The way of a walk that comes to a layer in a phase, at the moment at which the layer is called; a new walk
        begins where this one has been."""
        kind = direction, size_of(tokens)
        walk = self._walk
        if walk is None or walk.kind != kind or place in walk.visited:
            self._close()
            trial = self._trials.get(kind)
            if trial is None:
                trial = self._trials[kind] = Trial(self._neighbour(kind))
            way = trial.begin(predict)
            walk = self._walk = Walk(trial, kind, way, trial.walks == 1, trial.timed)
        walk.visited.add(place)
        if walk.timed:
            walk.begun.append(self._timeline.mark())
            walk.ended = None  # a walk that breaks off in a layer tells nothing
        return walk.way

    def leave(self) -> None:
        """The layer is queued to its end."""
        if self._walk is not None and self._walk.timed:
            self._walk.ended = self._timeline.mark()

    def spoil(self) -> None:
        """Something is made in this walk that later ones find: its seconds are not the way's. What is never done with
        making is judged all the same."""
        if self._walk is not None and self._walk.trial.walks <= WARM:
            self._walk.fresh = True

    def detour(self, way: str) -> str:
        """This layer goes a way of its own: the walk tells nothing, and is not the first that goes its own."""
        if self._walk is not None:
            self._walk.fresh = True
            if self._walk.trial.walks == 1:
                self._walk.trial.walks = 0
        return way

    def forget(self) -> None:
        """The layers have become others."""
        self._trials.clear()
        self._untold.clear()
        self._walk = None

    def coming(self, direction: str, tokens: int) -> str:
        """The way that a batch's walk is on, or that the next one is likely to go; empty: nobody knows."""
        trial = self._trials.get((direction, size_of(tokens)))
        return "" if trial is None else trial.way

    def settled(self, tokens: int) -> bool:
        """No way is being tried for batches of this size."""
        return all(trial.settled for (_, size), trial in self._trials.items() if size == size_of(tokens))

    def ways(self) -> dict[str, dict[str, Any]]:
        """For reports: by direction and size, the best way and the seconds of a layer by each that was tried."""
        return {
            f"{direction} {round(2 ** (size / 2))}": {
                "best": trial.best,
                "seconds": {way: record.seconds for way, record in trial.records.items() if record.seconds},
            }
            for (direction, size), trial in self._trials.items()
        }

    def _neighbour(self, kind: Kind) -> Trial | None:
        direction, size = kind
        near = (self._trials.get((direction, size + step)) for step in (-1, 1))
        return next((trial for trial in near if trial is not None and trial.settled), None)

    def _close(self) -> None:
        if self._walk is not None and self._walk.ended is not None and not self._walk.fresh:
            self._untold.append(self._walk)
        self._walk = None
        while self._untold:
            walk = self._untold[0]
            seconds = walk.seconds(self._timeline)
            if seconds is None:
                return
            self._untold.popleft()
            walk.trial.end(walk.way, seconds, len(walk.begun))
