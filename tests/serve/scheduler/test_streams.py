"""What a step with many streams calls, counted: the model once, however many sequences it has."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.serving import EngineHarness, random_prompt, same_completion

STREAMS = (1, 32, 33, 64)
NEW = 5


def count_calls(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, streams: int
) -> tuple[set[tuple[int, ...]], Any]:
    """Calls per step of streams that all decode, as (model, layers, experts, attention of the core, argmax); and what
    the first stream got."""
    from ktransformers.experts.contract import expert_modules
    from ktransformers.ground.pool import default_pool

    counts = dict.fromkeys(("model", "layers", "experts", "attend", "argmax"), 0)

    def counted(name: str, call: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        return wrapper

    model, pool = harness.model, default_pool()
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: counts.update({name: counts[name] + 1}))
        for name, modules in (
            ("model", [model]),
            ("layers", list(model.model.layers)),
            ("experts", list(expert_modules(model).values())),
        )
        for module in modules
    ]

    class CountedPool:
        """The pool of the core, which has no attributes of its own."""

        def __getattr__(self, name: str) -> Any:
            return counted(name, getattr(pool, name)) if name in counts else getattr(pool, name)

    for module in ("serve.attention.attention", "serve.scheduler.forward"):
        monkeypatch.setattr(f"ktransformers.{module}.default_pool", CountedPool)
    engine = harness.engine(max_running_requests=64, max_total_tokens=64 * 128, chunked_prefill_size=2048)
    created = [
        harness.sequence(random_prompt(seed, 9), max_tokens=NEW, logprobs=None if seed else 2)
        for seed in range(streams)
    ]
    steps = set()
    try:
        engine.submit([sequence for sequence, _ in created])
        while engine.busy:
            decodes = len(engine.running) == streams and all(one.uncomputed == 1 for one in engine.running)
            counts.update(dict.fromkeys(counts, 0))
            engine.step()
            if decodes:
                steps.add(tuple(counts.values()))
    finally:
        for handle in handles:
            handle.remove()
        monkeypatch.undo()
    assert all(recorded.finish == "length" for _, recorded in created)
    return steps, created[0][1]


def test_a_step_calls_the_model_once_for_any_number_of_streams(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = len(harness.model.model.layers)
    answers = []
    for streams in STREAMS:
        steps, first = count_calls(harness, monkeypatch, streams)
        assert steps == {(1, layers, layers, layers, 1)}, streams
        answers.append(first)
    assert all(same_completion(answers[0], other) for other in answers[1:])
