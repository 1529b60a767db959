"""Passes in mode `stream_all`, which run without expert ids on the host: when they may, and that no row is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ktransformers.experts.backend import ExpertBatch
from ktransformers.place.gpu.executor import GpuExecutor, LayerOnDevice
from ktransformers.place.placed_experts import PlacedExperts
from ktransformers.plan.modes import size_bucket
from tests.support.placed_experts import SMALL, assert_close, cpu_results, make_inputs, make_store, place_store_on, run


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if every pass were recorded: whoever is asked for without counts finds them in the batch; what was."""
    unasked: list[str] = []
    monkeypatch.setattr(GpuExecutor, "replays", lambda *_: True)
    for name in ("forward", "backward"):
        inner = getattr(GpuExecutor, name)

        def counted(
            self: GpuExecutor, layer: LayerOnDevice, small_batch: ExpertBatch, *rest: object, inner=inner, name=name
        ) -> object:  # type: ignore[no-untyped-def]
            *first, experts, counts = rest[:2] if name == "forward" else rest[:3]
            if counts is None:
                unasked.append(name)
                ids = small_batch.ids[small_batch.ids >= 0]
                counts = np.bincount(ids.numpy(), minlength=layer.geometry.experts)
                experts = tuple(e for e in experts if counts[e])  # type: ignore[attr-defined]
            return inner(self, layer, small_batch, *first, experts, counts, *rest[len(first) + 2 :])

        monkeypatch.setattr(GpuExecutor, name, counted)
    return unasked


def step(place: PlacedExperts, seed: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    given = make_inputs(SMALL, "cpu", seed)
    out = run(place, given, given.lora)
    found = [out, *torch.autograd.grad(out, given.leaves(), given.grad)]
    return found, cpu_results(place.layer.store, given), given.ids


@pytest.mark.parametrize(
    ("policy", "residents", "way", "unasked"),
    [
        ("stream", 0, None, True),
        ("auto", 2, "stream_all", True),
        ("auto", 2, "stream", True),
        ("split", 2, None, True),
        ("split", SMALL.experts, None, True),
        ("resident", 2, None, False),
        ("resident", SMALL.experts, None, True),
        ("cpu", 0, None, False),
    ],
)
def test_when_passes_run_without_ids(
    policy: str, residents: int, way: str | None, unasked: bool, recorded: list[str]
) -> None:
    """Once the rows of a batch of this size were seen, where everybody is on the GPU: because they are, or because they
    are sent for."""
    store = make_store(SMALL)
    place = place_store_on(store, "cpu", policy, 2 * SMALL.experts, tuple(range(residents)))
    place.engine.dispatcher.forced = way
    rows = np.zeros(SMALL.experts, np.int64)
    for seed in range(3):
        found, want, ids = step(place, seed)
        assert_close(found, want)
        rows += np.bincount(ids[ids >= 0].numpy(), minlength=SMALL.experts)
    assert recorded == (["backward", *["forward", "backward"] * 2] if unasked else [])
    assert np.array_equal(place.engine.counts(place.layer), rows)


def test_batch_with_few_experts_is_not_streamed_whole(recorded: list[str]) -> None:
    """Under `stream` nobody is sent for who is not wanted, where that is more than a few; another size of batch, of
    which everybody was wanted, says nothing."""
    store = make_store(SMALL)
    place = place_store_on(store, "cpu", "stream", 2 * SMALL.experts)
    few, all_of_them = np.array([1, 0] * (SMALL.experts // 2)), np.ones(SMALL.experts, np.int64)
    place.layer.last_counts = {size_bucket(SMALL.tokens): few, size_bucket(2): all_of_them}
    assert_close(*step(place, 0)[:2])
    assert recorded == ["backward"], "of this batch all were wanted, which nobody knew before"


def test_backward_without_a_graph_uses_the_ids(recorded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward finds the ids of a pass that never looked at them."""
    store = make_store(SMALL)
    place = place_store_on(store, "cpu", "stream", 2 * SMALL.experts)
    step(place, 0)
    given = make_inputs(SMALL, "cpu", 1)
    out = run(place, given, given.lora)
    assert recorded == ["backward", "forward"] and place.engine._uncounted
    monkeypatch.setattr(GpuExecutor, "replays", lambda *_: False)
    assert_close([out, *torch.autograd.grad(out, given.leaves(), given.grad)], cpu_results(store, given))
    assert recorded == ["backward", "forward"] and not place.engine._uncounted
