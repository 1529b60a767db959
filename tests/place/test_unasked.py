"""Passes that go without a look at their ids: when they may, and that nothing is lost by it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ktransformers.nn.lora_factors import factors_of
from ktransformers.nn.store import NO_DROPOUT
from ktransformers.place.autograd import PlacedStore
from ktransformers.place.gpu.executor import ExpertBatch, GpuExecutor, LayerOnDevice
from ktransformers.place.trials import Trial, size_of
from tests.place.test_gpu_engine import SMALL, compare, expected, inputs, make_store, placed


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if every pass were recorded: whoever is asked for without counts finds them in the batch; what was."""
    unasked: list[str] = []
    monkeypatch.setattr(GpuExecutor, "replays", lambda *_: True)
    for name in ("forward", "backward"):
        inner = getattr(GpuExecutor, name)

        def counted(
            self: GpuExecutor, layer: LayerOnDevice, batch: ExpertBatch, *rest: object, inner=inner, name=name
        ) -> object:  # type: ignore[no-untyped-def]
            *first, experts, counts = rest[:2] if name == "forward" else rest[:3]
            if counts is None:
                unasked.append(name)
                ids = batch.ids[batch.ids >= 0]
                counts = np.bincount(ids.numpy(), minlength=layer.geometry.experts)
                experts = tuple(e for e in experts if counts[e])  # type: ignore[attr-defined]
            return inner(self, layer, batch, *first, experts, counts, *rest[len(first) + 2 :])

        monkeypatch.setattr(GpuExecutor, name, counted)
    return unasked


def step(place: PlacedStore, seed: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    given = inputs(SMALL, "cpu", seed)
    out = place(given.hidden, given.ids, given.weights, factors_of(given.lora), NO_DROPOUT, True)
    found = [out, *torch.autograd.grad(out, given.leaves(), given.grad)]
    return found, expected(place.layer.store, given), given.ids


@pytest.mark.parametrize(
    ("policy", "residents", "way", "unasked"),
    [
        ("stream", 0, "", True),
        ("auto", 2, "whole", True),
        ("auto", 2, "stream", False),
        ("auto", 2, "both", False),
        ("auto", SMALL.experts, "both", True),
        ("resident", 2, "", False),
        ("resident", SMALL.experts, "", True),
        ("cpu", 0, "", False),
    ],
)
def test_who_is_asked(policy: str, residents: int, way: str, unasked: bool, recorded: list[str]) -> None:
    """Once the rows of a batch of this size were seen, where everybody is on the GPU: because they are, or because they
    are sent for."""
    store = make_store(SMALL)
    place = placed(store, "cpu", policy, 2 * SMALL.experts, tuple(range(residents)))
    place.engine.trials.enter = lambda *_: way  # type: ignore[method-assign]
    rows = np.zeros(SMALL.experts, np.int64)
    for seed in range(3):
        found, want, ids = step(place, seed)
        compare(found, want)
        rows += np.bincount(ids[ids >= 0].numpy(), minlength=SMALL.experts)
    assert recorded == (["backward", *["forward", "backward"] * 2] if unasked else [])
    assert np.array_equal(place.engine.counts(place.layer), rows)


def test_few_of_them_wanted(recorded: list[str]) -> None:
    """Under `stream` nobody is sent for who is not wanted, where that is more than a few; another size of batch, of
    which everybody was wanted, says nothing."""
    store = make_store(SMALL)
    place = placed(store, "cpu", "stream", 2 * SMALL.experts)
    few, all_of_them = np.array([1, 0] * (SMALL.experts // 2)), np.ones(SMALL.experts, np.int64)
    place.layer.seen = {size_of(SMALL.tokens): few, size_of(2): all_of_them}
    compare(*step(place, 0)[:2])
    assert recorded == ["backward"], "of this batch all were wanted, which nobody knew before"


def test_layers_without_a_choice_are_on_no_walk(recorded: list[str]) -> None:
    """Whether they are asked or not: what they take says nothing about ways."""
    store = make_store(SMALL)
    place = placed(store, "cpu", "auto", 2 * SMALL.experts, tuple(range(SMALL.experts)), split=False)
    for seed in range(3):
        compare(*step(place, seed)[:2])
    assert recorded[-2:] == ["forward", "backward"]
    assert not place.engine.trials.ways()


def test_another_way_back(recorded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward finds the ids of a pass that never looked at them."""
    store = make_store(SMALL)
    place = placed(store, "cpu", "stream", 2 * SMALL.experts)
    step(place, 0)
    given = inputs(SMALL, "cpu", 1)
    out = place(given.hidden, given.ids, given.weights, factors_of(given.lora), NO_DROPOUT, True)
    assert recorded == ["backward", "forward"] and place.engine._unseen
    monkeypatch.setattr(GpuExecutor, "replays", lambda *_: False)
    compare([out, *torch.autograd.grad(out, given.leaves(), given.grad)], expected(store, given))
    assert recorded == ["backward", "forward"] and not place.engine._unseen


@pytest.mark.parametrize(("whole", "best"), [(0.8, "whole"), (1.0, "stream"), (1.2, "stream")])
def test_it_is_tried_and_judged_like_any_way(whole: float, best: str) -> None:
    """Costs know nothing of waiting."""
    trial, taken = Trial(), {"stream": 1.0, "whole": whole, "cpu": 3.0}
    ways = []
    for _ in range(12):
        ways.append(trial.begin(lambda: {"stream": 1.0, "whole": 1.4, "cpu": 3.0}))
        trial.end(ways[-1], taken[ways[-1]], 16)
    assert ways[0] == "stream" and "whole" in ways and "cpu" not in ways
    assert trial.best == ways[-1] == best and trial.settled
