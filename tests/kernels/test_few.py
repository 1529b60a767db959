"""Inference multiplies codes as they lie, for few rows of an expert (on NEON without bf16 products, for any number):
weights are not rounded then, passes with needs_grad see them rounded, and nothing depends on threads, groups or
neighbours as long as an expert has few rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.experts.gate import ACTIVATIONS
from ktransformers.nn import ExpertStore
from tests.support.variants import ROUNDING

from .conftest import Batch, error, make_batch, make_layer, tolerance
from .rounded import SPECS, Lora, Rounded

ROWS = {"int4": 4, "fp8:128x128": 2}  # that are few on every variant
MORE_ROWS = {"neon": 1 << 20, "generic": 16, "avx2": 8, "avx_vnni": 16, "avx512": 8, "avx512_vnni": 16}  # but fp8
OPENED = ["int8", "int4:32", "int4:64:f16", "int4:128:f32", "int4:0", "mxfp4", "nvfp4", "fp8:128x128"]
# int16 activations are off by 2^-16 of the largest of 32. Where numbers between the products are rounded to bf16, one
# may round the other way where its sum is off. Weights in bf16 are off by 2^-9.
UNROUNDED, ROUNDED_BETWEEN, WEIGHTS = 1e-4, 1e-3, 2**-8


def limit(isa: str, few: bool = True) -> float:
    if not few:
        return tolerance(isa) + WEIGHTS
    return ROUNDED_BETWEEN if isa in ROUNDING else UNROUNDED


def exact(
    isa: str, given: Rounded, batch: Batch, loras: tuple[Lora, ...] = (), adapter: Tensor | None = None
) -> Tensor:
    """The layer of the numbers that codes stand for, in float64; where the variant rounds them, hidden states and what
    is between the products are what bf16 has of them."""

    def rounded(x: Tensor) -> Tensor:
        return (x.bfloat16() if isa in ROUNDING else x).double()

    layer, out = given.layer, torch.zeros(batch.hidden.shape, dtype=torch.float64)
    for index in range(layer.down.shape[0]):
        token, slot = torch.where(batch.ids == index)

        def multiply(
            name: str, x: Tensor, w: Tensor, bias: Tensor | None, index: int = index, token: Tensor = token
        ) -> Tensor:
            y = x @ w[index].double().T
            for place, lora in enumerate(loras):
                own = torch.ones(len(token), dtype=torch.bool) if adapter is None else adapter[token] == place
                y[own] += lora.add(name, index, x[own])
            return y if bias is None else y + bias[index].double()

        x = rounded(batch.hidden[token])
        up = multiply("up", x, layer.up, layer.up_bias)
        gate = None if layer.gate is None else multiply("gate", x, layer.gate, layer.gate_bias)
        inner = ACTIVATIONS[layer.activation](up if gate is None else gate) * (1 if gate is None else up)
        down = multiply("down", rounded(inner), layer.down, layer.down_bias)
        out.index_add_(0, token, down * batch.weights[token, slot, None].double())
    return out


def of_one_expert(given: Rounded, tokens: int) -> Batch:
    batch = make_batch(given.layer, tokens, 1, here=True)
    batch.ids.fill_(1)
    return batch


def run(store: ExpertStore, batch: Batch, tokens: slice = slice(None), needs_grad: bool = False) -> Tensor:
    return store.forward(batch.hidden[tokens], batch.ids[tokens], batch.weights[tokens], needs_grad=needs_grad)


@pytest.mark.parametrize("format", OPENED)
def test_weights_are_not_rounded(isa: str, format: str, pool: _core.Pool) -> None:
    given = Rounded.of(make_layer(2, 352, 96, biases=True), format)
    store = given.store(pool, isa)
    for tokens in range(1, 8):
        batch = of_one_expert(given, tokens)
        want, few = exact(isa, given, batch), tokens <= ROWS.get(format, ROWS["int4"])
        assert error(run(store, batch), want) < limit(isa, few)
        assert error(run(store, batch, needs_grad=True), want) < limit(isa, False)


@pytest.mark.parametrize("spec", SPECS)
def test_few_and_many_rows_in_one_batch(isa: str, spec: str, pool: _core.Pool) -> None:
    given = Rounded.of(make_layer(5, 328, 200, biases=spec == "96"), SPECS[spec])
    store = given.store(pool, isa)
    for tokens in (1, 2, 3, 5, 16):
        batch = make_batch(given.layer, tokens, 2)
        few = int(torch.bincount(batch.ids.flatten() + 1).max()) <= MORE_ROWS.get(isa, ROWS["int4"])
        assert error(run(store, batch), exact(isa, given, batch)) < limit(isa, few)


@pytest.mark.parametrize("format", ["int8", "int4:32", "nvfp4"])
def test_rows_that_fill_no_pass(isa: str, format: str, pool: _core.Pool) -> None:
    """Tiles have as many rows as divide a batch evenly, whatever the groups in which rows are multiplied."""
    given = Rounded.of(make_layer(2, 96, 64), format)
    store = given.store(pool, isa)
    for tokens in (22, 31, 46, 65, 70, 96, 131):
        batch = of_one_expert(given, tokens)
        few = tokens <= MORE_ROWS.get(isa, ROWS["int4"]) and format != "nvfp4"  # whose codes take long to unpack
        assert error(run(store, batch), exact(isa, given, batch)) < limit(isa, few)


@pytest.mark.parametrize(("hidden", "intermediate"), [(37, 40), (4160, 72), (64, 5200)])
def test_odd_and_long_sizes(isa: str, hidden: int, intermediate: int, pool: _core.Pool) -> None:
    """Columns that fill no tile or no group, and K beyond the chunks that down is taken in."""
    layer = make_layer(2, hidden, intermediate, gated=False, activation="relu2")
    given = Rounded.of(layer, {"up": "int8", "down": "int4:128" if intermediate % 2 == 0 else "int8"})
    store, batch = given.store(pool, isa), of_one_expert(given, 3)
    assert error(run(store, batch), exact(isa, given, batch)) < limit(isa)


@pytest.mark.parametrize("spec", ["int8", "int4:32", "mixed"])
def test_lora_joins(isa: str, spec: str, pool: _core.Pool) -> None:
    given = Rounded.of(make_layer(2, 416, 72), SPECS.get(spec, spec))
    store, batch = given.store(pool, isa), make_batch(given.layer, 4, 2, here=True)
    batch.ids.copy_(torch.arange(2).expand(4, 2))
    loras = (Lora.of(given.layer, 8, 1), Lora.of(given.layer, 20, 2))
    adapter = torch.tensor([0, -1, 1, 0], dtype=torch.int32)
    own = [lora.adapter(store) for lora in loras]
    found = store.forward(batch.hidden, batch.ids, batch.weights, adapter=adapter, adapters=own)
    assert error(found, exact(isa, given, batch, loras, adapter)) < limit(isa, False)
    assert error(found, exact(isa, given, batch)) > 0.1, "LoRA does nothing here"
    assert torch.equal(found[1], run(store, batch)[1]), "a row without one"


@pytest.mark.parametrize("spec", ["int8", "int4:64", "mixed"])
def test_nothing_depends_on_threads_groups_or_neighbours(
    isa: str, spec: str, pool_of: Callable[[int, int], _core.Pool]
) -> None:
    given = Rounded.of(make_layer(6, 160, 200), SPECS.get(spec, spec))
    batch = make_batch(given.layer, 9, 2, here=True)
    batch.ids.copy_(torch.arange(18).view(9, 2) % 6)  # three rows each
    alone = run(given.store(pool_of(1, 1), isa), batch)
    for threads, groups in ((3, 1), (4, 2)):
        store = given.store(pool_of(threads, groups), isa)
        assert torch.equal(run(store, batch), alone)
        for few in (slice(0, 1), slice(4, 6), slice(2, 9)):
            assert torch.equal(run(store, batch, few), alone[few])
        call = store.prepare(batch.hidden, batch.ids, batch.weights)
        for _ in range(2):
            call.submit()
            assert torch.equal(call.wait(), alone)


@pytest.mark.parametrize("format", ["int8", "int4:32"])
def test_whoever_learns_sees_rounded_weights(isa: str, format: str, pool: _core.Pool) -> None:
    """Among any neighbours, with what is kept or without."""
    given = Rounded.of(make_layer(2, 160, 96), format)
    store, batch = given.store(pool, isa), of_one_expert(given, 40)
    many, one = run(store, batch, needs_grad=True), slice(7, 8)
    assert torch.equal(run(store, batch, one, needs_grad=True), many[one])
    keep = store.new_keep(1, 1)
    kept = store.forward(batch.hidden[one], batch.ids[one], batch.weights[one], keep=keep)
    assert torch.equal(kept, many[one])
    assert not torch.equal(run(store, batch, one), many[one])
