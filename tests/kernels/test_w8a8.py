"""Experts in int8 and int4 with 8-bit activations: the result is that of the definition on every variant, LoRA stays
exact, what cannot have it is refused, and nothing depends on threads, groups or neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ktransformers import _core
from ktransformers.experts.backend import LocalExperts
from ktransformers.experts.lora import ExpertLora, LoraPair
from ktransformers.experts.operator import apply_experts
from ktransformers.experts.store import Dropout
from ktransformers.ground.errors import InputError
from ktransformers.nn import ExpertStore
from tests.support.reference import forward

from .conftest import error, make_batch, make_layer, tolerance
from .rounded import ROUNDED, SPECS, Lora, Rounded, defined

CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "plain": (3, 192, 128, {}),
    "odd": (4, 200, 72, {"biases": True}),
    "no gate": (2, 37, 100, {"gated": False, "activation": "relu2", "biases": True}),
    "oai": (3, 96, 33, {"activation": "swiglu_oai", "alpha": 1.702, "limit": 2.0}),
    "gelu": (2, 65, 64, {"activation": "gelu_tanh"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_result_is_that_of_the_definition(isa: str, case: str, pool: _core.Pool) -> None:
    experts, hidden, intermediate, options = CASES[case]
    given = Rounded.of(make_layer(experts, hidden, intermediate, **options))
    batch = make_batch(given.layer, 75, 2, fine=case != "plain")
    found = given.store(pool, isa).forward(batch.hidden, batch.ids, batch.weights, w8a8=True)
    assert error(found, defined(given, batch)) < ROUNDED


@pytest.mark.parametrize("spec", SPECS)
def test_int4_is_brought_to_bytes_first(isa: str, spec: str, pool: _core.Pool) -> None:
    given = Rounded.of(make_layer(2, 328, 200, biases=spec == "96"), SPECS[spec])
    batch = make_batch(given.layer, 75, 2)
    found = given.store(pool, isa).forward(batch.hidden, batch.ids, batch.weights, w8a8=True)
    assert error(found, defined(given, batch)) < ROUNDED


def test_scales_of_int4_far_apart(isa: str, pool: _core.Pool) -> None:
    """Groups of zeros, of negative zeros and of the smallest numbers beside large ones, and a whole output of zeros."""
    given = Rounded.of(make_layer(2, 256, 128), "int4:32")
    for matrix in given.matrices.values():
        assert matrix.scales is not None
        groups = torch.arange(matrix.scales.numel()).view(matrix.scales.shape) % 7
        matrix.scales.copy_(matrix.scales * 2.0 ** -(groups * groups).float())
        matrix.scales[groups == 3], matrix.scales[groups == 5] = 0.0, -0.0
        matrix.scales[:, 9] = 0
    batch = make_batch(given.layer, 70, 2)
    found = given.store(pool, isa).forward(batch.hidden, batch.ids, batch.weights, w8a8=True)
    assert error(found, defined(given, batch)) < ROUNDED
    assert not found[:, 9].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_hidden_states_of_any_dtype(isa: str, dtype: torch.dtype, pool: _core.Pool) -> None:
    given = Rounded.of(make_layer(2, 130, 64))
    batch = make_batch(given.layer, 64, 2)
    batch = replace(batch, hidden=batch.hidden.to(dtype))
    out = torch.empty(batch.hidden.shape)
    given.store(pool, isa).forward(batch.hidden, batch.ids, batch.weights, out=out, w8a8=True)
    assert error(out, defined(given, batch)) < ROUNDED


def test_lora_is_not_rounded(isa: str, pool: _core.Pool) -> None:
    """Rows of two adapters and of none in one batch; bf16 variants round what they always round, and no more."""
    given = Rounded.of(make_layer(2, 136, 72))
    store, batch = given.store(pool, isa), make_batch(given.layer, 90, 2)
    loras = [Lora.of(given.layer, 8, 1), Lora.of(given.layer, 20, 2)]
    adapter = (torch.arange(90) % 3 - 1).int()
    found = store.forward(
        batch.hidden,
        batch.ids,
        batch.weights,
        adapter=adapter,
        adapters=[lora.adapter(store) for lora in loras],
        w8a8=True,
    )
    want = defined(given, batch, loras, adapter)
    assert error(found, want) < ROUNDED + tolerance(isa)
    assert error(found, defined(given, batch)) > 0.1, "LoRA does nothing here"


@pytest.mark.parametrize("spec", ["int8", "int4:64"])
def test_nothing_depends_on_threads_groups_or_neighbours(
    isa: str, spec: str, pool_of: Callable[[int, int], _core.Pool]
) -> None:
    given = Rounded.of(make_layer(3, 160, 200), spec)
    batch = make_batch(given.layer, 150, 2)
    alone = given.store(pool_of(1, 1), isa).forward(batch.hidden, batch.ids, batch.weights, w8a8=True)
    for threads, groups in ((3, 1), (4, 2)):
        store = given.store(pool_of(threads, groups), isa)
        assert torch.equal(store.forward(batch.hidden, batch.ids, batch.weights, w8a8=True), alone)
        few = slice(20, 20 + 64)
        some = store.forward(batch.hidden[few], batch.ids[few], batch.weights[few], w8a8=True)
        assert torch.equal(some, alone[few])
        call = store.prepare(batch.hidden, batch.ids, batch.weights, w8a8=True)
        call.submit()
        assert torch.equal(call.wait(), alone)


def test_it_is_asked_for_by_call_or_by_layer(isa: str, pool: _core.Pool) -> None:
    given = Rounded.of(make_layer(2, 96, 64))
    store, batch = given.store(pool, isa), make_batch(given.layer, 70, 2, here=True)
    for tokens in (1, 70):
        whole = (batch.hidden[:tokens], batch.ids[:tokens], batch.weights[:tokens])
        store.w8a8 = False
        assert not torch.equal(store.forward(*whole, w8a8=True), store.forward(*whole))
        store.w8a8 = True
        assert torch.equal(store.forward(*whole), store.forward(*whole, w8a8=True))
        assert torch.equal(store.forward(*whole, w8a8=False), given.store(pool, isa).forward(*whole))


def test_how_far_it_is_from_the_numbers(pool: _core.Pool) -> None:
    """Rows of x have little beyond three deviations; activated rows have, the longer the more."""
    layer = make_layer(2, 512, 256)
    given, batch = Rounded.of(layer), make_batch(layer, 128, 2, here=True, seed=1)  # another: rows of x are not weights
    store, want = given.store(pool), forward(layer, batch.hidden, batch.ids, batch.weights)
    exact = error(store.forward(batch.hidden, batch.ids, batch.weights), want)
    rounded = error(store.forward(batch.hidden, batch.ids, batch.weights, w8a8=True), want)
    assert exact < 0.016 and 0.018 < rounded < 0.027


@pytest.mark.parametrize("group", [32, 128])
def test_how_far_int4_is_from_the_numbers(group: int, pool: _core.Pool) -> None:
    """Bytes add little to what 4 bits have lost."""
    layer = make_layer(2, 512, 256)
    given, batch = Rounded.of(layer, f"int4:{group}"), make_batch(layer, 128, 2, here=True, seed=1)
    store, want = given.store(pool), forward(layer, batch.hidden, batch.ids, batch.weights)
    exact = error(store.forward(batch.hidden, batch.ids, batch.weights), want)
    rounded = error(store.forward(batch.hidden, batch.ids, batch.weights, w8a8=True), want)
    assert exact < rounded < exact + 0.005
    assert rounded < {32: 0.155, 128: 0.18}[group]


def test_other_experts_are_refused(pool: _core.Pool) -> None:
    given = Rounded.of(make_layer(2, 64, 64))
    exact, plain = given.store(pool, precision="f32"), ExpertStore(2, 64, 64, pool=pool)
    mixed = ExpertStore(2, 64, 64, pool=pool, formats={"gate": "int8", "up": "int4:32", "down": "mxfp8"})
    for store, why in ((exact, "f32"), (plain, "bf16.*integer formats"), (mixed, "int4:32, int8, mxfp8")):
        with pytest.raises(InputError, match=f"w8a8.*{why}"):
            store.w8a8 = True
        assert not store.w8a8
        rows, routes = torch.zeros(70, 64), torch.zeros(70, 1)
        with pytest.raises(InputError, match="w8a8"):
            store.forward(rows, routes.long(), routes, w8a8=True)


def test_gradients_are_refused(pool: _core.Pool) -> None:
    given = Rounded.of(make_layer(2, 64, 64))
    store, batch = given.store(pool), make_batch(given.layer, 70, 2)
    whole = (batch.hidden, batch.ids, batch.weights)
    with pytest.raises(InputError, match="gradients"):
        store.forward(*whole, keep=store.new_keep(70, 2), w8a8=True)
    with pytest.raises(InputError, match="gradients"):
        store.forward(*whole, dropout=Dropout(0.1), w8a8=True)
    store.w8a8 = True
    with pytest.raises(InputError, match="gradients"):
        store.backward(batch.hidden, *whole)
    with pytest.raises(InputError, match="gradients"):
        apply_experts(LocalExperts(store), batch.hidden.requires_grad_(), batch.ids, batch.weights)
    factor = torch.zeros(2, 8, 64, requires_grad=True)
    lora = ExpertLora(down=LoraPair(factor, torch.zeros(2, 64, 8), 1.0))
    with pytest.raises(InputError, match="gradients"):
        apply_experts(LocalExperts(store), batch.hidden.detach(), batch.ids, batch.weights, lora=lora)
    with torch.no_grad():
        apply_experts(LocalExperts(store), *whole, lora=lora)
