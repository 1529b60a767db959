"""The exact kinds: weights, activations and sums in f32 or f64, nothing rounded on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ktransformers import _core
from ktransformers.nn import ExpertStore
from tests.support import reference

from .conftest import error, make_batch, make_layer, make_store

DTYPE = {"f32": torch.float32, "f64": torch.float64}
# Only sums are rounded, about 2^-24 (2^-53) * sqrt(K) with K up to 4200, where few of them are left to average out; in
# f32 gelu's erf adds 1.5e-7.
TOLERANCE = {"f32": 2**-24 * 65, "f64": 2**-53 * 65}
FORMS = [
    {"activation": "silu", "biases": True},
    {"activation": "gelu"},
    {"activation": "gelu_tanh", "gated": False},
    {"activation": "relu2", "gated": False, "biases": True},
    {"activation": "swiglu_oai", "limit": 0.6, "alpha": 1.702, "biases": True},
]


def check(exact: tuple[str, str], pool: _core.Pool, layer: reference.ReferenceLayer, tokens: int, top_k: int) -> None:
    isa, precision = exact
    layer = replace(layer, packed=DTYPE[precision])
    batch = make_batch(layer, tokens, top_k, fine=True)
    store = make_store(layer, pool, isa, precision)
    assert (store.isa, store.precision) == exact
    got = store.forward(batch.hidden.to(layer.packed), batch.ids, batch.weights)
    assert got.dtype == layer.packed
    assert error(got, reference.forward(layer, batch.hidden, batch.ids, batch.weights)) < TOLERANCE[precision]
    rounded = reference.forward(replace(layer, packed=torch.bfloat16), batch.hidden, batch.ids, batch.weights)
    assert error(got, rounded) > 1e-4, "numbers that bf16 holds show nothing"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["activation"])
def test_activations(exact: tuple[str, str], pool: _core.Pool, form: dict[str, object]) -> None:
    check(exact, pool, make_layer(4, 70, 50, dtype=DTYPE[exact[1]], **form), 20, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(("hidden", "intermediate"), [(16, 31), (33, 32), (130, 100), (2600, 5), (9, 4200)])
def test_shapes(exact: tuple[str, str], pool: _core.Pool, hidden: int, intermediate: int) -> None:
    for tokens in (3, 23, 140):
        check(exact, pool, make_layer(2, hidden, intermediate, dtype=DTYPE[exact[1]]), tokens, 1)


def test_sources_of_every_dtype_pack_to_what_they_are(exact: tuple[str, str], pool: _core.Pool) -> None:
    layer = make_layer(3, 40, 33, dtype=torch.float16)
    batch = make_batch(layer, 9, 2, fine=True)
    results = []
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert layer.gate is not None
        same = replace(layer, gate=layer.gate.to(dtype), up=layer.up.to(dtype), down=layer.down.to(dtype))
        results.append(make_store(same, pool, *exact).forward(batch.hidden, batch.ids, batch.weights))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_large_values_do_not_saturate_early(pool: _core.Pool) -> None:
    """exp of a double goes on where that of a float ends."""
    layer = replace(make_layer(2, 32, 32, dtype=torch.float64), packed=torch.float64)
    store, batch = make_store(layer, pool, "generic", "f64"), make_batch(layer, 6, 2, here=True)
    for scale in (-300.0, 300.0, 2.0**14):
        hidden = batch.hidden.double() * scale
        want = reference.forward(layer, hidden, batch.ids, batch.weights)
        assert error(store.forward(hidden, batch.ids, batch.weights), want) < TOLERANCE["f64"]


def test_bytes(pool: _core.Pool) -> None:
    """Tiles of 1, 2 and 4 KB, and biases in the type of the sums."""
    sizes = [
        make_store(make_layer(2, 40, 33), pool, "generic", precision).packed_bytes
        for precision in ("bf16", "f32", "f64")
    ]
    assert sizes[1] == 2 * sizes[0] and sizes[2] == 4 * sizes[0]


def test_refusals() -> None:
    with pytest.raises(ValueError, match='precision: given "f16", expected one of bf16, f32, f64'):
        ExpertStore(1, 8, 8, precision="f16")
    for variant in _core.variants():
        if not (variant["native"] or variant["emulated"]) or "f64" in variant["precisions"]:
            continue
        text = f'isa: CPU variant "{variant["name"]}" has no kernels of precision f64; these have: generic'
        with pytest.raises(ValueError, match=text):
            ExpertStore(1, 8, 8, isa=variant["name"], precision="f64")
