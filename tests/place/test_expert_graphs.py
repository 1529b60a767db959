"""Passes that are replayed give what passes give that are asked for kernel by kernel, whatever the routing is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ktransformers.nn.gate import Gate
from ktransformers.nn.lora_factors import factors_of
from ktransformers.nn.store import NO_DROPOUT, Dropout
from ktransformers.place.autograd import PlacedStore
from ktransformers.place.gpu import executor, expert_graphs, grouped_mlp
from ktransformers.place.gpu.device_lora import DeviceFactors, FactorGradients, empty_like_factors
from ktransformers.place.gpu.executor import ExpertBatch, GpuExecutor, LayerOnDevice
from ktransformers.place.gpu.expert_cache import ExpertCache, LayerBytes
from ktransformers.place.gpu.expert_graphs import (
    ExpertGraph,
    ExpertGraphs,
    GraphInputs,
    SlotRefs,
    StaticBuffers,
    numbers_of,
    size_of,
)
from ktransformers.place.gpu.grouped_mlp import Decoded, GroupedRows, GroupLora, StackedLora
from ktransformers.place.gpu.layout import geometry
from ktransformers.place.placement import geometry_of, new_layer
from tests.place.test_gpu_engine import SMALL, Inputs, Size, compare, expected, inputs, make_store, placed, run

LARGER = Size(32, 512, 256, 4, 300, 8)
NO_GRAPHS: Any = (None, None)


def a_room(count: int, first: int, down: int) -> Any:
    return SimpleNamespace(
        first=torch.empty(count, first, dtype=torch.uint8), down=torch.empty(count, down, dtype=torch.uint8)
    )


def test_numbers() -> None:
    room, residents = a_room(8, 192, 64), a_room(3, 192, 64)
    seats = [SlotRefs(residents, [2], [1]), SlotRefs(room, [0, 4], [1, 7])]
    found = numbers_of(5, seats, room)
    place, first, down = found[:6], found[6:11], found[11:]
    assert place.tolist() == [0, 5, 2, 5, 4, 5]  # two that others compute, and ids that are none
    for name, size, distances in (("first", 192, first), ("down", 64, down)):
        apart = getattr(residents, name).data_ptr() - getattr(room, name).data_ptr()
        assert distances.tolist() == [size, -1, apart + size, -1, 7 * size]


def test_sizes() -> None:
    assert [size_of(tokens) for tokens in (1, 64, 65, 1000, 1025, 2049, 4000)] == [64, 64, 128, 1024, 1152, 2304, 4096]
    for tokens in range(1, 5000, 7):
        assert 0 <= size_of(tokens) - tokens < max(64, tokens / 8 + 1)


def test_what_is_recorded() -> None:
    """In the third pass over the layers; never more kinds than there is room for."""
    recorder = ExpertGraphs(torch.device("cpu"))
    for turn in range(3):
        found = {recorder.wants(("a",), layer) for layer in (4, 5, 6)}
        assert found == {turn == 2}
    recorder._known = {(number,): None for number in range(expert_graphs.MOST)}  # type: ignore[misc]
    assert not recorder.wants(("a",), 4) and recorder.wants((0,), 4)


@pytest.mark.parametrize("learns", [None, False, True])
def test_rows_that_are_nobodys_count_nowhere(learns: bool | None) -> None:
    """Three of eight experts, 41 tokens in a place for 64, buffers full of NaN: as if these experts' rows were all."""
    given = inputs(SMALL, "cpu")
    wanted, size, gate = [1, 2, 6], SMALL, Gate("silu")
    generator = torch.Generator().manual_seed(3)
    decoded = Decoded(
        torch.randn(size.experts, 2 * size.intermediate, size.hidden, generator=generator).bfloat16() / 12,
        torch.randn(size.experts, size.hidden, size.intermediate, generator=generator).bfloat16() / 8,
    )
    factors = factors_of(given.lora)
    assert factors is not None
    pairs = DeviceFactors(torch.device("cpu")).of(factors, 2 * size.intermediate)
    ids, hidden, weights = given.ids, given.hidden.detach(), given.weights.detach()
    counts = np.bincount(ids[ids >= 0].numpy(), minlength=size.experts)
    # As groups have it.
    keys = torch.where((ids == 1) | (ids == 2) | (ids == 6), ids, 99).view(-1)
    rows_at = torch.sort(keys, stable=True).indices[: int(counts[wanted].sum())]
    ends = torch.tensor(np.cumsum(counts[wanted]), dtype=torch.int32)
    rows = GroupedRows(rows_at // size.top_k, weights.view(-1)[rows_at], ends)
    few = Decoded(decoded.first[wanted], decoded.down[wanted])
    lora = GroupLora(ends, *(StackedLora(pairs[n].a[wanted], pairs[n].b[wanted]) for n in ("first", "down")))
    want = torch.zeros(size.tokens, size.hidden)

    room = 64
    desk = StaticBuffers(
        *(torch.full((room, size.hidden), torch.nan, dtype=torch.bfloat16) for _ in range(2)),
        torch.full((room, size.top_k), -1),
        torch.full((room, size.top_k), torch.nan),
        torch.full((room, size.hidden), torch.nan),
        torch.full((room, size.top_k), torch.nan),
    )
    for target, source in ((desk.hidden, hidden), (desk.rising, given.grad), (desk.ids, ids), (desk.weights, weights)):
        target[: size.tokens] = source
    sizes = geometry(size.experts, size.hidden, size.intermediate, True, dict.fromkeys(("gate", "up", "down"), "bf16"))
    nothing = torch.empty(0)
    layer = LayerOnDevice(0, sizes, gate, LayerBytes(nothing, nothing), (None, None))
    slots = a_room(3, 64, 64)
    work = GraphInputs(
        layer, ExpertBatch(hidden, ids, weights, factors, NO_DROPOUT), slots, [], decoded, np.empty(0, np.int64), pairs
    )
    laid = empty_like_factors(factors if learns else None, torch.device("cpu"))
    numbers = torch.from_numpy(numbers_of(size.experts, [SlotRefs(slots, wanted, [0, 1, 2])], slots))
    expert_graphs._pass(ExpertGraph(*NO_GRAPHS, desk, numbers, dict(pairs), laid), work, room, learns)()

    if learns is None:
        grouped_mlp.forward(hidden, rows, few, gate, want, lora)
        torch.testing.assert_close(desk.out[: size.tokens], want)
        return
    grad_rows, grads = grouped_mlp.backward(given.grad, hidden, rows, few, gate, want, lora, None, learns)
    torch.testing.assert_close(desk.out[: size.tokens], want)
    expected_weights = torch.zeros(ids.numel()).index_copy_(0, rows_at, grad_rows)
    torch.testing.assert_close(desk.grad_weights[: size.tokens].view(-1), expected_weights)
    gradients = FactorGradients(factors)
    gradients.add(grads)
    for got, whole in zip(laid, gradients.lay(torch.tensor(wanted)), strict=True):
        torch.testing.assert_close(got, whole)
        assert got.stride() == whole.stride()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything is recorded at its first call; what was replayed."""
    replayed: list[str] = []
    monkeypatch.setattr(expert_graphs, "SEEN", 0)
    for name in ("forward", "backward"):
        inner = getattr(expert_graphs.ExpertGraphs, name)

        def noted(self: expert_graphs.ExpertGraphs, *args: object, inner: object = inner, name: str = name) -> object:
            replayed.append(name)
            return inner(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(expert_graphs.ExpertGraphs, name, noted)
    return replayed


def other_routing(given: Inputs, size: Size, seed: int, least: int = 0) -> Inputs:
    """`least`: experts below are asked for nothing."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(size.tokens, size.experts - least, generator=generator)
    ids = chances.topk(size.top_k).indices + least
    return replace(given, ids=ids.to(given.ids.device))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["bf16", "int4:32", "fp8:128x128"])
