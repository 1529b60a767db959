"""Replayed expert passes compute what passes compute that run eagerly, whatever the routing is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ktransformers.experts.backend import ExpertBatch
from ktransformers.experts.gate import Gate
from ktransformers.experts.lora import LoraPair
from ktransformers.experts.store import NO_DROPOUT, Dropout
from ktransformers.modeling import cuda_graphs
from ktransformers.modeling.cuda_graphs import GraphPool
from ktransformers.place.gpu import executor, expert_graphs, grouped_mlp
from ktransformers.place.gpu.device_lora import DeviceFactors, FactorGradients, empty_like_factors
from ktransformers.place.gpu.executor import GpuExecutor, LayerOnDevice
from ktransformers.place.gpu.expert_cache import ExpertCache, LayerBytes
from ktransformers.place.gpu.expert_graphs import (
    ExpertGraphs,
    GraphInputs,
    PassBuffers,
    PassKey,
    SlotRefs,
    StaticBuffers,
    slot_table,
)
from ktransformers.place.gpu.grouped_mlp import Decoded, GroupedRows, GroupLora
from ktransformers.place.placed_experts import PlacedExperts
from ktransformers.place.placement import geometry_of, new_layer
from ktransformers.quantized.gpu.layout import geometry
from tests.support.placed_experts import (
    SMALL,
    Inputs,
    Size,
    assert_close,
    cpu_results,
    make_inputs,
    make_store,
    place_store_on,
    run,
    run_with_gradients,
)

LARGER = Size(32, 512, 256, 4, 300, 8)


def fake_cache(count: int, first: int, down: int) -> Any:
    return SimpleNamespace(
        first=torch.empty(count, first, dtype=torch.uint8), down=torch.empty(count, down, dtype=torch.uint8)
    )


def test_slot_table_has_sort_keys_and_offsets() -> None:
    streamed, residents = fake_cache(8, 192, 64), fake_cache(3, 192, 64)
    table = slot_table(5, [SlotRefs(residents, [2], [1]), SlotRefs(streamed, [0, 4], [1, 7])], streamed)
    sort_keys, first, down = table[:6], table[6:11], table[11:]
    assert sort_keys.tolist() == [0, 5, 2, 5, 4, 5]  # two experts on the CPU, and ids that are none
    for name, size, offsets in (("first", 192, first), ("down", 64, down)):
        apart = getattr(residents, name).data_ptr() - getattr(streamed, name).data_ptr()
        assert offsets.tolist() == [size, -1, apart + size, -1, 7 * size]


def pass_key(needs_grad: bool | None, tokens: int) -> PassKey:
    return PassKey(needs_grad, tokens, SMALL.top_k, torch.bfloat16, Gate("silu"), ())


def test_pass_is_due_in_the_third_pass_over_the_layers() -> None:
    graphs, key = ExpertGraphs(torch.device("cpu")), pass_key(None, 64)
    for turn in range(3):
        assert graphs.is_pending(key) and not graphs.is_captured(key)
        assert {graphs.is_due(key, layer) for layer in (4, 5, 6)} == {turn == 2}


def test_passes_are_not_captured_when_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_GRAPHS", "attention,decode")
    graphs, key = ExpertGraphs(torch.device("cpu")), pass_key(None, 64)
    assert not graphs.is_pending(key) and not any(graphs.is_due(key, 0) for _ in range(4))


@pytest.mark.parametrize("needs_grad", [None, False, True])
def test_rows_of_other_experts_and_of_padding_are_not_added(needs_grad: bool | None) -> None:
    """Three of eight experts, 41 tokens padded to 64, buffers full of NaN: only these experts' rows count."""
    given = make_inputs(SMALL, "cpu")
    wanted, size, gate = [1, 2, 6], SMALL, Gate("silu")
    generator = torch.Generator().manual_seed(3)
    decoded = Decoded(
        torch.randn(size.experts, 2 * size.intermediate, size.hidden, generator=generator).bfloat16() / 12,
        torch.randn(size.experts, size.hidden, size.intermediate, generator=generator).bfloat16() / 8,
    )
    factors = given.lora
    assert factors is not None
    pairs = DeviceFactors(torch.device("cpu")).get(factors, 2 * size.intermediate)
    ids, hidden, weights = given.ids, given.hidden.detach(), given.weights.detach()
    counts = np.bincount(ids[ids >= 0].numpy(), minlength=size.experts)
    # As groups have it.
    keys = torch.where((ids == 1) | (ids == 2) | (ids == 6), ids, 99).view(-1)
    rows_at = torch.sort(keys, stable=True).indices[: int(counts[wanted].sum())]
    ends = torch.tensor(np.cumsum(counts[wanted]), dtype=torch.int32)
    rows = GroupedRows(rows_at // size.top_k, weights.view(-1)[rows_at], ends)
    few = Decoded(decoded.first[wanted], decoded.down[wanted])
    lora = GroupLora(ends, *(LoraPair(pairs[n].a[wanted], pairs[n].b[wanted]) for n in ("first", "down")))
    want = torch.zeros(size.tokens, size.hidden)

    key = pass_key(needs_grad, 64)
    static = StaticBuffers.allocate(key.tokens, ExpertBatch(hidden, ids, weights, factors, NO_DROPOUT))
    for buffer in (static.hidden, static.grad_out, static.weights, static.out, static.grad_weights):
        buffer.fill_(torch.nan)
    static.ids.fill_(-1)
    for target, source in (
        (static.hidden, hidden),
        (static.grad_out, given.grad),
        (static.ids, ids),
        (static.weights, weights),
    ):
        target[: size.tokens] = source
    sizes = geometry(size.experts, size.hidden, size.intermediate, True, dict.fromkeys(("gate", "up", "down"), "bf16"))
    layer = LayerOnDevice(0, sizes, gate, LayerBytes((), ()), (None, None))
    slots = fake_cache(3, 64, 64)
    table = slot_table(size.experts, [SlotRefs(slots, wanted, [0, 1, 2])], slots)
    batch = ExpertBatch(hidden, ids, weights, factors, NO_DROPOUT)
    replayed = GraphInputs(layer, batch, slots, [], decoded, table, pairs)
    lora_grads = empty_like_factors(factors if needs_grad else None, torch.device("cpu"))
    buffers = PassBuffers(static, torch.from_numpy(table), dict(pairs), lora_grads)
    expert_graphs._compute(buffers, replayed, key)()

    if needs_grad is None:
        grouped_mlp.forward(hidden, rows, few, gate, want, lora)
        torch.testing.assert_close(static.out[: size.tokens], want)
        return
    grad_rows, grads = grouped_mlp.backward(given.grad, hidden, rows, few, gate, want, lora, None, needs_grad)
    torch.testing.assert_close(static.out[: size.tokens], want)
    expected_weights = torch.zeros(ids.numel()).index_copy_(0, rows_at, grad_rows)
    torch.testing.assert_close(static.grad_weights[: size.tokens].view(-1), expected_weights)
    gradients = FactorGradients(factors)
    gradients.add(grads)
    for got, expected_grad in zip(lora_grads, gradients.scatter(torch.tensor(wanted)), strict=True):
        torch.testing.assert_close(got, expected_grad)
        assert got.stride() == expected_grad.stride()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Passes are captured at their first call; the list is what was replayed."""
    replayed: list[str] = []
    monkeypatch.setattr(cuda_graphs, "CAPTURE_AT", 1)
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
@pytest.mark.parametrize("policy", ["stream", "resident"])
def test_replays_compute_what_launches_compute(spec: str, policy: str, at_once: list[str]) -> None:
    """Routing changes from call to call, experts without rows among them; sizes take turns, the smaller one first, so
    that its passes are captured again when the buffers have grown."""
    store = make_store(LARGER, spec)
    place = place_store_on(store, "cuda:0", policy, LARGER.experts, (1, 6, 30) if policy == "resident" else ())
    smaller = replace(LARGER, tokens=201)
    for turn in range(4):
        for size in (smaller, LARGER):
            given = other_routing(make_inputs(size, "cuda:0", seed=turn), size, turn, least=5 * (turn % 2))
            assert_close(run_with_gradients(place, given, True), cpu_results(store, given))
    assert at_once == ["forward", "backward"] * 8
    assert len(place.engine.executor._graphs.graphs.captured) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("layers_in_slots", [1, 2])
def test_layers_share_graphs(layers_in_slots: int, at_once: list[str]) -> None:
    """Results of one layer are not overwritten by the next, nor are experts that a queued pass has still to read: with
    slots for one layer, everything is queued before the first kernel runs."""
    stores = [make_store(LARGER, "int4:32", seed=seed) for seed in range(3)]
    place = place_store_on(stores[0], "cuda:0", "stream", layers_in_slots * LARGER.experts)
    layers = [place]
    for index, store in enumerate(stores[1:], 1):
        layer = new_layer(place.engine, index, store, Gate("silu"), geometry_of(store))
        place.engine.layers[index] = layer
        layers.append(PlacedExperts(place.engine, layer))
    given = [other_routing(make_inputs(LARGER, "cuda:0", seed=at), LARGER, at) for at in range(3)]
    outs = [run(layer, one, one.lora) for layer, one in zip(layers, given, strict=True)]
    found = [torch.autograd.grad(out, one.leaves(), one.grad) for out, one in zip(outs, given, strict=True)]
    for store, one, out, grads in zip(stores, given, outs, found, strict=True):
        assert_close([out, *grads], cpu_results(store, one))
    assert at_once == ["forward"] * 3 + ["backward"] * 3
    assert len(place.engine.executor._graphs.graphs.captured) == 2
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        outs = [run(layer, one, one.lora) for layer, one in zip(layers, given, strict=True)]
    for store, one, out in zip(stores, given, outs, strict=True):
        assert_close([out], cpu_results(store, one)[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["bf16", "int4:32", "nvfp4"])
@pytest.mark.parametrize("policy", ["stream", "resident"])
def test_graphs_serve_residents_at_any_address(spec: str, policy: str, at_once: list[str]) -> None:
    """Two layers with other residents, one with all of them, then renewed ones: the graphs stay the same."""
    stores = [make_store(LARGER, spec, seed=seed) for seed in range(2)]
    layers = [place_store_on(stores[0], "cuda:0", policy, LARGER.experts, (1, 6, 30))]
    engine, sizes = layers[0].engine, geometry_of(stores[0])
    other = new_layer(engine, 1, stores[1], Gate("silu"), sizes)
    other.costs = layers[0].layer.costs
    engine.layers[1] = other
    layers.append(PlacedExperts(engine, other))
    engine.executor.residents[1] = ExpertCache(sizes, LARGER.experts, engine.device, None)
    engine.executor.residents[1].fetch(1, other.packed.source, range(LARGER.experts))
    for turn in range(3):
        for store, layer in zip(stores, layers, strict=True):
            given = other_routing(make_inputs(LARGER, "cuda:0", seed=turn), LARGER, turn)
            assert_close(run_with_gradients(layer, given, True), cpu_results(store, given))
        cache = engine.executor.residents[0]
        cache.evict_except(0, frozenset())
        cache.fetch(0, layers[0].layer.packed.source, (turn, 9, 28))
    assert at_once == ["forward", "backward"] * 6
    assert len(engine.executor._graphs.graphs.captured) == 2


@pytest.mark.gpu
def test_inference_without_and_with_lora_is_replayed(at_once: list[str]) -> None:
    store, given = make_store(LARGER, "int4:32"), make_inputs(LARGER, "cuda:0")
    place = place_store_on(store, "cuda:0", "stream", LARGER.experts)
    want = cpu_results(store, replace(given, lora=given.lora))
    with torch.inference_mode():
        run(place, given, retain=False)
        run(place, given, given.lora, retain=False)
    assert_close(run_with_gradients(place, given, True), want)
    assert at_once == ["forward"] * 3 + ["backward"]


@pytest.mark.gpu
def test_dropout_and_grouped_experts_are_not_captured(at_once: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout draws anew in every call, and experts that are decoded in groups have rows as the routing has it."""
    store, given = make_store(LARGER, "int4:32"), make_inputs(LARGER, "cuda:0")
    place = place_store_on(store, "cuda:0", "stream", LARGER.experts)
    run_with_gradients(place, given, True, Dropout(0.4, 7))
    place.engine.executor.whole_layer_bytes = 0
    monkeypatch.setattr(executor, "GROUP_BYTES", 1 << 20)
    run_with_gradients(place, given, True)
    assert not at_once


@pytest.mark.gpu
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("not while capturing")])
def test_failed_capture_is_logged_once_and_passes_go_on(
    error: RuntimeError, at_once: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, given = make_store(LARGER, "int4:32"), make_inputs(LARGER, "cuda:0")
    place = place_store_on(store, "cuda:0", "stream", LARGER.experts)

    def fail(*_: object) -> None:
        raise type(error)(*error.args)  # a new one: its traceback holds the store

    monkeypatch.setattr(GraphPool, "record", fail)
    for _ in range(2):
        assert_close(run_with_gradients(place, given, True), cpu_results(store, given))
    assert at_once == ["forward"]
    assert sum("CUDA graphs of expert passes" in line for line in caplog.messages) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["stream", "auto", "resident"])
