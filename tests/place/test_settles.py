"""What `auto` comes to, on a machine made of numbers: the engine's own decisions, prefetches, trials and corrections,
by a clock that only moves when the made-up link, CPU and GPU do.

The machine has what the engine's costs do not know. Copies and the CPU share memory; a share of few experts leaves
threads idle; whoever works on both sides pays Python's time (`tax`), which no formula has; every part takes 10 % more
or less, by chance; the first time that memory is touched takes much longer. The engine is given costs that are right,
three times too high or half of the truth. In a few steps it has to be as fast as the better fixed policy, and stay.
"""

from __future__ import annotations

import itertools
import statistics
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ktransformers.place import choose, trials
from ktransformers.place import engine as module
from ktransformers.place.choose import PlacedLayer
from ktransformers.place.engine import ExpertEngine
from ktransformers.place.phase import PHASES
from ktransformers.plan.split import Costs

EXPERTS, LAYERS, TOP_K = 128, 8, 8
LIMIT, TIMED = 10, 8  # steps until it must have settled, and that are timed then
PAUSE = 0.03  # between two steps
# One layer of Qwen3-30B on 16 AMX cores and an H200, about: 53 GB/s of link, 154 of memory.
BF16 = Costs(
    cpu_call=0.8e-3,
    cpu_token=1.5e-7,
    cpu_expert=72e-6,
    cpu_row=1.42e-6,
    link_expert=177e-6,
    memory_expert=61e-6,
    gpu_call=1.2e-3,
    gpu_expert=12e-6,
    gpu_row=20e-9,
)
INT4 = replace(BF16, cpu_expert=64e-6, cpu_row=1.5e-6, link_expert=51e-6, memory_expert=18e-6)
BACK = 1.6  # of the CPU's forward; the link carries the same


def backward(costs: Costs) -> Costs:
    return replace(costs, cpu_expert=BACK * costs.cpu_expert, cpu_row=BACK * costs.cpu_row, gpu_row=3 * costs.gpu_row)


class Store:
    """Somebody to refer to."""


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Link:
    """Slots on a GPU that is not there: experts arrive when the link has carried them."""

    def __init__(self, clock: Clock, count: int, costs: Costs, chance: np.random.Generator) -> None:
        self.clock, self.count, self.costs, self.chance = clock, count, costs, chance
        self.link_free = self.really_free = 0.0  # as the engine thinks, and as it is
        self.arrival: dict[tuple[int, int], float] = {}

    def backlog(self) -> float:
        return max(0.0, self.link_free - self.clock.now)

    def direct(self, source: Any) -> bool:
        return True

    def present(self, layer: int) -> frozenset[int]:
        return frozenset(expert for owner, expert in self.arrival if owner == layer)

    def coming(self, layer: int) -> tuple[int, ...]:
        found = [(at, expert) for (owner, expert), at in self.arrival.items() if owner == layer and at > self.clock.now]
        return tuple(expert for _, expert in sorted(found))

    def fetch(self, layer: int, source: Any, experts: Any) -> None:
        slower = 1.05 * float(self.chance.normal(1, 0.03))  # than measured alone
        for expert in experts:
            if (layer, expert) not in self.arrival:
                self.link_free = max(self.clock.now, self.link_free) + self.costs.link_expert
                self.really_free = max(self.clock.now, self.really_free) + slower * self.costs.link_expert
                self.arrival[layer, expert] = self.really_free
        while len(self.arrival) > self.count:  # the oldest of other layers give way
            self.arrival.pop(next(key for key in self.arrival if key[0] != layer))


