"""Modes of an engine: decided once, by size and kind of pass, the same for every layer; timed results are cached."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ktransformers.experts.store import NO_DROPOUT
from ktransformers.place import tune as tuning
from ktransformers.place.gpu.executor import ExpertBatch
from ktransformers.place.placed_store import PlacedStore
from ktransformers.plan.modes import CPU, HOST_CALLBACK, MODES, RESIDENT, SPLIT, STREAM, STREAM_ALL
from tests.support.placed_experts import SMALL, cpu_results, make_inputs, make_store, place_store_on

STORE = make_store(SMALL)


def auto(residents: tuple[int, ...] = ()) -> PlacedStore:
    return place_store_on(STORE, "cpu", "auto", 16, residents)


def batch(tokens: int) -> ExpertBatch:
    given = make_inputs(replace(SMALL, tokens=tokens), "cpu")
    return ExpertBatch(given.hidden.detach(), given.ids, given.weights.detach(), None, NO_DROPOUT)


def test_a_size_and_kind_has_one_decision() -> None:
    dispatcher = auto().engine.dispatcher
    first = dispatcher.decision(64, True)
    assert dispatcher.decision(65, True) is first and dispatcher.decision(64, False) is not first
    dispatcher.forget()
    again = dispatcher.decision(64, True)
    assert again is not first and again == first, "the same costs, the same decision"


def test_timed_modes_overrule_predictions() -> None:
    dispatcher = auto().engine.dispatcher
    predicted = dispatcher.decision(512, False)
    other = next(mode for mode in predicted.predicted if mode != predicted.mode)
    dispatcher.set_timed(512, {predicted.mode: 2.0, other: 1.0})
    assert dispatcher.decision(512, False).mode == other
    dispatcher.forget()
    assert dispatcher.decision(512, False).mode == predicted.mode, "residents have changed: the times are of others"


@pytest.mark.parametrize("policy", MODES)
def test_a_policy_is_one_mode_for_every_pass(policy: str) -> None:
    """Except `split` in passes with gradients."""
    dispatcher = place_store_on(STORE, "cpu", policy, 16, (1, 2)).engine.dispatcher
    for tokens in (1, 40):
        assert dispatcher.decided_mode(tokens, False) == policy
        assert dispatcher.decided_mode(tokens, True) == (STREAM if policy == SPLIT else policy)


def test_a_threshold_overrules_the_policy() -> None:
    dispatcher = auto((1, 2)).engine.dispatcher
    dispatcher.threshold = 16
    assert (dispatcher.decided_mode(15, False), dispatcher.decided_mode(16, False)) == (RESIDENT, STREAM)


def test_modes_that_a_layer_cannot_have_fall_back() -> None:
    bare, some = auto(), auto((1, 2))
    for place, forced, want in ((bare, RESIDENT, CPU), (some, RESIDENT, RESIDENT), (bare, STREAM_ALL, STREAM)):
        place.engine.dispatcher.forced = forced
        assert place.engine.dispatcher.mode(place.layer, batch(40), training=False) == want
    some.engine.dispatcher.forced = None
    some.engine.dispatcher.policy = RESIDENT
    assert some.engine.dispatcher.mode(some.layer, batch(4), training=False) == HOST_CALLBACK
    assert some.engine.dispatcher.mode(some.layer, batch(4), training=True) == RESIDENT


def test_streaming_without_ids_needs_a_captured_pass_that_used_nearly_all_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = place_store_on(STORE, "cpu", STREAM, 16)
    dispatcher, given = place.engine.dispatcher, batch(SMALL.tokens)
    monkeypatch.setattr(place.engine.executor, "replays", lambda *_: True)
    assert dispatcher.mode(place.layer, given, training=True) == STREAM, "the first of its size"
    place.engine.infer(place.layer, given)
    assert dispatcher.mode(place.layer, given, training=True) == STREAM_ALL
    for counts in place.layer.last_counts.values():
        counts[: SMALL.experts // 2] = 0
    assert dispatcher.mode(place.layer, given, training=True) == STREAM


def test_tuning_times_inseparable_modes_once_and_caches_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a device that calls itself a GPU; sweeps are not run here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[tuple[str, int]] = []

    def time_mode(engine: object, mode: str, tokens: int) -> float:
        calls.append((mode, tokens))
        return {CPU: 1.0, SPLIT: 3.0, STREAM: 2.0, HOST_CALLBACK: 4.0}[mode]

    monkeypatch.setattr(tuning, "time_mode", time_mode)
    monkeypatch.setattr(tuning, "cache_key", lambda *_: "machine")
    modes = []
    for _ in range(2):
        engine = auto().engine
        engine.device = torch.device("cuda")
        tuning.tune(engine, (4, 4))
        modes.append(engine.dispatcher.decision(4, False).mode)
    assert modes == [CPU, CPU] and sorted(calls) == [(CPU, 4), (HOST_CALLBACK, 4), (STREAM, 4)]


def test_a_timed_sweep_leaves_no_trace_in_the_routing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(tuning, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(tuning, "TIMED_SECONDS", 0.0)
    place = auto((1, 2))
    place.engine.dispatcher.top_k = 2
    for mode in (CPU, RESIDENT, STREAM, SPLIT):
        assert tuning.time_mode(place.engine, mode, 40) > 0
    assert not place.engine.counts(place.layer).any() and not place.layer.last_counts
    assert place.engine.dispatcher.forced is None
    given = make_inputs(SMALL, "cpu")
    out = place(given.hidden.detach(), given.ids, given.weights.detach(), None, NO_DROPOUT, False)
    assert torch.isfinite(out).all() and cpu_results(STORE, given)
