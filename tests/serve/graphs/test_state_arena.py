"""Sequences with recurrent states in captured decode steps: rows of the arena, steps outside of graphs in between, and
captures that fail. A recorder that computes again stands in for CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ktransformers.experts.contract import expert_modules
from ktransformers.experts.interface import pack_module, select_implementation
from ktransformers.place import attach
from ktransformers.serve.cache import snapshots
from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.cache.snapshots import States, copy_states
from ktransformers.serve.graphs.state_arena import ArenaStates, StateArena
from ktransformers.serve.graphs.step_graphs import StepGraphs
from ktransformers.serve.sampling.sampling import Sampling
from ktransformers.serve.scheduler.engine import ServeEngine
from ktransformers.serve.scheduler.forward import Chunk, make_forward
from ktransformers.serve.scheduler.lora import LoraModules
from ktransformers.serve.scheduler.scheduler import Limits
from ktransformers.serve.scheduler.sequence import GenerationRequest, Sequence
from tests.serve.cache.test_recurrent_states import linear_adapter
from tests.support.decode_recorder import EagerCapture
from tests.support.serving import EngineHarness, RecordedEvents, same_completion
from tests.support.slow_cases import others_slow
from tests.support.tiny_models import RECURRENT_LAYERS, build

PROMPTS = ([5, 9, 11, 4, 7], [21, 3, 8], [30, 31, 32, 33], [40, 2, 6])


def states_of(value: float) -> States:
    return States({1: {"recurrent0": torch.full((2, 3), value), "convolution0": torch.full((4,), -value)}})


def slot_of(value: float) -> KVSlot:
    slot = KVSlot.alone(0)
    slot.states = states_of(value)
    return slot


def test_rows_belong_to_slots_until_their_states_are_replaced() -> None:
    arena = StateArena(2)
    one, two, three = slot_of(1), slot_of(2), slot_of(3)
    rows = arena.place([one, two])
    assert sorted(rows) == [1, 2] and arena.place([two, one]) == rows[::-1]
    tensor = arena.tensors[1, "recurrent0"]
    assert tensor[rows[0]].unique().tolist() == [1] and tensor[0].unique().tolist() == [0]
    tensor[rows[0]] += 4
    assert one.states[1]["recurrent0"].unique().tolist() == [5]
    one.states.put(1, "recurrent0", torch.full((2, 3), 7.0))  # a step outside of graphs
    assert tensor[rows[0]].unique().tolist() == [7]

    one.states = copy_states(one.states)  # released
    assert not isinstance(one.states, ArenaStates) and one.states[1]["recurrent0"].unique().tolist() == [7]
    assert arena.place([three]) == rows[:1] and tensor[rows[0]].unique().tolist() == [3]
    assert arena.place([one, three]) == [rows[1], rows[0]]  # the second one gives way, with its numbers
    assert two.states[1]["recurrent0"].unique().tolist() == [2] and not isinstance(two.states, ArenaStates)


def test_rows_are_restored_after_a_capture() -> None:
    arena = StateArena(3)
    slots = [slot_of(1), slot_of(2)]
    rows = arena.place(slots)
    with pytest.raises(RuntimeError, match="capture"), arena.preserved(rows):
        arena.tensors[1, "convolution0"] += 9
        raise RuntimeError("capture")
    assert [slot.states[1]["convolution0"].unique().tolist() for slot in slots] == [[-1], [-2]]


class Placed:
    """A model with states whose experts an engine has, and a recorder of its decode steps."""

    def __init__(self, family: str) -> None:
        self.model: Any = build(family, **RECURRENT_LAYERS.get(family, {}))
        self.forward: Any = make_forward(self.model)
        for module in expert_modules(self.model).values():
            pack_module(module)
        select_implementation(self.model)
        self.placement: Any = attach(self.model, policy="resident", device="cpu")
        LoraModules(self.model)
        self.capture = EagerCapture(self.placement)

    def greedy(self, adapters: tuple[Any, ...] = (None,) * 4, graphs: bool = True, new: int = 10) -> list[list[int]]:
        """Of four prompts; the second joins and the third leaves while the others decode."""
        self.forward.graphs = StepGraphs(self.model, self.placement, self.capture) if graphs else None
        slots = KVSlot.together(len(PROMPTS), 64)
        tokens = [list(prompt) for prompt in PROMPTS]
        for step in range(new + 3):
            running = [0, *([1] if step > 2 else []), *([2] if step < 6 else []), 3]
            chunks = [
                Chunk(slots[one], tokens[one][slots[one].length :], slots[one].length, adapters[one], greedy=True)
                for one in running
            ]
            for one, result in zip(running, self.forward.run(chunks), strict=True):
                tokens[one].append(result.token)
        if graphs:
            self.replayed = self.forward.graphs.replayed
        self.forward.graphs = None
        return tokens


@pytest.fixture(params=others_slow(["qwen3_next", "nemotron_h", "zaya", "jamba", "minimax"], ["qwen3_next", "minimax"]))
def placed(request: pytest.FixtureRequest) -> Iterator[Placed]:
    made = Placed(request.param)
    yield made
    made.placement.detach()


def test_captured_steps_give_the_tokens_of_eager_ones(placed: Placed) -> None:
    expected = placed.greedy(graphs=False)
    assert placed.greedy() == expected and placed.replayed >= 6 and placed.capture.captures >= 1


def test_adapters_in_captured_steps(placed: Placed) -> None:
    one, two = (linear_adapter(placed.model, name, seed)[0] for name, seed in (("one", 1), ("two", 2)))
    adapters = (one, None, two, two)
    expected = placed.greedy(adapters, graphs=False)
    assert expected != placed.greedy(graphs=False)
    assert placed.greedy(adapters) == expected and placed.replayed >= 6


def test_a_failed_capture_leaves_the_states_as_they_were(placed: Placed) -> None:
    expected = placed.greedy(graphs=False)
    calls = []

    def compute_and_fail(compute: Any) -> Any:
        compute()  # a rehearsal
        calls.append(1)
        raise RuntimeError("no capture")

    placed.capture = compute_and_fail  # type: ignore[assignment]
    assert placed.greedy() == expected and placed.replayed == 0 and calls


@pytest.mark.parametrize("cache_tokens", [192, 1024], ids=["preempted", "reused"])
def test_an_engine_with_graphs_gives_the_answers_of_one_without(
    placed: Placed, cache_tokens: int, harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that join, end, are preempted and are continued, with few rows in the arena."""
    monkeypatch.setattr(snapshots, "SNAPSHOT_TOKENS", 16)
    monkeypatch.setattr(snapshots, "LAST_BLOCK_TOKENS", 4)
    prompts = [[(3 + 5 * seed + 7 * at) % 90 for at in range(length)] for seed, length in enumerate((40, 9, 50, 23))]

    def complete(engine: ServeEngine, asked: list[list[int]]) -> list[RecordedEvents]:
        recorded, sampling = [RecordedEvents() for _ in asked], Sampling(temperature=0)
        engine.submit(
            Sequence(GenerationRequest(tuple(prompt), 24, sampling, logprobs=0), harness.tokenizer, to)
            for prompt, to in zip(asked, recorded, strict=True)
        )
        while engine.busy:
            engine.step()
        return recorded

    def answers() -> list[RecordedEvents]:
        settings = {"max_running_requests": 8, "chunked_prefill_size": 24, "context_length": 128}
        engine = ServeEngine(placed.forward, Limits(**settings, max_total_tokens=cache_tokens))
        first = complete(engine, prompts)
        later = complete(engine, [[*prompts[one], *first[one].tokens, 8, 9] for one in (0, 2)])
        assert engine.scheduler.preempted if cache_tokens == 192 else engine.kv_cache.reused_tokens
        return first + later

    expected = answers()
    placed.forward.graphs = StepGraphs(placed.model, placed.placement, placed.capture, max_rows=3)
    actual = answers()
    replayed, placed.forward.graphs = placed.forward.graphs.replayed, None
    assert replayed > 10
    assert all(same_completion(one, other) for one, other in zip(actual, expected, strict=True))