class Made:
    """A model of layers, each with its own counts of rows, in training or not."""

    def __init__(
        self, clock: Clock, policy: str, *, tokens: int, costs: Costs, believed: float, tax: float, learns: bool
    ) -> None:
        self.clock, self.tokens, self.tax, self.learns = clock, tokens, tax, learns
        self.chance = np.random.default_rng(tokens)
        self.link = Link(clock, EXPERTS * 5 // 4, costs, self.chance)
        self.true = {"forward": costs, "backward": backward(costs)}
        self.engine = ExpertEngine(torch.device("cpu"), policy, self.link)  # type: ignore[arg-type]
        popular = self.chance.dirichlet([2.0] * EXPERTS, LAYERS)
        self.counts = [self.chance.multinomial(tokens * TOP_K, share) for share in popular]
        thought = {
            name: replace(one, cpu_expert=one.cpu_expert * believed, cpu_row=one.cpu_row * believed)
            for name, one in self.true.items()
        }
        self.stores = [Store() for _ in range(LAYERS)]
        self.cold: set[tuple[int, str, bool, bool]] = set()
        self.batch: Any = SimpleNamespace(ids=torch.empty(tokens, TOP_K), factors=None)
        self.engine.side.replays = lambda *_: False  # type: ignore[method-assign]
        for index in range(LAYERS):
            packed: Any = SimpleNamespace(index=index, source=None, geometry=SimpleNamespace(experts=EXPERTS))
            home: Any = weakref.ref(self.stores[index])
            self.engine.layers[index] = PlacedLayer(packed, home, thought, np.zeros(EXPERTS, np.int64))

    def noise(self) -> float:
        return float(np.exp(self.chance.normal(0, 0.1)))

    def step(self, attention: float) -> float:
        """Seconds per layer."""
        begun = self.clock.now
        for index in range(LAYERS):
            self.layer(index, "forward")
            self.clock.now += attention * self.noise()
        for index in reversed(range(LAYERS if self.learns else 0)):
            self.layer(index, "backward")
            self.clock.now += 2 * attention * self.noise()
        return (self.clock.now - begun) / LAYERS

    def layer(self, index: int, name: str) -> None:
        layer, start, counts, phase = self.engine.layers[index], self.clock.now, self.counts[index], PHASES[name]
        way = self.engine._way(layer, self.batch, phase)
        found, true = self.engine.decide(layer, counts, self.tokens, phase, way), self.true[name]
        gpu = found.there + found.streamed
        if gpu and found.cpu:
            self.clock.now += self.tax
        gpu_end = start
        if gpu:
            self.link.fetch(index, None, found.streamed)
            arrived = max((self.link.arrival[index, expert] for expert in found.streamed), default=start)
            work = len(gpu) * true.gpu_expert + float(counts[list(gpu)].sum()) * true.gpu_row
            gpu_end = true.gpu_call + max(start + work * self.noise(), arrived)
        layer.seen[trials.size_of(self.tokens)] = counts
        self.engine._prefetch(layer, phase, self.tokens, int(counts.sum()))

        def cpu() -> None:
            experts, rows = len(found.cpu), float(counts[list(found.cpu)].sum())
            idle = 1 + 6 / experts  # threads that find no more to do at the end
            alone, crowded = (true.cpu(experts, rows, self.tokens, beside) * idle for beside in (False, True))
            beside = min(1.0, max(0.0, self.link.really_free - self.clock.now) / crowded)  # done while the link reads
            first = (index, name, bool(gpu), bool(found.cpu)) not in self.cold
            self.cold.add((index, name, bool(gpu), bool(found.cpu)))
            self.clock.now += (beside * crowded + (1 - beside) * alone) * self.noise() * (2 if first else 1)

        if found.cpu:
            self.engine._timed(name, self.tokens, found, cpu)
        self.clock.now = max(self.clock.now, gpu_end)
        if self.engine.policy == "auto":
            self.engine.trials.leave()


def steps(made: Made, attention: float, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        made.clock.now += PAUSE
        taken.append(made.step(attention))
    return taken


class Case:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int, attention: float, **words: Any) -> None:
        self.tokens, self.attention, self.patch = tokens, attention, monkeypatch
        self.words: dict[str, Any] = {"costs": BF16, "believed": 1.0, "tax": 0.0, "learns": False} | words

    def made(self, policy: str) -> Made:
        clock = Clock()
        for one in (choose, module, trials):
            self.patch.setattr(one, "time", clock)
        return Made(clock, policy, tokens=self.tokens, **self.words)

    def fixed(self) -> float:
        """Seconds per layer of the better one."""
        both = (steps(self.made(policy), self.attention, 3 + TIMED)[3:] for policy in ("resident", "stream"))
        return min(map(statistics.mean, both))

    def auto(self) -> tuple[float, Made]:
        made = self.made("auto")
        steps(made, self.attention, LIMIT)
        return statistics.mean(steps(made, self.attention, TIMED)), made


@pytest.mark.parametrize("tokens", [128, 512, 2048, 8192])
@pytest.mark.parametrize(("costs", "learns"), [(BF16, False), (BF16, True), (INT4, False)])
def test_auto_is_not_behind(tokens: int, costs: Costs, learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    best = Case(monkeypatch, tokens, 0.003, costs=costs, learns=learns).fixed()
    for tax, believed in ((0.0, 1.0), (0.0, 3.0), (3e-3, 1.0), (3e-3, 0.5)):
        case = Case(monkeypatch, tokens, 0.003, costs=costs, learns=learns, tax=tax, believed=believed)
        taken, made = case.auto()
        assert made.engine.trials.settled(tokens), (tax, believed, made.engine.trials.ways())
        assert taken <= max(1.05 * best, best + 0.2e-3), (tax, believed, made.engine.trials.ways())


@pytest.mark.parametrize("tokens", [512, 2048])
def test_two_sides_are_worth_it(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither side is far ahead, both together gain a fifth at least."""
    case = Case(monkeypatch, tokens, 0.003)
    assert case.auto()[0] <= 0.8 * case.fixed()


@pytest.mark.parametrize("costs", [BF16, INT4])
def test_it_stays_with_what_it_found(costs: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a hundred steps a few are tries; nothing goes to and fro."""
    made = Case(monkeypatch, 512, 0.003, costs=costs, tax=1e-3).made("auto")
    steps(made, 0.003, LIMIT)
    (trial,) = made.engine.trials._trials.values()
    ways = []
    for _ in range(100):
        steps(made, 0.003, 1)
        ways.append(trial.way)
    changes = sum(first != last for first, last in itertools.pairwise(ways))
    assert changes <= 4, ways
    assert ways.count(trial.best) >= 90, ways


def test_the_first_steps_are_a_pure_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that costs prefer, until both sides are tried beside it."""
    for costs, tokens, pure in ((BF16, 128, "cpu"), (BF16, 8192, "stream"), (INT4, 2048, "stream")):
        made = Case(monkeypatch, tokens, 0.003, costs=costs).made("auto")
        steps(made, 0.003, 2)
        (trial,) = made.engine.trials._trials.values()
        assert (trial.way, trial.best) == (pure, pure)


def test_a_machine_that_changes_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take the CPU for good: what was best is left for what was tried before."""
    case = Case(monkeypatch, 512, 0.003)
    made = case.made("auto")
    steps(made, 0.003, LIMIT)
    (trial,) = made.engine.trials._trials.values()
    assert trial.best == "both"
    made.true["forward"] = replace(BF16, cpu_expert=6 * BF16.cpu_expert, cpu_row=6 * BF16.cpu_row)
    steps(made, 0.003, 40)
    slow = steps(made, 0.003, TIMED)
    assert statistics.mean(slow) <= 1.1 * statistics.mean(steps(case.made("stream"), 0.003, TIMED)), trial.records


def test_what_is_out_of_reach_is_not_tried_beside_a_mixture() -> None:
    """Two sides are faster by the clock and gain too little by the costs, which so have nothing to compare with: a way
    that takes four times as long is out of reach all the same."""
    trial, taken = trials.Trial(), {"both": 0.8, "stream": 1.0, "cpu": 4.0}
    foretold = {"stream": 1.0, "cpu": 4.0, "both": 0.7}
    walked = []
    for _ in range(40):
        walked.append(trial.begin(lambda: foretold))
        trial.end(walked[-1], taken[walked[-1]], LAYERS)
        if trial.best == "both":
            foretold.pop("both", None)
    assert trial.best == "both" and set(walked) == {"stream", "both"}
