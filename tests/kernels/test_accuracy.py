"""Every variant against float64: shapes, activations, dtypes, biases, and the paths that only large sizes take."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from ktransformers import _core
from tests.support import reference

from .conftest import DTYPES, error, make_batch, make_layer, make_store, tolerance

ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu2"]


def check(isa: str, pool: _core.Pool, layer: reference.ReferenceLayer, tokens: int, top_k: int) -> None:
    store, batch = make_store(layer, pool, isa), make_batch(layer, tokens, top_k)
    got = store.forward(batch.hidden, batch.ids, batch.weights)
    want = reference.forward(layer, batch.hidden, batch.ids, batch.weights)
    assert store.isa == isa
    assert error(got, want) < tolerance(isa)


@pytest.mark.parametrize("hidden", [1, 16, 33, 64, 130])
@pytest.mark.parametrize("intermediate", [1, 31, 32, 100])
def test_shapes(isa: str, pool: _core.Pool, hidden: int, intermediate: int) -> None:
    # Few numbers may be all that is left of sums that cancel, and their error says nothing: at least 16 of them.
    for tokens, top_k in ((1, 1), (4, 2), (23, 3)):
        tokens = max(tokens, -(-16 // hidden))
        check(isa, pool, make_layer(5, hidden, intermediate), tokens, top_k)


@pytest.mark.parametrize("tokens", [1, 2, 11, 12, 13, 16, 17, 31, 33, 50])
def test_tokens_around_the_tile_heights(isa: str, pool: _core.Pool, tokens: int) -> None:
    check(isa, pool, make_layer(1, 48, 40), tokens, 1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biases", [True, False])
def test_activations(isa: str, pool: _core.Pool, activation: str, gated: bool, biases: bool) -> None:
    check(isa, pool, make_layer(4, 70, 50, gated=gated, biases=biases, activation=activation), 20, 2)


@pytest.mark.parametrize(
    ("activation", "limit", "alpha"),
    [("silu", 0.5, 0.0), ("gelu", 0.7, 0.0), ("swiglu_oai", 0.0, 1.702), ("swiglu_oai", 0.6, 1.702)],
)
@pytest.mark.parametrize("biases", [True, False])
def test_clamped_swiglu(isa: str, pool: _core.Pool, activation: str, limit: float, alpha: float, biases: bool) -> None:
    check(isa, pool, make_layer(4, 70, 50, activation=activation, limit=limit, alpha=alpha, biases=biases), 20, 2)


def test_dtypes(isa: str, pool: _core.Pool) -> None:
    layer = make_layer(4, 70, 50)
    store = make_store(layer, pool, isa)
    for hidden, weights, out, ids in product(DTYPES, DTYPES, DTYPES, (torch.int32, torch.int64)):
        batch = make_batch(layer, 9, 2, fine=True)
        x, w, i = batch.hidden.to(hidden), batch.weights.to(weights), batch.ids.to(ids)
        got = store.forward(x, i, w, out=torch.empty(9, 70, dtype=out))
        assert got.dtype == out
        fine = hidden != torch.bfloat16
        assert error(got, reference.forward(layer, x, i, w)) < tolerance(isa, out, fine=fine)


def test_large_hidden_in_chunks(isa: str, pool: _core.Pool) -> None:
    """Above 2560 the product over hidden is cut, for experts with more rows than fit."""
    for hidden in (2600, 5200):
        layer = make_layer(1, hidden, 5, biases=True)
        for tokens in (1, 140):
            check(isa, pool, layer, tokens, 1)


def test_large_intermediate_in_chunks(isa: str, pool: _core.Pool) -> None:
    """Above 4096 the product over intermediate is summed in parts, whose bias and first and last rows must be right."""
    for intermediate in (4200, 9000):
        check(isa, pool, make_layer(2, 9, intermediate, biases=True), 7, 3)


@pytest.mark.parametrize("tokens", [129, 420])
def test_many_rows_per_expert(isa: str, pool: _core.Pool, tokens: int) -> None:
    check(isa, pool, make_layer(2, 40, 33, biases=True), tokens, 2)


def test_large_and_small_values(isa: str, pool: _core.Pool) -> None:
    """Activations stay exact where exp saturates, and an output past float16's range is infinite as in torch."""
    layer = make_layer(2, 32, 32)
    store = make_store(layer, pool, isa)
    batch = make_batch(layer, 6, 2, here=True)
    for scale in (2**-10, 2**10, 2**14):
        hidden = batch.hidden * scale
        got = store.forward(hidden, batch.ids, batch.weights)
        assert error(got, reference.forward(layer, hidden, batch.ids, batch.weights)) < tolerance(isa)
    hidden = batch.hidden * 1e4
    half = store.forward(hidden, batch.ids, batch.weights, out=torch.empty_like(hidden, dtype=torch.float16))
    assert torch.equal(half, store.forward(hidden, batch.ids, batch.weights).half())
    assert torch.isinf(half).any()


@pytest.mark.parametrize(
    ("activation", "limit", "alpha"),
    [("silu", 0.0, 0.0), ("relu2", 0.0, 0.0), ("gelu", 0.5, 0.0), ("swiglu_oai", 7.0, 1.7)],
)
def test_not_a_number_is_kept_in_its_token(
    isa: str, pool: _core.Pool, activation: str, limit: float, alpha: float
) -> None:
    layer = make_layer(2, 40, 40, activation=activation, limit=limit, alpha=alpha)
    store, batch = make_store(layer, pool, isa), make_batch(layer, 20, 2, here=True)
    clean = store.forward(batch.hidden, batch.ids, batch.weights)
    batch.hidden[7, 3] = float("nan")
    spoilt = store.forward(batch.hidden, batch.ids, batch.weights)
    assert spoilt[7].isnan().all()
    others = torch.arange(20) != 7
    assert torch.equal(spoilt[others], clean[others])


def test_rounding_of_outputs_is_torchs(isa: str, pool: _core.Pool) -> None:
    layer = make_layer(3, 40, 40)
    store, batch = make_store(layer, pool, isa), make_batch(layer, 30, 2)
    exact = store.forward(batch.hidden, batch.ids, batch.weights)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = store.forward(batch.hidden, batch.ids, batch.weights, out=torch.empty(30, 40, dtype=dtype))
        assert torch.equal(rounded, exact.to(dtype))
