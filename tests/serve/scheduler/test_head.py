"""Prompt scores: logits of some rows at a time, one pass of the model's body, and the plan's estimate of the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.plan import Choice, Serving, make_plan, open_shape, profile, with_gpus
from ktransformers.plan.memory import SCORED_ROWS, predict_memory
from ktransformers.serve import forecast
from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.scheduler import head
from ktransformers.serve.scheduler.forward import Chunk, Forward, make_forward
from tests.support.serving import EngineHarness, make_service
from tests.support.tiny_models import build

QWEN = open_shape("qwen3-30b-a3b")


def test_long_prompt_is_scored_in_parts() -> None:
    model: Any = build("qwen3_moe", max_position_embeddings=512)
    tokens = [(11 * at + 5) % 90 for at in range(300)]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    forward, actual = Forward(model), list[tuple[int, torch.Tensor]]()
    rows: list[int] = []
    bodies: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    model.model.layers[0].register_forward_hook(lambda module, args, output: bodies.append(1))

    def read(first: int, logits: torch.Tensor) -> None:
        actual.append((first, logits))

    (last,) = forward.run([Chunk(KVSlot.alone(320), tokens, 0, None, read)])
    assert rows == [SCORED_ROWS, SCORED_ROWS, 300 - 2 * SCORED_ROWS, 1] and len(bodies) == 1
    assert [first for first, _ in actual] == [0, SCORED_ROWS, 2 * SCORED_ROWS]
    assert torch.allclose(torch.cat([logits for _, logits in actual]), expected, atol=1e-4)
    assert last is not None and torch.allclose(last.logits, expected[-1], atol=1e-4)
    assert "forward" not in vars(model.model)


@pytest.mark.parametrize(
    "family", ["gpt_oss", "deepseek_v3", "granitemoe", "cohere2_moe", "qwen3_5_moe_text", "lfm2_moe", "phimoe"]
)
def test_families_compute_selected_rows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled logits, biases, recurrent states: `check_against_stock` compares with the stock model."""
    monkeypatch.setattr(head, "SCORED_ROWS", 5)
    assert make_forward(build(family)).check_against_stock() > 0


def test_scores_do_not_depend_on_part_size(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [([(7 * at + 3) % 6400 for at in range(50)], "one"), ([9, 8, 7], None), ([5] * 20, "attention")]

    def reported() -> list[Any]:
        engine = harness.engine(chunked_prefill_size=33)
        requested = {"max_tokens": 2, "prompt_logprobs": True}
        created = [harness.sequence(prompt, adapter, **requested) for prompt, adapter in prompts]
        harness.run(engine, *(one for one, _ in created))
        assert engine.counts.scored_tokens == sum(len(prompt) for prompt, _ in prompts)
        return [event.prompt_scores for _, recorded in created for event in recorded.events if event.prompt_scores]

    whole = reported()
    monkeypatch.setattr(head, "SCORED_ROWS", 4)
    assert sorted(len(scores) for scores in whole) == [3, 20, 50]
    for parts, scores in zip(reported(), whole, strict=True):
        assert [one.token for one in parts] == [one.token for one in scores]
        assert parts[0].logprob is None
        for one, other in zip(parts[1:], scores[1:], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_failing_body_restores_the_model() -> None:
    model: Any = build("qwen3_moe")
    forward = Forward(model)

    def read(first: int, logits: torch.Tensor) -> None:
        raise RuntimeError("unreadable")

    with pytest.raises(RuntimeError, match="unreadable"):
        forward.run([Chunk(KVSlot.alone(64), [1, 2, 3], 0, None, read)])
    assert "forward" not in vars(model.model)


@pytest.mark.parametrize(("size", "score"), [(2, 10), (4, 8)])
def test_plan_counts_score_memory(size: int, score: int) -> None:
    machine, work = profile("desktop-4090"), Serving(context=4096, prompt=512, rest_bytes=size)
    whole = SCORED_ROWS * QWEN.vocabulary * score
    assert predict_memory(QWEN, work, Choice(), machine).host["scores"] == whole
    assert predict_memory(QWEN, work, Choice(gpus=1), machine).gpus[0]["scores"] == whole
    short = Serving(prompt=3, rest_bytes=size)
    assert predict_memory(QWEN, short, Choice(), machine).host["scores"] == 3 * QWEN.vocabulary * score


def test_comparison_counts_scores_only_if_requested(harness: EngineHarness, adapters: dict[str, Path]) -> None:
    plan = make_plan(QWEN, Serving(), with_gpus(profile("desktop-4090"), "none"))
    service = make_service(harness, adapters)
    before = forecast.compare_at_end(plan, service).predicted
    one, _ = harness.sequence([3, 4, 5], max_tokens=0, prompt_logprobs=True)
    harness.run(service.engine, one)
    cache = service.engine.kv_cache.peak_tokens * service.kv_bytes_per_token
    after = forecast.compare_at_end(plan, service).predicted
    assert (after - before) * 1e9 == pytest.approx(plan.nearest.memory.host["scores"] + cache)
