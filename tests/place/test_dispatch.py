"""Modes of an engine: decided once, by size and kind of pass, the same for every layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ktransformers.experts.backend import ExpertBatch
from ktransformers.experts.store import NO_DROPOUT
from ktransformers.place.placed_experts import PlacedExperts
from ktransformers.plan.modes import CPU, HOST_CALLBACK, MODES, RESIDENT, SPLIT, STREAM, STREAM_ALL
from tests.support.placed_experts import SMALL, make_inputs, make_store, place_store_on

STORE = make_store(SMALL)


def auto(residents: tuple[int, ...] = ()) -> PlacedExperts:
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