def test_captured_pass_with_all_experts_does_not_synchronise_on_ids(
    policy: str, at_once: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are counted all the same, and a backward pass that is not replayed finds the ids."""
    store = make_store(LARGER, "int4:32")
    residents = range(LARGER.experts) if policy == "resident" else range(3)
    place = place_store_on(store, "cuda:0", policy, LARGER.experts, tuple(residents))
    place.engine.dispatcher.forced = "stream_all"
    rows = np.zeros(LARGER.experts, np.int64)
    for turn in range(4):
        given = other_routing(make_inputs(LARGER, "cuda:0", seed=turn), LARGER, turn, least=0 if turn else 1)
        rows += np.bincount(given.ids.cpu().view(-1), minlength=LARGER.experts)
        out = run(place, given, given.lora)
        assert len(place.engine._uncounted) == min(turn, 1), "ids that nobody has seen"
        assert_close([out, *torch.autograd.grad(out, given.leaves(), given.grad)], cpu_results(store, given))
        if turn:
            assert all(len(one.gpu) == LARGER.experts for one in place.layer.last_split.values())
    assert at_once == ["forward", "backward"] * 4
    assert np.array_equal(place.engine.counts(place.layer), rows)
    given = other_routing(make_inputs(LARGER, "cuda:0", seed=9), LARGER, 9)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]  # nothing below has come by when backward asks
    out = run(place, given, given.lora)
    monkeypatch.setattr(GpuExecutor, "replays", lambda *_: False)
    assert_close([out, *torch.autograd.grad(out, given.leaves(), given.grad)], cpu_results(store, given))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["bf16", "int4:32"])
def test_gpu_share_of_a_split_batch_without_gradients_is_replayed(spec: str, at_once: list[str]) -> None:
    """Rows of the CPU's experts are computed by no graph."""
    store = make_store(LARGER, spec)
    place = place_store_on(store, "cuda:0", "split", LARGER.experts, (1, 6, 30))
    for turn in range(3):
        given = other_routing(make_inputs(LARGER, "cuda:0", seed=turn), LARGER, turn)
        with torch.no_grad():
            out = run(place, given, given.lora, retain=False)
        assert_close([out], cpu_results(store, given))
        division = place.layer.last_split["forward"]
        assert turn or (division.resident and division.streamed and division.cpu), "nothing was split"
    assert at_once == ["forward"] * 3
