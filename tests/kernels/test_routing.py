"""Whatever a router may say: hypothesis draws the routing, float64 says what comes out of it."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ktransformers import _core
from ktransformers.nn import ExpertStore
from tests.support import reference

from .conftest import error, make_batch, make_layer, make_store, tolerance

EXPERTS, HIDDEN, INTERMEDIATE = 5, 37, 21
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@functools.cache
def prepared(isa: str, threads: int) -> tuple[ExpertStore, reference.ReferenceLayer]:
    layer = make_layer(EXPERTS, HIDDEN, INTERMEDIATE, biases=True)
    return make_store(layer, _core.Pool(threads), isa), layer


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[list[int]], list[bool]]:
    tokens, top_k = draw(st.integers(0, 40)), draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["any", "one", "nowhere", "twice"]))
    anywhere = st.integers(-2, EXPERTS + 1)
    if kind == "any":
        ids = draw(st.lists(st.lists(anywhere, min_size=top_k, max_size=top_k), min_size=tokens, max_size=tokens))
    elif kind == "twice":
        each = draw(st.lists(anywhere, min_size=tokens, max_size=tokens))
        ids = [[e] * top_k for e in each]
    else:
        ids = [[draw(anywhere) if kind == "one" else -1] * top_k] * tokens
    skip = draw(st.lists(st.booleans(), min_size=EXPERTS, max_size=EXPERTS))
    return ids, skip


@pytest.mark.parametrize("threads", [1, 9])  # nine: more than there is work for
@SETTINGS
@given(routing=routings(), seed=st.integers(0, 100))
@example(routing=([], [False] * EXPERTS), seed=0)
@example(routing=([[-1]], [False] * EXPERTS), seed=0)
@example(routing=([[0, 0, 0, 0]], [False] * EXPERTS), seed=0)
@example(routing=([[4]] * 40, [True] * EXPERTS), seed=0)
def test_any_routing(isa: str, threads: int, routing: tuple[list[list[int]], list[bool]], seed: int) -> None:
    store, layer = prepared(isa, threads)
    listed, masked = routing
    top_k = len(listed[0]) if listed else 1
    ids = torch.tensor(listed, dtype=torch.int64).reshape(-1, top_k)
    skip = torch.tensor(masked)
    batch = make_batch(layer, len(listed), top_k, seed=seed)
    out = torch.full((len(listed), HIDDEN), float("nan"))
    got = store.forward(batch.hidden, ids, batch.weights, skip=skip, out=out)
    want = reference.forward(layer, batch.hidden, ids, batch.weights, skip)
    assert error(got, want) < tolerance(isa)
    idle = ((ids < 0) | (ids >= EXPERTS) | skip[ids.clamp(0, EXPERTS - 1)]).all(1)
    assert (got[idle] == 0).all()


def test_huge_ids_are_not_here(isa: str) -> None:
    store, _ = prepared(isa, 1)
    for ids in (torch.tensor([[2**62, -(2**63)]]), torch.tensor([[2**31 - 1, -(2**31)]], dtype=torch.int32)):
        assert (store.forward(torch.ones(1, HIDDEN), ids, torch.ones(1, 2)) == 0).all()


def test_zero_weight_and_negative_weight(isa: str) -> None:
    store, layer = prepared(isa, 1)
    batch = make_batch(layer, 10, 2, here=True)
    assert (store.forward(batch.hidden, batch.ids, torch.zeros(10, 2)) == 0).all()
    minus = store.forward(batch.hidden, batch.ids, -batch.weights)
    assert torch.equal(minus, -store.forward(batch.hidden, batch.ids, batch.weights))


def test_skip_as_bytes(isa: str) -> None:
    store, layer = prepared(isa, 1)
    batch = make_batch(layer, 10, 2)
    x = (batch.hidden, batch.ids, batch.weights)
    mask = torch.tensor([0, 1, 0, 7, 0], dtype=torch.uint8)
    assert torch.equal(store.forward(*x, skip=mask), store.forward(*x, skip=mask.bool()))


def test_two_halves_of_the_experts_make_the_whole(isa: str) -> None:
    """What a placement does: some experts here, the others elsewhere."""
    store, layer = prepared(isa, 1)
    batch = make_batch(layer, 20, 3)
    x = (batch.hidden, batch.ids, batch.weights)
    mask = torch.tensor([True, False, True, False, False])
    parts = store.forward(*x, skip=mask).double() + store.forward(*x, skip=~mask)
    assert error(parts, store.forward(*x).double()) < 1e-6


def test_no_adapter_for_anybody(isa: str) -> None:
    store, layer = prepared(isa, 1)
    batch = make_batch(layer, 20, 3)
    x = (batch.hidden, batch.ids, batch.weights)
    assert torch.equal(store.forward(*x, adapter=torch.full((20,), -1, dtype=torch.int32)), store.forward(*x))
