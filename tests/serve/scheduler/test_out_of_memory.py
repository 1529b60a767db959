"""Memory that runs out while requests are computed ends one request with one line; the others get the same answers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from ktransformers.ground.out_of_memory import exhausted_memory
from ktransformers.plan import Serving, make_plan, open_shape, profile
from ktransformers.serve.flags import Launch
from ktransformers.serve.forecast import memory_advice
from tests.support.serving import EngineHarness, random_prompt, same_completion

CUDA_MESSAGE = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.6 GiB"
HOST_MESSAGE = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes."
ERRORS = [torch.OutOfMemoryError(CUDA_MESSAGE), MemoryError(), RuntimeError(HOST_MESSAGE)]
LARGE = 48  # tokens of the prompt that does not fit


def fail_large_steps(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    compute = harness.forward._call_model

    def call_model(tokens: list[int], *others: Any) -> Any:
        if len(tokens) >= LARGE:
            raise type(error)(*error.args)  # a new one: its traceback holds the model
        return compute(tokens, *others)

    monkeypatch.setattr(harness.forward, "_call_model", call_model)


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "host", "torch_host"])
def test_one_request_ends_and_the_others_go_on(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    prompts = [random_prompt(seed, 9) for seed in (1, 2)]
    expected = [harness.alone(prompt, max_tokens=12) for prompt in prompts]
    engine = harness.engine()
    engine.memory_advice = "a smaller --chunked-prefill-size"
    fail_large_steps(harness, monkeypatch, error)
    sequences, recorded = zip(*(harness.sequence(prompt, max_tokens=12) for prompt in prompts), strict=True)
    engine.submit(sequences)
    for _ in range(3):
        engine.step()
    large, ended = harness.sequence(random_prompt(3, LARGE + 8), request_id="req_large")
    with caplog.at_level(logging.ERROR):
        harness.run(engine, large)
    assert ended.finish == "out_of_memory"
    line = ended.events[-1].error
    assert "\n" not in line and "asked for" in line and " free of " in line and "--chunked-prefill-size" in line
    assert len(caplog.records) == 1 and "req_large" in caplog.text and "Traceback" not in caplog.text
    for one, other in zip(recorded, expected, strict=True):
        assert one.finish == "length" and same_completion(one, other)
    assert not engine.running and not any(slot.busy for slot in engine.kv_cache.slots)


def test_a_slot_that_cannot_grow_ends_its_request_only(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot has 64 tokens to begin with; the long answer needs more."""
    from ktransformers.serve.cache.kv_cache import KVCache

    grow = KVCache.grow

    def no_memory(cache: Any, slot: Any, tokens: int) -> bool:
        if slot.blocks and tokens > slot.capacity:
            raise torch.OutOfMemoryError(CUDA_MESSAGE)
        return grow(cache, slot, tokens)

    expected = harness.alone(random_prompt(1, 20), max_tokens=20)
    monkeypatch.setattr(KVCache, "grow", no_memory)
    engine = harness.engine()
    short, recorded = harness.sequence(random_prompt(1, 20), max_tokens=20)
    long, ended = harness.sequence(random_prompt(2, 20), max_tokens=100)
    harness.run(engine, short, long)
    assert ended.finish == "out_of_memory" and recorded.finish == "length"
    assert same_completion(recorded, expected)
    assert not any(slot.busy for slot in engine.kv_cache.slots)


def test_tokens_are_drawn_on_the_cpu_where_their_copies_do_not_fit(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktransformers.serve.sampling.sampling import Sampling
    from ktransformers.serve.scheduler import sampler as module

    sampled, draw, failed = Sampling(temperature=0.8, top_p=0.9, seed=3), module.draw_tokens, list[int]()

    def fails_once(*arguments: Any) -> Any:
        if not failed:
            failed.append(1)
            raise torch.OutOfMemoryError(CUDA_MESSAGE)
        return draw(*arguments)

    expected = harness.alone(random_prompt(1, 9), max_tokens=8, sampling=sampled)
    monkeypatch.setattr(module, "draw_tokens", fails_once)
    recorded = harness.alone(random_prompt(1, 9), max_tokens=8, sampling=sampled)
    assert failed and recorded.finish == "length" and same_completion(recorded, expected)


def test_recurrent_states_are_computed_again(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktransformers.serve.attention.attention import ATTENTION_NAME
    from ktransformers.serve.scheduler.engine import ServeEngine
    from ktransformers.serve.scheduler.forward import SequentialForward
    from ktransformers.serve.scheduler.scheduler import Limits

    forward = SequentialForward(harness.model)
    run_chunk, failed = forward._run_chunk, list[int]()

    def fails_once(chunk: Any) -> Any:
        result = run_chunk(chunk)
        if len(chunk.tokens) == 30 and not failed:  # after the sequences before it have advanced
            failed.append(1)
            raise MemoryError
        return result

    prompts = [random_prompt(1, 9), random_prompt(2, 30)]
    harness.model.set_attn_implementation(harness.forward.stock_attention)
    try:
        engine = ServeEngine(forward, Limits(context_length=512))
        first, expected = harness.sequence(prompts[0])
        harness.run(engine, first)
        engine = ServeEngine(forward, Limits(context_length=512))
        monkeypatch.setattr(forward, "_run_chunk", fails_once)
        (short, recorded), (large, ended) = (harness.sequence(prompt) for prompt in prompts)
        harness.run(engine, short, large)
    finally:
        harness.model.set_attn_implementation(ATTENTION_NAME)
    assert ended.finish == "out_of_memory" and same_completion(recorded, expected)


def test_other_errors_are_not_taken_for_missing_memory() -> None:
    assert [exhausted_memory(error) for error in ERRORS] == ["gpu", "host", "host"]
    assert exhausted_memory(RuntimeError("shape mismatch")) is exhausted_memory(ValueError("out of memory")) is None


def test_advice_has_the_guides_order_and_the_plans_numbers() -> None:
    plan = make_plan(open_shape("qwen3-30b-a3b"), Serving(context=4096), profile("desktop-4090"))
    text = memory_advice(Launch("m", chunked_prefill_size=512, max_running_requests=16, memory=0.7), plan, 4096, 2**30)
    words = ["--chunked-prefill-size (now 512", "--max-running-requests (now 16)", "--mem-fraction-static (now 0.7"]
    places = [text.index(word) for word in words]
    assert places == sorted(places) and "planned" in text and "1.00 GiB when full" in text
    text = memory_advice(Launch("m", max_total_tokens=4096), plan, 4096, 2**30)
    assert "fewer --max-total-tokens (now a KV cache of 4096 tokens" in text and "--mem-fraction-static" not in text
