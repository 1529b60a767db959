"""The engine against stock models and against itself: sharing a batch, a prefix or a slot changes no result."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ktransformers.ground.errors import InputError
from ktransformers.serve.sampling.sampling import Sampling, Score
from ktransformers.serve.scheduler.engine import QueueFull, Stopped
from tests.support.serving import (
    CPU_TOLERANCE,
    WAIT_SECONDS,
    EngineHarness,
    RecordedEvents,
    random_prompt,
    same_completion,
)


def greedy(model: object, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    tokens, logs = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            scores = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1)  # type: ignore[operator]
            tokens.append(int(scores.argmax()))
            logs.append(float(scores.max()))
    return tokens[len(prompt) :], logs


@pytest.fixture(scope="module")
def stock(model_directory: Path, adapters: dict[str, Path]) -> dict[str | None, object]:
    """Stock transformers and stock PEFT, experts computed by transformers."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def plain() -> object:
        return AutoModelForCausalLM.from_pretrained(
            model_directory, dtype=torch.float32, experts_implementation="eager"
        ).eval()

    return {None: plain()} | {
        name: PeftModel.from_pretrained(plain(), str(path)).eval() for name, path in adapters.items()
    }


@pytest.mark.parametrize("adapter", [None, "one", "two", "attention"])
def test_completions_match_stock_transformers_and_peft(
    harness: EngineHarness, stock: dict[str | None, object], adapter: str | None
) -> None:
    prompt = random_prompt(1, 23)
    expected, logs = greedy(stock[adapter], prompt, 6)
    recorded = harness.alone(prompt, adapter, max_tokens=6)
    assert recorded.tokens == expected
    assert torch.allclose(torch.tensor(recorded.logprobs), torch.tensor(logs), atol=2e-2)  # experts are packed in bf16
    if adapter is not None:
        assert recorded.logprobs != harness.alone(prompt, max_tokens=6).logprobs


def test_mixed_batch_matches_separate_runs(harness: EngineHarness) -> None:
    names = [None, "one", "two", None, "attention", "one", "two"]
    prompts = [random_prompt(seed, 5 + 13 * seed) for seed in range(len(names))]
    alone = [harness.alone(prompt, name, max_tokens=10) for prompt, name in zip(prompts, names, strict=True)]
    engine = harness.engine(chunked_prefill_size=32)
    created = [harness.sequence(prompt, name, max_tokens=10) for prompt, name in zip(prompts, names, strict=True)]
    harness.run(engine, *(one for one, _ in created))
    for expected, (_, recorded) in zip(alone, created, strict=True):
        assert recorded.finish == "length"
        assert same_completion(recorded, expected)
        assert recorded.text == expected.text


def test_base_rows_are_bit_identical_beside_adapters(harness: EngineHarness) -> None:
    """The same batch shape with and without adapters in other rows: equal bits."""
    prompts = [random_prompt(seed, 20) for seed in range(3)]

    def first(names: list[str | None]) -> list[float]:
        created = [harness.sequence(prompt, name) for prompt, name in zip(prompts, names, strict=True)]
        harness.run(harness.engine(), *(one for one, _ in created))
        return created[0][1].logprobs

    assert first([None, None, None]) == first([None, "two", "one"]) == first([None, "attention", None])


def test_chunked_prefill_matches_one_chunk(harness: EngineHarness) -> None:
    prompt = random_prompt(4, 100)
    whole = harness.alone(prompt, "one")
    for chunk in (1, 7, 33):
        one, recorded = harness.sequence(prompt, "one")
        harness.run(harness.engine(chunked_prefill_size=chunk), one)
        assert same_completion(recorded, whole)


