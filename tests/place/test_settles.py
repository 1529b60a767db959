"""What `auto` comes to, on a machine made of numbers: the engine's own decisions, prefetches and corrections, by a
clock that only moves when the made-up link, CPU and GPU do.

A layer's CPU share takes what the true costs say, longer while the link reads; streamed experts arrive one after the
other; between two layers the GPU is at attention. The engine is given costs that are right, three times too high or
half of the truth, and pauses between steps. After a few steps it has to be as fast as the better fixed policy.
"""

from __future__ import annotations

import statistics
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ktransformers.place import engine as module
from ktransformers.place.engine import Engine, Layer, Phase
from ktransformers.place.split import Costs

EXPERTS, LAYERS, TOP_K, STEPS = 128, 6, 8, 12
PAUSE = 0.05  # between two steps
FORWARD = Phase("forward", "forward")
# One layer of Qwen3-30B in bf16 on 16 AMX cores and an H200, about.
TRUE = Costs(
    cpu_call=0.8e-3,
    cpu_token=1.5e-7,
    cpu_expert=78e-6,
    cpu_row=1.42e-6,
    link_expert=181e-6,
    memory_expert=61e-6,
    gpu_call=1.5e-3,
    gpu_expert=12e-6,
    gpu_row=20e-9,
)


class Store:
    """Somebody to refer to."""


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Link:
    """Slots on a GPU that is not there: experts arrive when the link has carried them."""

    def __init__(self, clock: Clock, count: int) -> None:
        self.clock, self.count = clock, count
        self.link_free = 0.0
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
        for expert in experts:
            if (layer, expert) not in self.arrival:
                self.link_free = max(self.clock.now, self.link_free) + TRUE.link_expert
                self.arrival[layer, expert] = self.link_free
        while len(self.arrival) > self.count:  # the oldest of other layers give way
            self.arrival.pop(next(key for key in self.arrival if key[0] != layer))


class Made:
    """A model of layers, each with its own counts of rows."""

    def __init__(self, clock: Clock, policy: str, believed: float, tokens: int) -> None:
        self.clock, self.tokens = clock, tokens
        self.link = Link(clock, EXPERTS * 5 // 4)
        self.engine = Engine(torch.device("cpu"), policy, self.link)  # type: ignore[arg-type]
        random = np.random.default_rng(0)
        self.counts = [
            np.bincount(random.integers(0, EXPERTS, tokens * TOP_K), minlength=EXPERTS) for _ in range(LAYERS)
        ]
        costs = replace(TRUE, cpu_expert=TRUE.cpu_expert * believed, cpu_row=TRUE.cpu_row * believed)
        self.stores = [Store() for _ in range(LAYERS)]
        for index in range(LAYERS):
            packed: Any = SimpleNamespace(index=index, source=None)
            home: Any = weakref.ref(self.stores[index])
            self.engine.layers[index] = Layer(packed, home, {"forward": costs}, np.zeros(EXPERTS, np.int64))

    def step(self, attention: float) -> float:
        """Seconds per layer."""
        begun = self.clock.now
        for index, counts in enumerate(self.counts):
            self.layer(index, counts)
            self.clock.now += attention
        return (self.clock.now - begun) / LAYERS

    def layer(self, index: int, counts: Any) -> None:
        layer, start = self.engine.layers[index], self.clock.now
        found = self.engine.decide(layer, counts, self.tokens, FORWARD)
        gpu_end = start
        if gpu := found.there + found.streamed:
            self.link.fetch(index, None, found.streamed)
            arrived = max((self.link.arrival[index, expert] for expert in found.streamed), default=start)
            work = len(gpu) * TRUE.gpu_expert + float(counts[list(gpu)].sum()) * TRUE.gpu_row
            gpu_end = TRUE.gpu_call + max(start + work, arrived)
        self.engine._prefetch(layer, FORWARD, counts, self.tokens)

        def cpu() -> None:
            experts, rows = len(found.cpu), float(counts[list(found.cpu)].sum())
            alone, crowded = (TRUE.cpu(experts, rows, self.tokens, beside) for beside in (False, True))
            beside = min(1.0, self.link.backlog() / crowded)  # of the work is done while the link reads
            self.clock.now += beside * crowded + (1 - beside) * alone

        if found.cpu:
            self.engine._timed(layer, "forward", found, cpu)
        self.clock.now = max(self.clock.now, gpu_end)


def settled(policy: str, tokens: int, attention: float, believed: float, monkeypatch: pytest.MonkeyPatch) -> float:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    made, taken = Made(clock, policy, believed, tokens), []
    for _ in range(STEPS):
        clock.now += PAUSE
        taken.append(made.step(attention))
    return statistics.median(taken[STEPS // 2 :])


@pytest.mark.parametrize("tokens", [128, 512, 2048, 8192])
@pytest.mark.parametrize("attention", [0.0, 0.006])
@pytest.mark.parametrize("believed", [1.0, 3.0, 0.5])
def test_auto_is_not_behind(tokens: int, attention: float, believed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, stream, auto = (
        settled(policy, tokens, attention, believed, monkeypatch) for policy in ("cpu", "stream", "auto")
    )
    assert auto <= 1.05 * min(cpu, stream)


@pytest.mark.parametrize("tokens", [512, 2048])
def test_two_sides_are_worth_it(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither side is far ahead, both together gain a quarter at least."""
    cpu, stream, auto = (settled(policy, tokens, 0.006, 1.0, monkeypatch) for policy in ("cpu", "stream", "auto"))
    assert auto <= 0.75 * min(cpu, stream)
