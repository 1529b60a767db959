"""Copies of recurrent states: where they are made, how many are kept, and sequences that restart from them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ktransformers.adapters import LoraPair, adapter_from_tensors
from ktransformers.experts.interface import select_implementation
from ktransformers.nn import attach
from ktransformers.serve.cache import snapshots
from ktransformers.serve.cache.kv_cache import KVCache
from ktransformers.serve.cache.snapshots import Snapshots, next_chunk_end
from ktransformers.serve.sampling.sampling import Sampling
from ktransformers.serve.scheduler.engine import ServeEngine
from ktransformers.serve.scheduler.forward import make_forward
from ktransformers.serve.scheduler.lora import LoraModules
from ktransformers.serve.scheduler.scheduler import Limits
from ktransformers.serve.scheduler.sequence import GenerationRequest, Sequence
from tests.support.serving import EngineHarness, RecordedEvents, same_completion
from tests.support.tiny_models import VOCABULARY, build


def state(value: float) -> dict[int, dict[str, torch.Tensor]]:
    return {0: {"recurrent0": torch.full((2,), value)}}


def test_chunks_end_where_a_copy_is_made() -> None:
    assert next_chunk_end(0, 512, 512, False) == (512, True)
    assert next_chunk_end(0, 511, 511, False) == (511, False)
    assert next_chunk_end(0, 700, 1400, False) == (512, True)
    assert next_chunk_end(512, 1024, 1400, False) == (1024, True)
    assert next_chunk_end(1024, 1400, 1400, False) == (1344, True)  # the last multiple of 64 before the end
    assert next_chunk_end(1344, 1400, 1400, False) == (1400, False)
    assert next_chunk_end(1280, 1347, 1347, False, 4) == (1280 + 67, False)  # 1344 is behind the generation prompt's
    assert next_chunk_end(1200, 1347, 1347, False, 4) == (1280, True)  # beginning, so the copy is made before
    assert next_chunk_end(1200, 1348, 1348, False, 4) == (1344, True)
    assert next_chunk_end(0, 1030, 1030, False, 10) == (960, True)  # 1024 is behind it, too
    assert next_chunk_end(0, 2048, 4000, False) == (2048, True)  # one copy in a long chunk
    assert next_chunk_end(0, 100, 100, True) == (99, True)  # others compute its last token again
    assert next_chunk_end(99, 100, 100, True) == (100, False)
    assert next_chunk_end(1535, 1536, 1400, False) == (1536, True)  # a new token


def test_copies_stay_few_and_spread() -> None:
    kept = Snapshots()
    for position in range(512, 512 * 12, 512):
        kept.add(position, state(position))
        assert len(kept) <= snapshots.MAX_SNAPSHOTS and kept.last(position) == position
    positions = sorted(kept.by_position)
    assert positions[-1] == 512 * 11 and positions[0] < 512 * 6
    assert kept.last(positions[1] + 1) == positions[1] and kept.last(positions[0] - 1) == 0
    kept.drop_after(positions[1])
    assert sorted(kept.by_position) == positions[:2]


def test_the_copy_before_the_border_stays() -> None:
    kept = Snapshots()
    for turn in range(40):
        kept.border = 700
        kept.add(640 + 64 * turn, state(turn))
        assert kept.last(700) == 640 and kept.last(10**6) == 640 + 64 * turn and len(kept) <= snapshots.MAX_SNAPSHOTS
    kept.border = 2000
    for turn in range(40, 60):
        kept.add(640 + 64 * turn, state(turn))
    assert 640 < kept.last(2000) < 2000


def test_copies_are_not_changed_with_the_state() -> None:
    kept, states = Snapshots(), state(1)
    kept.add(3, states)
    states[0]["recurrent0"] += 1
    assert kept.by_position[3][0]["recurrent0"].tolist() == [1, 1]


def test_spare_states_are_bounded() -> None:
    cache = KVCache(4096, spare_states=3)
    slots = []
    for number in range(4):
        slot = cache.allocate(None, [number] * 10)
        assert slot is not None
        slot.tokens, slot.states = [number] * 10, state(number)
        cache.take_snapshot(slot)
        slots.append(slot)
    assert sum(slot.spare_states for slot in cache.slots) == 3 and len(cache.slots) == 4
    for slot in slots:
        cache.release(slot)
    assert sum(slot.spare_states for slot in cache.slots) <= 3 and slots[-1] in cache.slots
    assert cache.peak_states == 8  # four running, and four copies before one was dropped


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


class Recurrent:
    """qwen3_5 with experts of ours, and an adapter."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        model: Any = build("qwen3_5_moe_text")
        attach(model)
        select_implementation(model)
        self.forward = make_forward(model)
        shapes = {"gate": (6, 40, 64), "up": (6, 40, 64), "down": (6, 64, 40)}
        torch.manual_seed(0)
        experts = {
            f"model.layers.{layer}.mlp": {
                role: LoraPair(torch.randn(e, 3, i) / 8, torch.randn(e, o, 3) / 2, 1.0)
                for role, (e, o, i) in shapes.items()
            }
            for layer in range(2)
        }
        self.adapter = LoraModules(model).bind(adapter_from_tensors(experts, {}), "made", "made", 1)

    def engine(self, **limits: Any) -> ServeEngine:
        settings = {
            "max_running_requests": 8,
            "max_queued_requests": 16,
            "chunked_prefill_size": 24,
            "max_total_tokens": 1024,
            "context_length": 256,
        } | limits
        return ServeEngine(self.forward, Limits(**settings))

    def sequences(self, *requested: tuple[list[int], Any], new: int = 6) -> tuple[list[Sequence], list[RecordedEvents]]:
        recorded = [RecordedEvents() for _ in requested]
        made = [
            Sequence(
                GenerationRequest(tuple(prompt), new, Sampling(temperature=0), one, logprobs=1), self.tokenizer, to
            )
            for (prompt, one), to in zip(requested, recorded, strict=True)
        ]
        return made, recorded

    def complete(self, engine: ServeEngine, *requested: tuple[list[int], Any], new: int = 6) -> list[RecordedEvents]:
        sequences, recorded = self.sequences(*requested, new=new)
        engine.submit(sequences)
        while engine.busy:
            engine.step()
        return recorded

    def alone(self, prompt: list[int], adapter: Any = None, new: int = 6) -> RecordedEvents:
        return self.complete(self.engine(), (prompt, adapter), new=new)[0]


