"""The engine with attention and KV cache on a GPU and the experts in host memory, against itself and against the
same engine without a GPU. Comparisons score prompts instead of generating, so that near ties change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ktransformers.serve.flags import Launch
from ktransformers.serve.loading import open_service
from ktransformers.serve.target import Target
from tests.support.serving import GPU_TOLERANCE, EngineHarness, random_prompt, wait_for_finish

pytestmark = pytest.mark.gpu

NAMES = [None, "one", "two", None, "attention", "one", "two"]


@pytest.fixture(scope="module")
def on_gpu(model_directory: Path, adapters: dict[str, Path]) -> Iterator[EngineHarness]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield EngineHarness(model_directory, adapters, device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = before


def scored(
    harness: EngineHarness, prompts: list[list[int]], names: list[str | None], **limits: int
) -> list[torch.Tensor]:
    """Log-probabilities of the prompts, all in one engine."""
    requested = {"max_tokens": 0, "prompt_logprobs": True, "logprobs": 0}
    pairs = zip(prompts, names, strict=True)
    created = [harness.sequence(prompt, name, **requested) for prompt, name in pairs]
    harness.run(harness.engine(**limits), *(one for one, _ in created))
    actual = []
    for _, recorded in created:
        assert recorded.finish == "length", recorded.events[-1].error
        (reported,) = [event.prompt_scores for event in recorded.events if event.prompt_scores]
        actual.append(torch.tensor([score.logprob for score in reported[1:]]))
    return actual


def test_kv_slots_are_on_the_gpu_and_experts_are_not(on_gpu: EngineHarness) -> None:
    assert on_gpu.forward.device.type == "cuda"
    weights = {name: one.device.type for name, one in on_gpu.model.named_parameters() if ".experts." not in name}
    assert set(weights.values()) == {"cuda"}, weights
    engine = on_gpu.engine()
    one, recorded = on_gpu.sequence(random_prompt(1, 20), "one")
    on_gpu.run(engine, one)
    assert recorded.finish == "length" and len(recorded.tokens) == 8
    parts = engine.kv_cache.memory.parts
    held = [*parts["keys"].values(), *parts["values"].values()]
    assert len(held) == 4 and all(tensor.device.type == "cuda" for tensor in held)
    for resident in on_gpu.loaded.values():
        assert all(linear.a.is_cuda and linear.b.is_cuda for linear in resident.linears.values())


def test_mixed_batch_matches_separate_runs(on_gpu: EngineHarness) -> None:
    prompts = [random_prompt(seed, 5 + 13 * seed) for seed in range(len(NAMES))]
    mixed = scored(on_gpu, prompts, NAMES, chunked_prefill_size=32)
    for prompt, name, actual in zip(prompts, NAMES, mixed, strict=True):
        (alone,) = scored(on_gpu, [prompt], [name])
        assert float((actual - alone).abs().max()) < GPU_TOLERANCE, name


def test_adapters_give_different_results(on_gpu: EngineHarness) -> None:
    """Differences are far beyond the tolerance, so mixed-up adapters would fail the test above."""
    prompt = random_prompt(21, 60)
    names: list[str | None] = [None, "one", "two", "attention"]
    actual = dict(zip(names, scored(on_gpu, [prompt] * 4, names), strict=True))
    for name in names[1:]:
        for other in {*names} - {name}:
            assert float((actual[name] - actual[other]).abs().max()) > 20 * GPU_TOLERANCE, (name, other)


def test_base_rows_are_bit_identical_beside_adapters(on_gpu: EngineHarness) -> None:
    """The same batch shape with and without adapters in other rows: equal bits."""
    prompts = [random_prompt(seed, 20) for seed in range(3)]
    plain = scored(on_gpu, prompts, [None, None, None])[0]
    for names in ([None, "two", "one"], [None, "attention", None]):
        assert torch.equal(scored(on_gpu, prompts, names)[0], plain), names


def test_logprobs_match_cpu(on_gpu: EngineHarness, harness: EngineHarness) -> None:
    prompts = [random_prompt(seed, 30 + seed) for seed in range(4)]
    names: list[str | None] = [None, "one", "two", "attention"]
    for name, placed_harness, there in zip(
        names, scored(on_gpu, prompts, names), scored(harness, prompts, names), strict=True
    ):
        assert float((placed_harness - there).abs().max()) < GPU_TOLERANCE, name


def test_chunks_prefixes_and_preemption_change_nothing(on_gpu: EngineHarness) -> None:
    prompt = random_prompt(5, 90)
    (whole,) = scored(on_gpu, [prompt], ["one"])
    for chunk in (7, 33):
        assert (
            float((scored(on_gpu, [prompt], ["one"], chunked_prefill_size=chunk)[0] - whole).abs().max())
            < GPU_TOLERANCE
        )
    engine = on_gpu.engine()
    on_gpu.run(engine, on_gpu.sequence(prompt, "one", max_tokens=1)[0])
    again, recorded = on_gpu.sequence(prompt + random_prompt(6, 9), "one", max_tokens=1)
    on_gpu.run(engine, again)
    fresh = on_gpu.alone(prompt + random_prompt(6, 9), "one", max_tokens=1)
    assert recorded.events[-1].cached == 90
    assert recorded.logprobs == pytest.approx(fresh.logprobs, abs=GPU_TOLERANCE)
    created = [on_gpu.sequence(random_prompt(seed, 30), "two", max_tokens=60) for seed in range(10, 14)]
    small = on_gpu.engine(max_total_tokens=256)
    on_gpu.run(small, *(one for one, _ in created))
    assert small.scheduler.preempted > 0 and small.kv_cache.allocated_tokens <= 256
    assert [recorded.finish for _, recorded in created] == ["length"] * 4


def test_engine_runs_in_its_own_thread(on_gpu: EngineHarness) -> None:
    """As in the server: the model is loaded in one thread and computes in another."""
    engine = on_gpu.engine()
    engine.start()
    try:
        created = [on_gpu.sequence(random_prompt(seed, 25), name) for seed, name in enumerate([None, "one", "two"])]
        engine.submit([one for one, _ in created])
        for _, recorded in created:
            wait_for_finish(recorded)
    finally:
        engine.stop()
    for seed, (name, (_, recorded)) in enumerate(zip([None, "one", "two"], created, strict=True)):
        alone = on_gpu.alone(random_prompt(seed, 25), name)
        assert recorded.logprobs[0] == pytest.approx(alone.logprobs[0], abs=GPU_TOLERANCE)


def test_served_model_in_bf16_answers(model_directory: Path, adapters: dict[str, Path]) -> None:
    """`kt serve` with a GPU: bf16 by default, cache capacity from free memory, adapters from their directories."""
    paths = tuple((name, str(adapters[name])) for name in ("one", "two"))
    launch = Launch(str(model_directory), lora_paths=paths, memory=0.01, max_running_requests=4, context_length=256)
    lines: list[str] = []
    service = open_service(launch, Target(model_directory, name="tiny"), lines.append)
    assert "bfloat16, cuda" in lines[0]
    model = service.engine.forward.model
    assert model.dtype == torch.bfloat16 and model.device.type == "cuda"
    harness = EngineHarness.__new__(EngineHarness)
    harness.directory, harness.tokenizer, harness.forward = model_directory, service.tokenizer, service.engine.forward
    harness.loaded = {name: service.registry.find(f"tiny:{name}") for name in ("one", "two")}
    prompts = [random_prompt(seed, 40) for seed in range(3)]
    names: list[str | None] = [None, "one", "two"]
    mixed = scored(harness, prompts, names)
    for prompt, name, actual in zip(prompts, names, mixed, strict=True):
        (alone,) = scored(harness, [prompt], [name])
        assert float((actual - alone).abs().mean()) < 0.2, name  # a router on a step of bf16 may choose otherwise
    assert float((mixed[1] - scored(harness, [prompts[1]], [None])[0]).abs().mean()) > 0.8
