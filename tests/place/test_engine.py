"""Every policy against the CPU's own path: forward, gradients of hidden states, routing weights and LoRA.

The CPU rounds gate and up less often than the GPU does, so results differ by bf16's rounding: 1 % of a tensor's norm,
as in test_grouped_mlp. With everything on torch's CPU device the same code runs where there is no GPU: slots, groups,
the split, the worker thread; only streams and pinned memory need one.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ktransformers.experts.backend import ExpertBatch, LocalExperts
from ktransformers.experts.checkpointing import save_expert_outputs
from ktransformers.experts.gate import Gate
from ktransformers.experts.operator import apply_experts
from ktransformers.experts.store import NO_DROPOUT, Dropout
from ktransformers.place import engine
from ktransformers.place.gpu import layer_costs
from ktransformers.place.placed_experts import PlacedExperts
from ktransformers.place.placement import geometry_of, new_layer
from tests.support.placed_experts import (
    QWEN,
    SMALL,
    assert_close,
    cpu_results,
    devices,
    gradients,
    make_inputs,
    make_store,
    place_store_on,
    relative_error,
    replace_device,
    run,
    run_with_gradients,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")


@devices
@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize("policy", ["cpu", "stream", "resident"])
def test_policies_match_the_cpu(policy: str, retain: bool, device: str) -> None:
    """Twice, so that the second pass finds what the first one left; with room for all, and for three at a time."""
    store, given = make_store(SMALL), make_inputs(SMALL, device)
    want = cpu_results(store, given)
    for slots in (16, 3):
        place = place_store_on(store, device, policy, slots, residents=(1, 6) if policy == "resident" else ())
        for _ in range(2):
            got = run_with_gradients(place, given, retain)
            assert got[0].dtype == given.hidden.dtype and str(got[0].device) == device
            assert_close(got, want)


@devices
def test_split_divides_passes_without_gradients(device: str) -> None:
    """Into residents, streamed experts and those of the CPU; passes with gradients stream."""
    store, given = make_store(SMALL), make_inputs(SMALL, device)
    want = cpu_results(store, given)
    for slots in (16, 3):
        place = place_store_on(store, device, "split", slots, residents=(1, 6))
        for turn in range(2):
            with torch.no_grad():
                out = run(place, given, given.lora, retain=False)
            assert_close([out], want)
            division = place.layer.last_split["forward"]
            assert turn or (division.resident and division.streamed and division.cpu), "nothing was split"
        assert_close(run_with_gradients(place, given, True), want)
        assert not any(place.layer.last_split[name].cpu for name in ("forward", "backward"))


@devices
@pytest.mark.parametrize("recomputed", [True, False])
@pytest.mark.parametrize("mode", ["cpu", "resident", "stream", "stream_all", "split", "host_callback"])
def test_every_mode_trains_alike(mode: str, recomputed: bool, device: str) -> None:
    """Also under activation checkpointing, whose recomputation has the same shapes; a mode that training does not have
    falls back to its nearest."""
    store, given = make_store(SMALL), make_inputs(SMALL, device)
    want, place = cpu_results(store, given), place_store_on(store, device, mode, 16, (1, 6))
    factors = given.lora

    def run_layer(x: Tensor) -> Tensor:
        return apply_experts(place, x, given.ids, given.weights, lora=factors, retain=not recomputed)

    for _ in range(3):
        out = checkpoint(run_layer, given.hidden, use_reentrant=False) if recomputed else run_layer(given.hidden)
        assert_close([out, *gradients(out, given)], want)


@devices
@pytest.mark.parametrize("spec", ["int8", "int4:32", "fp8:128x128", "mxfp4", "q4_0"])
def test_formats_match_the_cpu(spec: str, device: str) -> None:
    store, given = make_store(SMALL, spec), make_inputs(SMALL, device)
    assert_close(run_with_gradients(place_store_on(store, device, "stream", 8), given, True), cpu_results(store, given))


@devices
def test_biases_match_the_cpu(device: str) -> None:
    store, given = make_store(SMALL, biased=True), make_inputs(SMALL, device)
    place = place_store_on(store, device, "resident", 8, (1, 6))
    assert_close(run_with_gradients(place, given, True), cpu_results(store, given))


@devices
def test_dropout_matches_the_cpu(device: str) -> None:
    """The same elements are dropped on both sides: all policies agree with the CPU."""
    store, given = make_store(SMALL), make_inputs(SMALL, device)
    dropout = Dropout(0.4, 12345)
    want = run_with_gradients(place_store_on(store, device, "cpu", 8), given, True, dropout)
    assert relative_error(want[0], cpu_results(store, given)[0]) > 0.05
    for place in (place_store_on(store, device, "stream", 8), place_store_on(store, device, "resident", 8, (1, 6))):
        got = run_with_gradients(place, given, True, dropout)
        assert_close([t.cpu() for t in got], [t.cpu() for t in want])


@devices
def test_recomputation_finds_experts_in_the_cache(device: str) -> None:
    """Three layers under non-reentrant checkpointing: every expert crosses once forward, and not again where the slots
    still hold it when its backward pass comes."""
    sizes = [make_store(SMALL, seed=seed) for seed in range(3)]
    given = make_inputs(SMALL, device)
    place = place_store_on(sizes[0], device, "stream", 3 * SMALL.experts)
    layers = [place]
    for index, store in enumerate(sizes[1:], 1):
        layer = new_layer(place.engine, index, store, Gate("silu"), geometry_of(store))
        layer.costs = place.layer.costs
        place.engine.layers[index] = layer
        layers.append(PlacedExperts(place.engine, layer))

    def model(x: Tensor, weights: Tensor, call: Any) -> Tensor:
        for at in range(3):
            x = x + checkpoint(lambda x, at=at: call(at, x, weights), x, use_reentrant=False)
        return x

    factors = given.lora
    out = model(given.hidden, given.weights, lambda at, x, w: apply_experts(layers[at], x, given.ids, w, lora=factors))
    got = [out, *gradients(out, given)]
    host = replace_device(given, "cpu")
    out = model(
        host.hidden,
        host.weights,
        lambda at, x, w: apply_experts(LocalExperts(sizes[at]), x, host.ids, w, lora=host.lora),
    )
    assert_close(got, [out, *gradients(out, host)], times=6)  # each layer takes on what the one before it rounded
    assert place.engine.cache.copied_bytes == 3 * SMALL.experts * geometry_of(sizes[0]).expert_bytes


@devices
@pytest.mark.parametrize("by", ["torch", "us"])
def test_checkpointing_with_retain_does_not_recompute_experts(
    by: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What training with `retain` does: the pass that is computed again finds the experts' outputs, and calls none."""
    store, given = make_store(SMALL), make_inputs(SMALL, device)
    place, calls = place_store_on(store, device, "resident", 8, (1, 6)), []
    monkeypatch.setattr(
        place.engine, "forward", lambda *args, inner=place.engine.forward: calls.append(1) or inner(*args)
    )

    def keep(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        ours = operator.namespace == "ktransformers"
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    factors = given.lora
    out = checkpoint(
        lambda x: apply_experts(place, 2 * x, given.ids, given.weights, lora=factors) * 0.5,
        given.hidden / 2,
        use_reentrant=False,
        context_fn=save_expert_outputs if by == "us" else functools.partial(create_selective_checkpoint_contexts, keep),
    )
    got = [out * 2, *gradients(out * 2, given)]
    assert_close(got, cpu_results(store, given))
    assert len(calls) == 1


def test_passes_run_on_the_device_of_their_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no module is called: when modes and costs are measured."""
    entered: list[torch.device] = []

    def on_device(device: torch.device) -> nullcontext[None]:
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr(engine, "on_device", on_device)
    monkeypatch.setattr(layer_costs, "on_device", on_device)
    store, given = make_store(SMALL), make_inputs(SMALL, "cpu")
    place = place_store_on(store, "cpu", "resident", 16, (1, 6))
    run_with_gradients(place, given, True)
    assert entered == [torch.device("cpu")] * 2, "forward and backward"
    with torch.no_grad():
        place.engine.infer(place.layer, ExpertBatch(given.hidden, given.ids, given.weights, None, NO_DROPOUT))
    monkeypatch.setattr(layer_costs, "cache_file", lambda key: tmp_path / "costs.json")
    monkeypatch.setattr(layer_costs, "_measure", lambda *_: ({}, 1.0))
    layer_costs.measured_costs(place.layer.packed, store, place.engine.executor, remeasure=True)
    assert len(entered) == 4


@devices
def test_empty_batches_and_inference(device: str) -> None:
    store, given = make_store(SMALL), make_inputs(SMALL, device)
    place = place_store_on(store, device, "split", 8)
    nobody = torch.full_like(given.ids, -1)
    out = apply_experts(place, given.hidden, nobody, given.weights)
    assert not out.any()
    (grad,) = torch.autograd.grad(out, given.hidden, given.grad)
    assert not grad.any()
    with torch.inference_mode():
        out = run(place, given, retain=False)
    assert_close(
        [out],
        [apply_experts(LocalExperts(store), *(t.detach().cpu() for t in (given.hidden, given.ids, given.weights)))],
    )


@devices
@pytest.mark.parametrize("residents", [(), (1, 6), tuple(range(8))], ids=["none", "some", "all"])
@pytest.mark.parametrize("way", ["cpu", "resident", "stream", "split", "stream_all", "host_callback"])
def test_small_batches_match_the_cpu_in_every_mode(way: str, residents: tuple[int, ...], device: str) -> None:
    """With gradients too; what is not possible here is done in the way that is nearest to it."""
    size = replace(SMALL, tokens=3)
    store, given = make_store(size), make_inputs(size, device)
    place = place_store_on(store, device, "auto", 8, residents)
    place.engine.dispatcher.forced = way
    for _ in range(2):
        assert_close(run_with_gradients(place, given, True), cpu_results(store, given))
    last = place.layer.last_split["forward"]
    wanted = set(given.ids[given.ids >= 0].tolist())
    on_cpu = {"cpu": wanted, "resident": wanted - set(residents), "host_callback": wanted - set(residents)}
    assert set(last.cpu) == on_cpu.get(way, set())
    assert set(last.resident + last.streamed) == wanted - set(last.cpu)


def test_routed_rows_are_counted() -> None:
    store, given = make_store(SMALL), make_inputs(SMALL, "cpu")
    place = place_store_on(store, "cpu", "cpu", 8)
    run_with_gradients(place, given, True)
    ids = given.ids[given.ids >= 0]
    assert np.array_equal(place.layer.counts, np.bincount(ids.numpy(), minlength=SMALL.experts))


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [0, 1000], ids=["stage", "beyond the budget"])
def test_staged_copies_match_direct_ones(pinned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through pinned buffers that are smaller than an expert, so that the ring goes round many times."""
    monkeypatch.setattr("ktransformers.place.gpu.pinned.STAGE_BYTES", 10_000)
    store, given = make_store(SMALL), make_inputs(SMALL, "cuda:0")
    place = place_store_on(store, "cuda:0", "stream", 3, pinned=pinned)
    assert not place.engine.cache.can_copy_directly(place.layer.packed.source)
    for _ in range(2):
        assert_close(run_with_gradients(place, given, True), cpu_results(store, given))


@pytest.mark.gpu
def test_registered_memory_is_copied_from_directly() -> None:
    store = make_store(QWEN)
    place = place_store_on(store, "cuda:0", "stream", 128)
    assert place.engine.cache.can_copy_directly(place.layer.packed.source)
    assert all(part.bytes.is_pinned() for part in place.layer.packed.source.first)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["bf16", "int4:32"])
def test_layer_of_real_size_matches_the_cpu(spec: str) -> None:
    store, given = make_store(QWEN, spec), make_inputs(QWEN, "cuda:0")
    want = cpu_results(store, given)
    for policy in ("stream", "split", "resident", "cpu"):
        place = place_store_on(store, "cuda:0", policy, 128, residents=tuple(range(16)) if policy == "resident" else ())
        for _ in range(2):
            with torch.no_grad():
                out = run(place, given, given.lora, retain=False)
            assert_close([out], want)
            assert_close(run_with_gradients(place, given, True), want)