def test_prefix_is_reused_by_the_same_adapter_only(harness: EngineHarness) -> None:
    prompt = random_prompt(5, 80)
    engine = harness.engine()
    first, recorded = harness.sequence(prompt, "one")
    harness.run(engine, first)
    again, repeated = harness.sequence(prompt + random_prompt(6, 9), "one")
    harness.run(engine, again)
    assert repeated.events[-1].cached == 80
    assert same_completion(repeated, harness.alone(prompt + random_prompt(6, 9), "one"))
    for other in (None, "two"):
        one, foreign = harness.sequence(prompt, other)
        harness.run(engine, one)
        assert foreign.events[-1].cached == 0
        assert same_completion(foreign, harness.alone(prompt, other))
    # another ending of the same beginning: the common part is kept, and the first text's slot survives
    branch, branched = harness.sequence(prompt[:30] + random_prompt(7, 9), "one")
    harness.run(engine, branch)
    assert branched.events[-1].cached == 30
    assert same_completion(branched, harness.alone(prompt[:30] + random_prompt(7, 9), "one"))
    once_more, last = harness.sequence(prompt, "one")
    harness.run(engine, once_more)
    assert last.events[-1].cached == 79
    assert same_completion(last, recorded)


def test_new_adapter_version_shares_no_prefix_with_the_old(harness: EngineHarness, adapters: dict[str, Path]) -> None:
    prompt = random_prompt(8, 40)
    engine = harness.engine()
    harness.run(engine, harness.sequence(prompt, "one")[0])
    old = harness.loaded["one"]
    harness.loaded["one"] = harness.lora_modules.open(adapters["two"], "one", 2, str(harness.directory))
    try:
        one, recorded = harness.sequence(prompt, "one")
        harness.run(engine, one)
        assert recorded.events[-1].cached == 0
        assert same_completion(recorded, harness.alone(prompt, "two"))
    finally:
        harness.loaded["one"] = old
    engine.drop_adapter(old.owner)
    engine.step()
    assert all(slot.owner != old.owner for slot in engine.kv_cache.slots)


def test_preempted_sequence_gives_the_same_completion(harness: EngineHarness) -> None:
    prompts = [random_prompt(seed, 30) for seed in range(10, 14)]
    created = [harness.sequence(prompt, "two", max_tokens=60) for prompt in prompts]
    engine = harness.engine(max_total_tokens=256)
    harness.run(engine, *(one for one, _ in created))
    assert engine.scheduler.preempted > 0
    for prompt, (_, recorded) in zip(prompts, created, strict=True):
        assert same_completion(recorded, harness.alone(prompt, "two", max_tokens=60))
    assert engine.kv_cache.allocated_tokens <= 256


def test_prompt_logprobs_match_stock(harness: EngineHarness, stock: dict[str | None, object]) -> None:
    prompt = random_prompt(15, 50)
    one, recorded = harness.sequence(prompt, max_tokens=0, prompt_logprobs=True, logprobs=3)
    harness.run(harness.engine(chunked_prefill_size=16), one)
    assert recorded.finish == "length" and not recorded.tokens
    (reported,) = [event.prompt_scores for event in recorded.events if event.prompt_scores]
    assert [score.token for score in reported] == prompt and reported[0].logprob is None
    with torch.no_grad():
        logs = stock[None](input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)  # type: ignore[operator]
    for place, score in enumerate(reported[1:]):
        assert score.logprob == pytest.approx(float(logs[place, prompt[place + 1]]), abs=2e-2)
        assert [token for token, _ in score.top] == logs[place].topk(3).indices.tolist()


def test_prompt_logprobs_of_shared_prefix_are_computed_once(harness: EngineHarness) -> None:
    """Several completions of one prompt, one without scores in between, with more and fewer alternatives: scores
    equal those of separate runs."""

    def reported(recorded: RecordedEvents) -> list[Score]:
        (actual,) = [event.prompt_scores for event in recorded.events if event.prompt_scores]
        return list(actual)

    question, engine = random_prompt(31, 40), harness.engine(chunked_prefill_size=16)
    endings = [[5], [6, 7, 8], [5, 9], random_prompt(32, 20)]
    for at, (ending, top) in enumerate([*((ending, 2) for ending in endings), ([6, 7], 0), ([6, 7, 9], 3)]):
        prompt = question + ending
        requested = {"max_tokens": 1, "prompt_logprobs": True, "logprobs": top}
        one, recorded = harness.sequence(prompt, **requested)
        harness.run(engine, one)
        alone = reported(harness.alone(prompt, **requested))
        assert [score.token for score in reported(recorded)] == prompt and reported(recorded)[0].logprob is None
        for actual, expected in zip(reported(recorded)[1:], alone[1:], strict=True):
            assert actual.logprob == pytest.approx(expected.logprob, abs=CPU_TOLERANCE)
            assert [token for token, _ in actual.top] == [token for token, _ in expected.top]
        if at in (1, 2, 3, 4):
            assert one.cached >= len(question) - 1
        if at == 2:
            harness.run(engine, harness.sequence([*question[:20], 11, 12], max_tokens=3)[0])
    assert not one.cached  # slots know two of the most likely, not three


