"""W8A8 where an expert has few rows, so that its codes are multiplied as they lie: int8 has the bits that it has among
many rows, int4 meets the scales of its groups themselves, and nothing depends on threads, groups or neighbours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ktransformers import _core
from tests.support.reference import forward

from .conftest import Batch, error, make_batch, make_layer, tolerance
from .rounded import FEW, ROUNDED, SPECS, Lora, Rounded, defined

ALL_SPECS = {"int8": "int8", **SPECS}


def part(batch: Batch, tokens: slice) -> Batch:
    return Batch(batch.hidden[tokens], batch.ids[tokens], batch.weights[tokens])


def of_one_expert(given: Rounded, tokens: int, expert: int = 1) -> Batch:
    batch = make_batch(given.layer, tokens, 1, here=True)
    batch.ids.fill_(expert)
    return batch


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_few_and_many_rows_in_one_batch(isa: str, spec: str, pool: _core.Pool) -> None:
    given = Rounded.of(make_layer(5, 328, 200, biases=spec == "96"), ALL_SPECS[spec])
    store = given.store(pool, isa)
    for tokens in (1, 2, 3, 5, 16):
        batch = make_batch(given.layer, tokens, 2)
        found = store.forward(batch.hidden, batch.ids, batch.weights, w8a8=True)
        assert error(found, defined(given, batch)) < ROUNDED


@pytest.mark.parametrize("type", ["", ":f16", ":f32"])
@pytest.mark.parametrize("group", [32, 64, 128, 0])
def test_int4_meets_its_scales(isa: str, group: int, type: str, pool: _core.Pool) -> None:
    """With an activation that needs no exp, nothing is between the integers and the definition but sums in f32."""
    layer = make_layer(3, 344, 70, gated=False, activation="relu2")
    given = Rounded.of(layer, f"int4:{group}{type}")
    store = given.store(pool, isa)
    for tokens in range(1, FEW + 1):
        batch = of_one_expert(given, tokens)
        found = store.forward(batch.hidden, batch.ids, batch.weights, w8a8=True)
        assert error(found, defined(given, batch)) < 1e-5


@pytest.mark.parametrize("hidden", [37, 200, 4500])
def test_int8_has_the_same_bits_among_many_rows(isa: str, hidden: int, pool: _core.Pool) -> None:
    """Odd sizes, with biases; and K beyond the chunk that many rows take at a time, with LoRA for some of them."""
    given = Rounded.of(make_layer(2, hidden, 40, biases=hidden < 1000))
    store, tokens = given.store(pool, isa), 24
    batch = make_batch(given.layer, tokens, 2, here=True)
    adapter = (torch.arange(tokens) % 3 - 1).int()
    adapters = [Lora.of(given.layer, rank, rank).adapter(store) for rank in (8, 20)] if hidden > 1000 else []

    def run(tokens: slice) -> Tensor:
        some = part(batch, tokens)
        own = {"adapter": adapter[tokens], "adapters": adapters} if adapters else {}
        return store.forward(some.hidden, some.ids, some.weights, w8a8=True, **own)  # type: ignore[arg-type]

    many = run(slice(0, tokens))
    for first, count in ((0, 1), (1, 2), (5, 2), (11, 1), (20, 2)):
        assert torch.equal(run(slice(first, first + count)), many[first : first + count])


@pytest.mark.parametrize("spec", ["int8", "int4:32", "mixed"])
def test_lora_is_not_rounded(isa: str, spec: str, pool: _core.Pool) -> None:
    given = Rounded.of(make_layer(2, 4160, 72), ALL_SPECS.get(spec, spec))
    store, batch = given.store(pool, isa), make_batch(given.layer, 4, 2, here=True)
    loras = [Lora.of(given.layer, 8, 1), Lora.of(given.layer, 20, 2)]
    adapter = torch.tensor([0, -1, 1, 0], dtype=torch.int32)
    own = [lora.adapter(store) for lora in loras]
    found = store.forward(batch.hidden, batch.ids, batch.weights, adapter=adapter, adapters=own, w8a8=True)
    assert error(found, defined(given, batch, loras, adapter)) < ROUNDED + tolerance(isa)
    assert error(found, defined(given, batch)) > 0.1, "LoRA does nothing here"


@pytest.mark.parametrize("spec", ["int8", "int4:64", "mixed"])
def test_nothing_depends_on_threads_groups_or_neighbours(
    isa: str, spec: str, pool_of: Callable[[int, int], _core.Pool]
) -> None:
    """As long as an expert has few rows with these neighbours, too."""
    given = Rounded.of(make_layer(6, 160, 200), ALL_SPECS.get(spec, spec))
    batch = make_batch(given.layer, 9, 2, here=True)
    batch.ids.copy_(torch.arange(18).view(9, 2) % 6)  # three rows each
    alone = given.store(pool_of(1, 1), isa).forward(batch.hidden, batch.ids, batch.weights, w8a8=True)
    for threads, groups in ((3, 1), (4, 2)):
        store = given.store(pool_of(threads, groups), isa)
        assert torch.equal(store.forward(batch.hidden, batch.ids, batch.weights, w8a8=True), alone)
        for few in (slice(0, 1), slice(4, 6), slice(2, 9)):
            some = part(batch, few)
            assert torch.equal(store.forward(some.hidden, some.ids, some.weights, w8a8=True), alone[few])
        call = store.prepare(batch.hidden, batch.ids, batch.weights, w8a8=True)
        for _ in range(2):
            call.submit()
            assert torch.equal(call.wait(), alone)


@pytest.mark.parametrize(("spec", "bound"), [("int8", 0.03), ("int4:32", 0.155), ("int4:128", 0.18)])
def test_how_far_it_is_from_the_numbers(spec: str, bound: float, pool: _core.Pool) -> None:
    """As far as many rows are: bytes of x add little to what the codes have lost."""
    layer = make_layer(16, 512, 256)
    given, batch = Rounded.of(layer, spec), make_batch(layer, 24, 2, here=True, seed=1)
    assert torch.bincount(batch.ids.flatten(), minlength=16).float().mean() < FEW
    store, want = given.store(pool), forward(layer, batch.hidden, batch.ids, batch.weights)
    exact = error(store.forward(batch.hidden, batch.ids, batch.weights), want)
    rounded = error(store.forward(batch.hidden, batch.ids, batch.weights, w8a8=True), want)
    assert exact < rounded < bound and rounded < exact + 0.015