@pytest.mark.parametrize("policy", ["stream", "auto"])
def test_replays(spec: str, policy: str, at_once: list[str]) -> None:
    """Routing changes from call to call, experts without rows among them; sizes take turns, the smaller one first, so
    that what was recorded for it is recorded again."""
    store = make_store(LARGER, spec)
    place = placed(store, "cuda:0", policy, LARGER.experts)
    smaller = replace(LARGER, tokens=201)
    for turn in range(4):
        for size in (smaller, LARGER):
            given = other_routing(inputs(size, "cuda:0", seed=turn), size, turn, least=5 * (turn % 2))
            compare(run(place, given, True), expected(store, given))
    assert at_once == ["forward", "backward"] * 8
    assert len(place.engine.side._recorder._known) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("room", [1, 2])
def test_layers_share_a_recording(room: int, at_once: list[str]) -> None:
    """And results of one are not overwritten by the next, nor are experts that a queued pass has still to read: with
    slots for one layer, everything is queued before the first kernel runs."""
    stores = [make_store(LARGER, "int4:32", seed=seed) for seed in range(3)]
    place = placed(stores[0], "cuda:0", "stream", room * LARGER.experts)
    layers = [place]
    for index, store in enumerate(stores[1:], 1):
        layer = new_layer(place.engine, index, store, Gate("silu"), geometry_of(store))
        place.engine.layers[index] = layer
        layers.append(PlacedStore(place.engine, layer))
    given = [other_routing(inputs(LARGER, "cuda:0", seed=at), LARGER, at) for at in range(3)]
    outs = [
        layer(one.hidden, one.ids, one.weights, factors_of(one.lora), NO_DROPOUT, True)
        for layer, one in zip(layers, given, strict=True)
    ]
    found = [torch.autograd.grad(out, one.leaves(), one.grad) for out, one in zip(outs, given, strict=True)]
    for store, one, out, grads in zip(stores, given, outs, found, strict=True):
        compare([out, *grads], expected(store, one))
    assert at_once == ["forward"] * 3 + ["backward"] * 3
    assert len(place.engine.side._recorder._known) == 2
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        outs = [
            layer(one.hidden, one.ids, one.weights, factors_of(one.lora), NO_DROPOUT, True)
            for layer, one in zip(layers, given, strict=True)
        ]
    for store, one, out in zip(stores, given, outs, strict=True):
        compare([out], expected(store, one)[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["bf16", "int4:32", "nvfp4"])
@pytest.mark.parametrize("policy", ["stream", "auto", "resident"])
def test_residents_lie_anywhere(spec: str, policy: str, at_once: list[str]) -> None:
    """Two layers with other residents, one with all of them, then renewed ones: the recordings stay the same."""
    stores = [make_store(LARGER, spec, seed=seed) for seed in range(2)]
    layers = [placed(stores[0], "cuda:0", policy, LARGER.experts, (1, 6, 30))]
    engine, sizes = layers[0].engine, geometry_of(stores[0])
    other = new_layer(engine, 1, stores[1], Gate("silu"), sizes)
    other.costs = layers[0].layer.costs
    engine.layers[1] = other
    layers.append(PlacedStore(engine, other))
    engine.side.residents[1] = ExpertCache(sizes, LARGER.experts, engine.device, None)
    engine.side.residents[1].fetch(1, other.packed.source, range(LARGER.experts))
    for turn in range(3):
        for store, layer in zip(stores, layers, strict=True):
            given = other_routing(inputs(LARGER, "cuda:0", seed=turn), LARGER, turn)
            compare(run(layer, given, True), expected(store, given))
        room = engine.side.residents[0]
        room.retain(0, frozenset())
        room.fetch(0, layers[0].layer.packed.source, (turn, 9, 28))
    assert at_once == ["forward", "backward"] * 6
    assert len(engine.side._recorder._known) == 2


@pytest.mark.gpu
def test_inference_and_no_lora(at_once: list[str]) -> None:
    store, given = make_store(LARGER, "int4:32"), inputs(LARGER, "cuda:0")
    place = placed(store, "cuda:0", "stream", LARGER.experts)
    want = expected(store, replace(given, lora=given.lora))
    with torch.inference_mode():
        place(given.hidden, given.ids, given.weights, None, NO_DROPOUT, False)
        place(given.hidden, given.ids, given.weights, factors_of(given.lora), NO_DROPOUT, False)
    compare(run(place, given, True), want)
    assert at_once == ["forward"] * 3 + ["backward"]


@pytest.mark.gpu
def test_who_is_not_recorded(at_once: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout draws anew in every call, and what is decoded in groups is as long as its rows are."""
    store, given = make_store(LARGER, "int4:32"), inputs(LARGER, "cuda:0")
    place = placed(store, "cuda:0", "stream", LARGER.experts)
    run(place, given, True, Dropout(0.4, 7))
    monkeypatch.setattr(executor, "ROOM_BYTES", 0)
    monkeypatch.setattr(executor, "GROUP_BYTES", 1 << 20)
    run(place, given, True)
    assert not at_once


@pytest.mark.gpu
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("not while capturing")])
def test_what_cannot_be_recorded(error: RuntimeError, at_once: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything goes on as before, said once."""
    store, given = make_store(LARGER, "int4:32"), inputs(LARGER, "cuda:0")
    place = placed(store, "cuda:0", "stream", LARGER.experts)

    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(expert_graphs.ExpertGraphs, "_record", full)
    for _ in range(2):
        compare(run(place, given, True), expected(store, given))
    assert at_once == ["forward"]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["stream", "auto", "resident"])
def test_nobody_waits_for_ids(policy: str, at_once: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is recorded, a pass with all of its experts asks for nothing; its rows are counted all the same, and a
    backward pass that goes another way finds its ids."""
    store = make_store(LARGER, "int4:32")
    residents = range(LARGER.experts) if policy == "resident" else range(3)
    place = placed(store, "cuda:0", policy, LARGER.experts, tuple(residents))
    place.engine.trials.enter = lambda *_: "whole"  # type: ignore[method-assign]
    rows = np.zeros(LARGER.experts, np.int64)
    for turn in range(4):
        given = other_routing(inputs(LARGER, "cuda:0", seed=turn), LARGER, turn, least=0 if turn else 1)
        rows += np.bincount(given.ids.cpu().view(-1), minlength=LARGER.experts)
        out = place(given.hidden, given.ids, given.weights, factors_of(given.lora), NO_DROPOUT, True)
        assert len(place.engine._unseen) == min(turn, 1), "ids that nobody has seen"
        compare([out, *torch.autograd.grad(out, given.leaves(), given.grad)], expected(store, given))
        if turn:
            assert all(len(one.there + one.streamed) == LARGER.experts for one in place.layer.last.values())
    assert at_once == ["forward", "backward"] * 4
    assert np.array_equal(place.engine.counts(place.layer), rows)
    given = other_routing(inputs(LARGER, "cuda:0", seed=9), LARGER, 9)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]  # nothing below has come by when backward asks
    out = place(given.hidden, given.ids, given.weights, factors_of(given.lora), NO_DROPOUT, True)
    monkeypatch.setattr(GpuExecutor, "replays", lambda *_: False)
    compare([out, *torch.autograd.grad(out, given.leaves(), given.grad)], expected(store, given))
