"""With `deterministic`, the bits of an answer in bf16 depend on nothing that is served beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.serving import EngineHarness, RecordedEvents, random_prompt

LENGTHS = (60, 21, 62, 70, 131)  # in a cache of three blocks of 64 tokens the first two to grow need a fourth
ADAPTERS = (None, "one", None, "two", "attention")


@pytest.fixture(scope="module")
def harness16(model_directory: Path, adapters: dict[str, Path]) -> EngineHarness:
    return EngineHarness(model_directory, adapters, torch.bfloat16)


def answers(harness: EngineHarness, *, together: bool, **limits: int) -> list[RecordedEvents]:
    prompts = [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    prompts[3] = prompts[2][:30] + prompts[3][30:]  # a shared prefix, under another adapter
    prompts.append(prompts[2])  # and one under the same
    created = [harness.sequence(*one, max_tokens=12) for one in zip(prompts, (*ADAPTERS, None), strict=True)]
    engine = harness.engine(chunked_prefill_size=32, **limits)
    for group in [created] if together else [[one] for one in created]:
        harness.run(engine, *(sequence for sequence, _ in group))
    if "max_total_tokens" in limits and together:
        assert engine.scheduler.preempted
    return [recorded for _, recorded in created]


@pytest.mark.parametrize("limits", [{}, {"max_total_tokens": 192, "context_length": 160}], ids=["roomy", "preempted"])
def test_answers_have_the_same_bits_alone_and_together(harness16: EngineHarness, limits: dict[str, int]) -> None:
    alone = answers(harness16, together=False, deterministic=True, **limits)
    together = answers(harness16, together=True, deterministic=True, **limits)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs and one.finish == other.finish == "length"


def test_without_it_the_bits_depend_on_the_batch(harness16: EngineHarness) -> None:
    """Otherwise the test above shows nothing."""
    alone, together = answers(harness16, together=False), answers(harness16, together=True)
    assert any(one.logprobs != other.logprobs for one, other in zip(alone, together, strict=True))


def test_prefixes_are_not_reused(harness16: EngineHarness) -> None:
    assert all(
        event.cached == 0 for one in answers(harness16, together=False, deterministic=True) for event in one.events
    )
