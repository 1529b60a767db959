"""Decode steps that are launched before the host has read the tokens of the step before: the same tokens, texts and
ends as without, for requests that join, leave, stop, are cancelled or fail; and when no step is launched ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ktransformers.experts.contract import expert_modules
from ktransformers.experts.interface import pack_module, select_implementation
from ktransformers.serve.graphs.step_graphs import StepGraphs
from ktransformers.serve.sampling.sampling import Sampling
from ktransformers.serve.scheduler.engine import ServeEngine
from ktransformers.serve.scheduler.forward import Forward
from ktransformers.serve.scheduler.scheduler import Limits
from ktransformers.serve.scheduler.sequence import Event, GenerationRequest, Sequence
from tests.serve.graphs.test_step_graphs import served
from tests.support.decode_recorder import EagerCapture
from tests.support.serving import EngineHarness, random_prompt
from tests.support.tiny_models import build

pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")

Outcome = tuple[list[int], str, str | None, int]  # new tokens, text, finish, events


class Loop:
    """An engine over graphs that are computed again in place of a replay, with steps ahead or without."""

    def __init__(self, harness: EngineHarness, overlap: bool, **limits: int) -> None:
        self.harness = harness
        self.graphs = StepGraphs(harness.model, None, lambda compute: compute, overlap=overlap)
        harness.forward.graphs = self.graphs
        self.engine = self.harness.engine(**limits)
        self.made: list[tuple[Any, Any]] = []

    def ask(self, seed: int, length: int, new: int, adapter: str | None = None, **options: Any) -> Any:
        options = {"logprobs": None} | options
        one = self.harness.sequence(random_prompt(seed, length), adapter, max_tokens=new, **options)
        self.made.append(one)
        self.engine.submit([one[0]])
        return one[0]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def end(self) -> list[Outcome]:
        while self.engine.busy:
            self.engine.step()
        self.harness.forward.graphs = None
        assert self.graphs._ahead is None, "nothing is launched for sequences that have ended"
        return [(one.new_tokens, events.text, events.finish, len(events.events)) for one, events in self.made]


def both(harness: EngineHarness, schedule: Callable[[Loop], None], **limits: int) -> Loop:
    """Run a schedule without and with steps ahead; the outcomes are equal. Returns the second."""
    outcomes = []
    for overlap in (False, True):
        loop = Loop(harness, overlap, **limits)
        schedule(loop)
        outcomes.append(loop.end())
        assert bool(loop.graphs.overlapped) == overlap, "steps ahead are used where they are on"
    assert outcomes[0] == outcomes[1]
    return loop


def test_requests_that_join_and_leave(harness: EngineHarness) -> None:
    def schedule(loop: Loop) -> None:
        for seed, (length, new) in enumerate([(5, 30), (40, 12), (9, 21), (70, 8), (1, 15)]):
            loop.ask(seed, length, new)
            loop.steps(8)

    loop = both(harness, schedule, max_running_requests=3)
    graphs = loop.graphs
    assert graphs.overlapped > graphs.replayed // 2 and graphs.replayed < loop.engine.counts.steps
    assert graphs.discarded, "a request joined while a step of the others was ahead"


def test_stops_and_slots_that_are_used_again(harness: EngineHarness) -> None:
    """A sequence ends at a token or text in the middle of the answers of others; a step that was launched with it is
    used for them, and what it wrote to the slot is no part of the next request that continues the slot."""
    plain = Loop(harness, False)
    for seed in (1, 2, 3):
        plain.ask(seed, 20, 30)
    answers = [(tokens, text) for tokens, text, _, _ in plain.end()]
    stop_token = answers[0][0][11]
    stop_text = harness.tokenizer.decode(answers[1][0][14:16])

    def schedule(loop: Loop) -> None:
        loop.ask(1, 20, 30, stop_tokens=frozenset({stop_token}))
        loop.ask(2, 20, 30, stop_strings=(stop_text,))
        loop.ask(3, 20, 30)
        loop.steps(24)
        prompt = (*random_prompt(1, 20), *answers[0][0][:9], 77, 78)
        again = loop.harness.sequence(list(prompt), None, max_tokens=12, logprobs=None)
        loop.made.append(again)
        loop.engine.submit([again[0]])

    loop = both(harness, schedule)
    ends = [events.finish for _, events in loop.made]
    assert ends == ["stop", "stop", "length", "length"]
    assert loop.made[-1][1].events[-1].cached >= 29, "the slot of the first sequence was continued"


def test_slots_that_grow_and_preemption(harness: EngineHarness) -> None:
    def schedule(loop: Loop) -> None:
        for seed in (1, 2, 3):
            loop.ask(seed, 60, 50)

    loop = both(harness, schedule, max_total_tokens=320, context_length=128)
    assert loop.engine.scheduler.preempted, "the cache was too small for three"


def test_adapters_and_sampled_requests_beside_greedy_ones(harness: EngineHarness) -> None:
    """A step with a sampled row is not launched ahead, one after it is; seeds draw the same tokens."""
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=7)

    def schedule(loop: Loop) -> None:
        loop.ask(1, 12, 30, "attention")
        loop.ask(2, 12, 30)
        loop.ask(3, 12, 30, "attention")
        loop.steps(12)
        loop.ask(4, 12, 6, sampling=sampling)
        loop.ask(5, 12, 6, logprobs=2)

    loop = both(harness, schedule)
    assert len(loop.made[4][1].tokens) == 6, "scores were delivered"


def test_cancelled_and_failed_sequences(harness: EngineHarness) -> None:
    """A client disconnects, and the text of another sequence cannot be decoded."""

    def schedule(loop: Loop) -> None:
        first, _, third = (loop.ask(seed, 12, 25) for seed in (1, 2, 3))
        loop.steps(10)
        loop.engine.cancel([first])
        loop.steps(2)

        def fail(token: int) -> str:
            raise ValueError("no such token")

        third.text.add = fail

    loop = both(harness, schedule)
    assert [events.finish for _, events in loop.made] == ["cancelled", "length", "error"]


def test_failed_step_ends_its_requests_and_the_next_ones_are_right(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Loop(harness, False)
    plain.ask(2, 12, 20)
    wanted = plain.end()[0]
    loop = Loop(harness, True)
    loop.ask(1, 12, 40)
    loop.steps(10)
    assert loop.graphs._ahead is not None
    monkeypatch.setattr(loop.graphs, "_launched_for", lambda chunks: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.engine.step()
    monkeypatch.undo()
    loop.engine._fail_all("as the thread of an engine does")
    assert loop.graphs._ahead is None and loop.made[0][1].finish == "error"
    loop.ask(2, 12, 20)
    assert loop.end()[1] == wanted


def test_next_step_is_launched_before_tokens_are_delivered(harness: EngineHarness) -> None:
    loop = Loop(harness, True)
    launches: list[int] = []
    sequence = loop.ask(1, 12, 20)
    deliver = sequence.deliver

    def count(event: Event) -> None:
        launches.append(loop.graphs._launches - loop.graphs.replayed)
        deliver(event)

    sequence.deliver = count
    loop.end()
    assert launches[3:-2] == [1] * len(launches[3:-2]) and launches[-1] == 0, "none beyond the last token"


def test_slots_are_allocated_after_the_step_ahead(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step ahead may write to the slot of a sequence that has ended, which a new sequence continues."""
    loop = Loop(harness, True)
    loop.ask(1, 12, 40)
    loop.steps(10)
    ahead, order = loop.graphs._ahead, list[str]()
    assert ahead is not None
    monkeypatch.setattr(type(ahead), "wait", lambda self: order.append("wait") or self.argmax.tolist())
    allocate = loop.engine.kv_cache.allocate
    monkeypatch.setattr(loop.engine.kv_cache, "allocate", lambda *args: order.append("allocate") or allocate(*args))
    loop.ask(2, 12, 4)
    loop.steps(1)
    assert order[:2] == ["wait", "allocate"]
    loop.end()


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_next"])
def test_families(family: str) -> None:
    """Windows with sinks, latents, shared experts. Recurrent states would advance twice: none is launched ahead."""
    model: Any = build(family)
    for module in expert_modules(model).values():
        pack_module(module, free=True)
    select_implementation(model)
    forward, outcomes = Forward(model), list[list[list[int]]]()
    for overlap in (False, True):
        graphs = forward.graphs = StepGraphs(model, None, lambda compute: compute, overlap=overlap)
        engine, made = ServeEngine(forward, Limits(4, 8, 32, 1024, 256)), list[Sequence]()
        for seed, (length, new) in enumerate(((5, 20), (21, 9), (12, 14))):
            prompt = tuple((seed + 7 * at) % 90 for at in range(length))
            stops = frozenset({outcomes[0][seed][5]} if outcomes and seed == 2 else ())
            request = GenerationRequest(prompt, new, Sampling(temperature=0), stop_tokens=stops)
            made.append(Sequence(request, Numbers(), lambda event: None))
            engine.submit(made[-1:])
            engine.step()
        while engine.busy:
            engine.step()
        outcomes.append([one.new_tokens for one in made])
        assert graphs.replayed and bool(graphs.overlapped) == (overlap and family != "qwen3_next")
    plain, ahead = outcomes
    assert ahead[:2] == plain[:2] and ahead[2] == plain[2][: len(ahead[2])] and ahead[2][-1] == plain[2][5]


class Numbers:
    """A tokenizer whose text is the tokens' numbers."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, tokens))


def test_steps_with_experts_on_the_cpu_are_not_launched_ahead() -> None:
    """Nor is a step whose residents were replaced used."""
    model, forward, placement = served("mixtral", "cpu")
    seen = []
    for ratio in (0.5, 1.0):
        placement.place_residents(ratio=ratio)
        graphs = forward.graphs = StepGraphs(model, placement, EagerCapture(placement))
        engine = ServeEngine(forward, Limits(4, 8, 32, 1024, 256))
        request = GenerationRequest((1, 2, 3), 12, Sampling(temperature=0))
        engine.submit([Sequence(request, Numbers(), lambda event: None)])
        for _ in range(6):
            engine.step()
        seen.append((placement.all_resident, bool(graphs.replayed), bool(graphs.overlapped)))
        discarded = graphs.discarded
        placement.place_residents(ratio=0.0)
        while engine.busy:
            engine.step()
        assert graphs.discarded - discarded == int(seen[-1][2]), "a step ahead with the residents before is dropped"
    assert seen == [(False, True, False), (True, True, True)]
    placement.detach()