@pytest.fixture(scope="module")
def recurrent(harness: EngineHarness) -> Recurrent:
    return Recurrent(harness.tokenizer)


@pytest.fixture
def close_snapshots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(snapshots, "SNAPSHOT_TOKENS", 16)
    monkeypatch.setattr(snapshots, "LAST_BLOCK_TOKENS", 4)
    yield


@pytest.mark.usefixtures("close_snapshots")
def test_sequences_restart_from_the_last_copy_they_share(recurrent: Recurrent) -> None:
    prompt, adapter = prompt_of(4, 42), recurrent.adapter
    engine = recurrent.engine()
    (base,), (adapted,) = recurrent.complete(engine, (prompt, None)), recurrent.complete(engine, (prompt, adapter))
    assert base.tokens != adapted.tokens
    assert same_completion(base, recurrent.alone(prompt)) and same_completion(adapted, recurrent.alone(prompt, adapter))

    longer = prompt + adapted.tokens + [5, 6, 7]  # continues at the end of the slot
    (continued,) = recurrent.complete(engine, (longer, adapter))
    assert continued.events[-1].cached == 47 and same_completion(continued, recurrent.alone(longer, adapter))

    for shared, cached in ((41, 40), (37, 16), (30, 16), (10, 0)):  # leaves the conversation before its end
        other = [*prompt[:shared], 8, 9, 9]
        (diverged,) = recurrent.complete(engine, (other, adapter))
        assert diverged.events[-1].cached == cached, shared
        assert same_completion(diverged, recurrent.alone(other, adapter))


@pytest.mark.usefixtures("close_snapshots")
def test_a_running_sequence_is_copied_from(recurrent: Recurrent) -> None:
    prompt = prompt_of(4, 42)
    engine = recurrent.engine()
    (first,), (first_events,) = recurrent.sequences((prompt, None), new=20)
    engine.submit([first])
    while len(first.new_tokens) < 3:
        engine.step()
    other = [*prompt[:35], 8, 9]
    (beside,) = recurrent.complete(engine, (other, None))
    assert beside.events[-1].cached == 16
    assert same_completion(beside, recurrent.alone(other))
    assert same_completion(first_events, recurrent.alone(prompt, new=20))


def test_several_completions_compute_the_prompt_once(recurrent: Recurrent) -> None:
    prompt = prompt_of(6, 30)
    engine = recurrent.engine()
    sequences, recorded = recurrent.sequences(*[(prompt, None)] * 3)
    for sequence in sequences[1:]:
        sequence.shares_prompt_with = sequences[0]
    engine.submit(sequences)
    while engine.busy:
        engine.step()
    assert [one.events[-1].cached for one in recorded] == [0, 29, 29] and engine.counts.prompt_tokens == 32
    expected = recurrent.alone(prompt)
    assert all(same_completion(one, expected) for one in recorded)


@pytest.mark.usefixtures("close_snapshots")
def test_preempted_sequences_give_the_same_answers(recurrent: Recurrent) -> None:
    prompts = [prompt_of(seed, 50) for seed in range(3)]
    engine = recurrent.engine(max_total_tokens=192, context_length=160)
    recorded = recurrent.complete(engine, *((prompt, None) for prompt in prompts), new=30)
    assert engine.scheduler.preempted
    for prompt, one in zip(prompts, recorded, strict=True):
        assert same_completion(one, recurrent.alone(prompt, new=30))


def test_failed_steps_leave_no_state_behind(recurrent: Recurrent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out after some layers have written their states."""
    prompts = [prompt_of(1, 9), prompt_of(2, 20)]
    expected = recurrent.alone(prompts[0])
    run, failed = recurrent.forward._run_eager, list[int]()

    def fails_once(chunks: Any) -> Any:
        result = run(chunks)
        if len(chunks) == 2 and all(len(chunk.tokens) == 1 for chunk in chunks) and not failed:
            failed.append(1)
            raise MemoryError
        return result

    monkeypatch.setattr(recurrent.forward, "_run_eager", fails_once)
    first, second = recurrent.complete(recurrent.engine(chunked_prefill_size=64), *((one, None) for one in prompts))
    assert {first.finish, second.finish} == {"length", "out_of_memory"} and failed
    survivor, prompt = (first, prompts[0]) if first.finish == "length" else (second, prompts[1])
    assert same_completion(survivor, expected if survivor is first else recurrent.alone(prompt))


def test_deterministic_answers_have_the_same_bits(recurrent: Recurrent) -> None:
    """No chunk is cut for a copy, and every chunk is computed alone."""
    prompts = [prompt_of(seed, length) for seed, length in enumerate((60, 21, 44))]
    alone = [recurrent.complete(recurrent.engine(deterministic=True), (prompt, None))[0] for prompt in prompts]
    together = recurrent.complete(recurrent.engine(deterministic=True), *((prompt, None) for prompt in prompts))
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs
