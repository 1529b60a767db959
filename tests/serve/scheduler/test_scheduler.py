"""The scheduler without a model: a cache that counts tokens, and steps whose seconds follow from their tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktransformers.serve.scheduler.scheduler import Limits, Scheduler, TokenRange
from ktransformers.serve.scheduler.sequence import GenerationRequest, Sequence
from ktransformers.serve.scheduler.step_costs import TARGET_SECONDS, StepCosts, pairs_of

BLOCK = 16


class CountingCache:
    """Capacity in blocks; nothing is kept of a sequence that has left."""

    def __init__(self, tokens: int) -> None:
        self.limit, self.blocks = tokens // BLOCK, dict[Sequence, int]()

    def fetched(self, sequence: Sequence) -> bool:
        return True

    def has_room(self, tokens: int) -> bool:
        return sum(self.blocks.values()) + -(-tokens // BLOCK) <= self.limit

    def grow(self, sequence: Sequence) -> bool:
        wanted = -(-len(sequence.tokens) // BLOCK)
        if sum(self.blocks.values()) - self.blocks.get(sequence, 0) + wanted > self.limit:
            return False
        self.blocks[sequence] = wanted
        return True

    def allocate(self, sequence: Sequence) -> bool:
        if self.grow(sequence):
            sequence.slot = SimpleNamespace(length=0)  # type: ignore[assignment]
        return sequence.slot is not None

    def release(self, sequence: Sequence) -> None:
        self.blocks.pop(sequence, None)
        sequence.slot = None


class Machine:
    """Runs what is scheduled: a step takes `base` seconds, `each` for a token and `pair` for a query and a key."""

    def __init__(self, limits: Limits, *, base: float = 0.02, each: float = 1e-3, pair: float = 1e-7) -> None:
        self.costs, self.cache, self.ended = (base, each, pair), CountingCache(limits.max_total_tokens), 0
        self.scheduler = Scheduler(limits, self.cache, self.fail)
        self.steps: list[dict[Sequence, int]] = []
        self.seconds: list[float] = []
        self.eligible: list[set[Sequence]] = []  # running sequences before each step

    def fail(self, sequence: Sequence, error: Exception) -> None:
        raise AssertionError(f"memory ran out: {error}")

    def ask(self, prompt: int, new: int = 4, **options: Any) -> Sequence:
        sequence = Sequence(GenerationRequest((1,) * prompt, new, **options), None, lambda event: None)
        self.scheduler.waiting.append(sequence)
        return sequence

    def step(self) -> list[TokenRange]:
        batch = self.scheduler.schedule()
        base, each, pair = self.costs
        counts = {entry.sequence: entry.end - entry.first for entry in batch}
        assert len(counts) == len(batch), "a sequence is scheduled once in a step"
        pairs = sum(pairs_of(entry.first, entry.end - entry.first) for entry in batch)
        seconds = base + each * sum(counts.values()) + pair * pairs
        self.steps.append(counts)
        self.seconds.append(seconds)
        self.eligible.append(set(self.scheduler.running))
        self.scheduler.learn(batch, seconds)
        for entry in batch:
            sequence: Any = entry.sequence
            assert entry.first == sequence.computed < entry.end <= len(sequence.tokens)
            sequence.slot.length = entry.end
            if entry.end == len(sequence.tokens):
                sequence.tokens.append(2)
                if sequence.new_count >= sequence.request.max_tokens:
                    sequence.finished = True
                    self.scheduler.remove(sequence)
                    self.ended += 1
        return batch

    def run(self, most: int = 5000) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            self.step()
            assert len(self.steps) < most, "sequences do not end"


def limits(**values: Any) -> Limits:
    return replace(Limits(64, 128, 512, 65536, 65536), **values)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=20),
    st.sampled_from([(64, 65536), (3, 65536), (64, 1024)]),
    st.booleans(),
)
def test_every_sequence_ends_and_none_starves(
    requests: list[tuple[int, int, int]], bounds: tuple[int, int], deterministic: bool
) -> None:
    running, tokens = bounds
    machine = Machine(
        limits(
            max_running_requests=running, max_total_tokens=tokens, deterministic=deterministic, chunked_prefill_size=96
        )
    )
    arriving = sorted(requests, key=lambda request: request[2])
    while arriving or machine.scheduler.running or machine.scheduler.waiting:
        while arriving and arriving[0][2] <= len(machine.steps):
            prompt, new, _ = arriving.pop(0)
            machine.ask(prompt, new)
        machine.step()
        assert len(machine.scheduler.running) <= running
        assert sum(machine.cache.blocks.values()) <= machine.cache.limit
        assert len(machine.steps) < 3000, "sequences do not end"
    assert machine.ended == len(requests) and not machine.cache.blocks
    idle: dict[Sequence, int] = {}
    for at, (counts, eligible) in enumerate(zip(machine.steps, machine.eligible, strict=True)):
        idle = {sequence: 0 if sequence in counts else idle.get(sequence, 0) + 1 for sequence in eligible}
        assert all(gap <= len(eligible) for gap in idle.values()), f"a sequence waits for too many steps at {at}"


def test_decode_tokens_are_in_every_step_and_prompts_share_the_rest() -> None:
    machine = Machine(limits())
    streams = [machine.ask(8, 400) for _ in range(8)]
    while any(not one.prompt_computed for one in streams):
        machine.step()
    prompts = [machine.ask(3000, 1) for _ in range(3)]
    began = len(machine.steps)
    while any(not one.finished for one in prompts):
        machine.step()
    for counts in machine.steps[began:]:
        assert all(counts[one] == 1 for one in streams)
        assert any(counts.get(one, 0) for one in prompts)
    assert sum(len(set(counts) & set(prompts)) == 2 for counts in machine.steps[began:]) > 5


def test_a_step_has_a_time_while_others_stream_and_is_large_when_nobody_does() -> None:
    machine = Machine(limits(chunked_prefill_size=8192, max_total_tokens=10**6), each=1e-4, pair=1e-8)
    alone = machine.ask(60000, 1)
    machine.run()
    assert alone.finished and max(machine.steps[3].values()) >= 4096
    streams = [machine.ask(8, 3000) for _ in range(8)]
    for _ in range(20):
        machine.step()
    machine.ask(100000, 1)
    began = len(machine.steps)
    while len(machine.scheduler.running) + len(machine.scheduler.waiting) > len(streams):
        machine.step()
    decode = machine.seconds[began - 1]
    assert max(machine.seconds[began + 3 :]) <= 1.1 * (decode + TARGET_SECONDS)
    sizes = [max(counts.values()) for counts in machine.steps[began:]]
    assert sizes[10] > 2 * sizes[-10], "the deeper the prompt, the smaller the chunk"


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    machine = Machine(limits(max_total_tokens=10**6))
    stream, long = machine.ask(8, 10000), machine.ask(50000, 1)
    for _ in range(30):
        machine.step()
    short = machine.ask(200, 1)
    began = len(machine.steps)
    while not short.finished:
        machine.step()
    assert len(machine.steps) - began <= 3 and not long.finished and not stream.finished
    for _ in range(40):  # short prompts that never cease do not stop the long one
        machine.ask(60, 1)
        machine.step()
    assert all(counts.get(long, 0) for counts in machine.steps[-40:])


def test_the_youngest_is_preempted_and_comes_back_when_there_is_room() -> None:
    machine = Machine(limits(max_total_tokens=10 * BLOCK))
    asked = [machine.ask(20, 60) for _ in range(4)]
    machine.run()
    assert machine.scheduler.preempted and all(one.finished for one in asked)
    assert not asked[0].preempted and asked[3].preempted
    assert machine.scheduler.preempted <= 4, "a preempted sequence does not come back into a full cache"


def test_a_sequence_that_is_removed_gives_its_capacity_to_the_next() -> None:
    machine = Machine(limits(max_total_tokens=8 * BLOCK))
    first, second = machine.ask(100, 8), machine.ask(100, 8)
    machine.step()
    assert second in machine.scheduler.waiting
    machine.scheduler.remove(first)
    assert [entry.sequence for entry in machine.step()] == [second]
    machine.scheduler.remove(second)
    assert not machine.scheduler.running and not machine.scheduler.waiting and not machine.cache.blocks


def test_a_prompt_that_others_share_is_computed_first() -> None:
    machine = Machine(limits())
    first = machine.ask(40, 3)
    copies = [machine.ask(40, 3) for _ in range(2)]
    for copy in copies:
        copy.shares_prompt_with = first
    assert [entry.sequence for entry in machine.step()] == [first]
    machine.step()
    assert set(machine.steps[-1]) == {first, *copies}
    machine.run()


def test_borders_of_deterministic_chunks_depend_on_the_position_alone() -> None:
    def borders(others: int) -> list[int]:
        machine = Machine(limits(deterministic=True, chunked_prefill_size=64))
        for _ in range(others):
            machine.ask(150, 5)
        watched, ends = machine.ask(200, 5), []
        while not watched.finished:
            ends += [entry.end for entry in machine.step() if entry.sequence is watched]
        return ends

    assert borders(0) == borders(3) == [64, 128, 192, 200, 201, 202, 203, 204]


def test_snapshots_cut_chunks_where_states_are_copied() -> None:
    machine = Machine(limits(chunked_prefill_size=700))
    machine.scheduler = Scheduler(machine.scheduler.limits, machine.cache, machine.fail, snapshots=True)
    machine.ask(1300, 1)
    cut = [(entry.end, entry.takes_snapshot) for _ in range(4) for entry in machine.step()]
    assert cut[:2] == [(512, True), (1024, True)] and (1280, True) in cut and cut[-1] == (1300, False)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_costs_are_learned_from_steps(noise: float) -> None:
    """Also where one step in five takes ten times as long, as on a shared machine."""
    rng, costs = random.Random(1), StepCosts()
    for step in range(300):
        first, count = rng.randrange(20000), rng.randrange(32, 600)
        seconds = 0.05 + 8e-4 * count + 3e-8 * pairs_of(first, count)
        delayed = 10 if noise and step % 5 == 0 else 1
        costs.learn([(first, count), (100, 1)], seconds * delayed * (1 + noise * rng.random()))
    for first, count in ((0, 300), (15000, 100)):
        predicted, expected = costs.seconds_of(first, count), 8e-4 * count + 3e-8 * pairs_of(first, count)
        assert predicted == pytest.approx(expected, rel=0.01 if not noise else 0.5)
        assert costs.tokens_in(first, predicted) == pytest.approx(count, abs=1)


def test_one_size_of_chunks_is_enough_to_predict_it() -> None:
    costs = StepCosts()
    for _ in range(3):
        costs.learn([(0, 512)], 0.5)
    assert costs.seconds_of(0, 512) == pytest.approx(0.5, rel=0.05)
    assert costs.tokens_in(0, 0.25) == pytest.approx(256, rel=0.1)