def test_seed_repeats_in_every_batch(harness: EngineHarness) -> None:
    sampling = Sampling(temperature=0.9, top_p=0.95, top_k=50, min_p=0.001, seed=7)
    alone = harness.alone(random_prompt(16, 20), "one", sampling=sampling, max_tokens=16)
    created = [
        harness.sequence(random_prompt(seed, 20), "one", sampling=sampling, max_tokens=16) for seed in (17, 16, 18)
    ]
    harness.run(harness.engine(), *(one for one, _ in created))
    assert created[1][1].tokens == alone.tokens
    other = harness.alone(random_prompt(16, 20), "one", sampling=Sampling(temperature=0.9, seed=8), max_tokens=16)
    assert other.tokens != alone.tokens


def test_requests_beyond_limits_are_refused(harness: EngineHarness) -> None:
    engine = harness.engine(max_queued_requests=2, max_total_tokens=256)
    with pytest.raises(InputError, match=r"20 prompt tokens and 500 new.*at most 256"):
        engine.submit([harness.sequence(random_prompt(1, 20), max_tokens=500)[0]])
    engine.submit([harness.sequence(random_prompt(1, 20))[0], harness.sequence(random_prompt(1, 20))[0]])
    with pytest.raises(QueueFull, match="2 requests"):
        engine.submit([harness.sequence(random_prompt(1, 20))[0]])


def test_cancel_timeout_and_stop(harness: EngineHarness) -> None:
    engine = harness.engine(max_running_requests=2)
    engine.start()
    left, left_heard = harness.sequence(random_prompt(1, 20), max_tokens=400)
    late, late_heard = harness.sequence(random_prompt(2, 20), max_tokens=400)
    waits, waits_heard = harness.sequence(random_prompt(3, 20), max_tokens=4)
    engine.submit([left, late, waits])
    assert left_heard.began.wait(WAIT_SECONDS) and late_heard.began.wait(WAIT_SECONDS)
    engine.cancel([left])
    late.request = replace(late.request, deadline=time.monotonic())
    assert all(heard.ended.wait(WAIT_SECONDS) for heard in (left_heard, late_heard, waits_heard))
    assert (left_heard.finish, late_heard.finish, waits_heard.finish) == ("cancelled", "timeout", "length")
    assert late_heard.tokens  # what came in time was delivered
    long, long_heard = harness.sequence(random_prompt(4, 20), max_tokens=60)
    engine.submit([long])
    stopper = threading.Thread(target=engine.stop, args=(WAIT_SECONDS,))
    stopper.start()
    while engine._accepting:
        time.sleep(0.001)
    with pytest.raises(Stopped):
        engine.submit([harness.sequence(random_prompt(5, 20))[0]])
    stopper.join()
    assert long_heard.finish == "length" and not engine.alive


@pytest.mark.parametrize("where", ["forward", "raise_launched"])
def test_failed_step_ends_its_requests_and_not_the_engine(
    where: str, harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward pass fails, or experts that it launched without waiting for them: no token of that step is sent."""
    engine = harness.engine()
    run, calls = engine.forward.run, []

    def fail_once(*pieces: object) -> object:
        calls.append(pieces)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        return run(*pieces) if pieces else None

    if where == "forward":
        monkeypatch.setattr(engine.forward, "run", fail_once)
    else:
        engine.raise_launched = fail_once
    engine.start()
    broken, broken_heard = harness.sequence(random_prompt(1, 20))
    engine.submit([broken])
    assert broken_heard.ended.wait(WAIT_SECONDS)
    assert broken_heard.finish == "error" and "no memory" in broken_heard.events[-1].error
    assert not broken_heard.tokens and not engine.kv_cache.slots
    fine, fine_heard = harness.sequence(random_prompt(1, 20))
    engine.submit([fine])
    assert fine_heard.ended.wait(WAIT_SECONDS)
    engine.stop()
    assert same_completion(fine_heard, harness.alone(random_prompt(1, 20)))
