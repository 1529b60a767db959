"""The engine against stock models and against itself: who shares a batch, a prefix or a slot changes nothing."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch

from ktransformers.errors import InputError
from ktransformers.serve.engine.engine import QueueFull, Stopped
from ktransformers.serve.engine.sampling import Sampling, Score
from tests.serve.conftest import VOCABULARY, Bench, Heard

# Sums of a matrix product depend in their last bits on how many rows there are; nothing else may differ.
SAME = 2e-5


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


def close(one: Heard, two: Heard) -> bool:
    assert one.tokens == two.tokens
    return torch.allclose(torch.tensor(one.logprobs), torch.tensor(two.logprobs), rtol=0, atol=SAME)


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
    """Stock transformers and stock PEFT, experts computed by transformers itself."""
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
def test_answers_are_those_of_stock_transformers_and_peft(
    bench: Bench, stock: dict[str | None, object], adapter: str | None
) -> None:
    prompt = text(1, 23)
    expected, logs = greedy(stock[adapter], prompt, 6)
    heard = bench.alone(prompt, adapter, max_tokens=6)
    assert heard.tokens == expected
    assert torch.allclose(torch.tensor(heard.logprobs), torch.tensor(logs), atol=2e-2)  # experts are packed in bf16
    if adapter is not None:
        assert heard.logprobs != bench.alone(prompt, max_tokens=6).logprobs


def test_a_batch_of_base_and_several_adapters_equals_separate_runs(bench: Bench) -> None:
    names = [None, "one", "two", None, "attention", "one", "two"]
    prompts = [text(seed, 5 + 13 * seed) for seed in range(len(names))]
    alone = [bench.alone(prompt, name, max_tokens=10) for prompt, name in zip(prompts, names, strict=True)]
    engine = bench.engine(chunk=32)
    made = [bench.sequence(prompt, name, max_tokens=10) for prompt, name in zip(prompts, names, strict=True)]
    bench.run(engine, *(one for one, _ in made))
    for expected, (_, heard) in zip(alone, made, strict=True):
        assert heard.finish == "length"
        assert close(heard, expected)
        assert heard.text == expected.text


def test_rows_of_the_base_are_exactly_the_base(bench: Bench) -> None:
    """The same batch shape with and without adapters beside it: equal bits."""
    prompts = [text(seed, 20) for seed in range(3)]

    def first(names: list[str | None]) -> list[float]:
        made = [bench.sequence(prompt, name) for prompt, name in zip(prompts, names, strict=True)]
        bench.run(bench.engine(), *(one for one, _ in made))
        return made[0][1].logprobs

    assert first([None, None, None]) == first([None, "two", "one"]) == first([None, "attention", None])


def test_chunks_of_a_prompt_do_not_matter(bench: Bench) -> None:
    prompt = text(4, 100)
    whole = bench.alone(prompt, "one")
    for chunk in (1, 7, 33):
        one, heard = bench.sequence(prompt, "one")
        bench.run(bench.engine(chunk=chunk), one)
        assert close(heard, whole)


def test_a_prefix_is_reused_by_the_same_adapter_only(bench: Bench) -> None:
    prompt = text(5, 80)
    engine = bench.engine()
    first, heard = bench.sequence(prompt, "one")
    bench.run(engine, first)
    again, repeated = bench.sequence(prompt + text(6, 9), "one")
    bench.run(engine, again)
    assert repeated.events[-1].cached == 80
    assert close(repeated, bench.alone(prompt + text(6, 9), "one"))
    for other in (None, "two"):
        one, foreign = bench.sequence(prompt, other)
        bench.run(engine, one)
        assert foreign.events[-1].cached == 0
        assert close(foreign, bench.alone(prompt, other))
    # another ending of the same beginning: the common part is kept, and the first text's slot survives
    branch, branched = bench.sequence(prompt[:30] + text(7, 9), "one")
    bench.run(engine, branch)
    assert branched.events[-1].cached == 30
    assert close(branched, bench.alone(prompt[:30] + text(7, 9), "one"))
    once_more, last = bench.sequence(prompt, "one")
    bench.run(engine, once_more)
    assert last.events[-1].cached == 79
    assert close(last, heard)


def test_a_new_version_of_an_adapter_shares_nothing_with_the_old(bench: Bench, adapters: dict[str, Path]) -> None:
    prompt = text(8, 40)
    engine = bench.engine()
    bench.run(engine, bench.sequence(prompt, "one")[0])
    old = bench.loaded["one"]
    bench.loaded["one"] = bench.lora_modules.open(adapters["two"], "one", 2, str(bench.directory))
    try:
        one, heard = bench.sequence(prompt, "one")
        bench.run(engine, one)
        assert heard.events[-1].cached == 0
        assert close(heard, bench.alone(prompt, "two"))
    finally:
        bench.loaded["one"] = old
    engine.drop_adapter(old.owner)
    engine.step()
    assert all(slot.owner != old.owner for slot in engine.kv_cache.slots)


def test_without_room_the_youngest_waits_and_answers_the_same(bench: Bench) -> None:
    prompts = [text(seed, 30) for seed in range(10, 14)]
    made = [bench.sequence(prompt, "two", max_tokens=60) for prompt in prompts]
    engine = bench.engine(tokens=256)
    bench.run(engine, *(one for one, _ in made))
    assert engine.counts.preempted > 0
    for prompt, (_, heard) in zip(prompts, made, strict=True):
        assert close(heard, bench.alone(prompt, "two", max_tokens=60))
    assert engine.kv_cache.allocated_tokens <= 256


def test_scores_of_a_prompt(bench: Bench, stock: dict[str | None, object]) -> None:
    prompt = text(15, 50)
    one, heard = bench.sequence(prompt, max_tokens=0, prompt_logprobs=True, logprobs=3)
    bench.run(bench.engine(chunk=16), one)
    assert heard.finish == "length" and not heard.tokens
    (told,) = [event.prompt_scores for event in heard.events if event.prompt_scores]
    assert [score.token for score in told] == prompt and told[0].logprob is None
    with torch.no_grad():
        logs = stock[None](input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)  # type: ignore[operator]
    for place, score in enumerate(told[1:]):
        assert score.logprob == pytest.approx(float(logs[place, prompt[place + 1]]), abs=2e-2)
        assert [token for token, _ in score.top] == logs[place].topk(3).indices.tolist()


def test_scores_of_a_common_beginning_are_computed_once(bench: Bench) -> None:
    """Endings of one question, a plain answer in between, more and fewer of the most likely: told as if alone."""

    def told(heard: Heard) -> list[Score]:
        (found,) = [event.prompt_scores for event in heard.events if event.prompt_scores]
        return list(found)

    question, engine = text(31, 40), bench.engine(chunk=16)
    endings = [[5], [6, 7, 8], [5, 9], text(32, 20)]
    for at, (ending, top) in enumerate([*((ending, 2) for ending in endings), ([6, 7], 0), ([6, 7, 9], 3)]):
        prompt = question + ending
        asked = {"max_tokens": 1, "prompt_logprobs": True, "logprobs": top}
        one, heard = bench.sequence(prompt, **asked)
        bench.run(engine, one)
        alone = told(bench.alone(prompt, **asked))
        assert [score.token for score in told(heard)] == prompt and told(heard)[0].logprob is None
        for found, wanted in zip(told(heard)[1:], alone[1:], strict=True):
            assert found.logprob == pytest.approx(wanted.logprob, abs=SAME)
            assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
        if at in (1, 2, 3, 4):
            assert one.cached >= len(question) - 1
        if at == 2:
            bench.run(engine, bench.sequence([*question[:20], 11, 12], max_tokens=3)[0])
    assert not one.cached  # slots know two of the most likely, not three


def test_a_seed_repeats_whoever_else_is_served(bench: Bench) -> None:
    sampling = Sampling(temperature=0.9, top_p=0.95, top_k=50, min_p=0.001, seed=7)
    alone = bench.alone(text(16, 20), "one", sampling=sampling, max_tokens=16)
    made = [bench.sequence(text(seed, 20), "one", sampling=sampling, max_tokens=16) for seed in (17, 16, 18)]
    bench.run(bench.engine(), *(one for one, _ in made))
    assert made[1][1].tokens == alone.tokens
    other = bench.alone(text(16, 20), "one", sampling=Sampling(temperature=0.9, seed=8), max_tokens=16)
    assert other.tokens != alone.tokens


def test_limits_are_said_before_work_starts(bench: Bench) -> None:
    engine = bench.engine(queued=2, tokens=256)
    with pytest.raises(InputError, match=r"20 prompt tokens and 500 new.*at most 256"):
        engine.submit([bench.sequence(text(1, 20), max_tokens=500)[0]])
    engine.submit([bench.sequence(text(1, 20))[0], bench.sequence(text(1, 20))[0]])
    with pytest.raises(QueueFull, match="2 requests"):
        engine.submit([bench.sequence(text(1, 20))[0]])


def test_cancel_timeout_and_stop(bench: Bench) -> None:
    engine = bench.engine(running=2)
    engine.start()
    left, left_heard = bench.sequence(text(1, 20), max_tokens=400)
    late, late_heard = bench.sequence(text(2, 20), max_tokens=400, deadline=time.monotonic() + 0.3)
    waits, waits_heard = bench.sequence(text(3, 20), max_tokens=4)
    engine.submit([left, late, waits])
    time.sleep(0.1)
    engine.cancel([left])
    end = time.monotonic() + 20
    while time.monotonic() < end and not all((left.finished, late.finished, waits.finished)):
        time.sleep(0.01)
    assert (left_heard.finish, late_heard.finish, waits_heard.finish) == ("cancelled", "timeout", "length")
    assert late_heard.tokens  # what came in time was delivered
    long, long_heard = bench.sequence(text(4, 20), max_tokens=60)
    engine.submit([long])
    stopper = threading.Thread(target=engine.stop, args=(20.0,))
    stopper.start()
    time.sleep(0.02)
    with pytest.raises(Stopped):
        engine.submit([bench.sequence(text(5, 20))[0]])
    stopper.join()
    assert long_heard.finish == "length" and not engine.alive


def test_a_failed_step_ends_its_requests_and_not_the_server(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bench.engine()
    run, calls = engine.forward.run, []

    def fail_once(pieces: object) -> object:
        calls.append(pieces)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        return run(pieces)

    monkeypatch.setattr(engine.forward, "run", fail_once)
    engine.start()
    broken, broken_heard = bench.sequence(text(1, 20))
    engine.submit([broken])
    end = time.monotonic() + 20
    while not broken.finished and time.monotonic() < end:
        time.sleep(0.01)
    assert broken_heard.finish == "error" and "no memory" in broken_heard.events[-1].error
    fine, fine_heard = bench.sequence(text(1, 20))
    engine.submit([fine])
    while not fine.finished and time.monotonic() < end:
        time.sleep(0.01)
    engine.stop()
    assert close(fine_heard, bench.alone(text(1, 20)))
