"""Every policy against the CPU's own path: forward, gradients of hidden states, routing weights and LoRA.

The CPU rounds gate and up less often than the GPU does, so results differ by bf16's rounding: 1 % of a tensor's norm,
as in test_gpu_compute. With everything on torch's CPU device the same walk runs where there is no GPU: slots, groups,
the split, the worker thread; only streams and pinned memory need one.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ktransformers.checkpoint.encoder import encode
from ktransformers.nn import ExpertStore
from ktransformers.nn.checkpointing import save_expert_outputs
from ktransformers.nn.gate import Gate
from ktransformers.nn.lora import ExpertLora, Factor
from ktransformers.nn.lora_factors import factors_of
from ktransformers.nn.operator import apply_experts
from ktransformers.nn.store import NO_DROPOUT, Dropout
from ktransformers.place.engine import ExpertEngine
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.gpu.pinned import RegisteredMemory
from ktransformers.place.placed_store import PlacedStore
from ktransformers.place.placement import geometry_of, new_layer
from ktransformers.plan.split import Costs

TOLERANCE = 0.01
# Everything costs the same: the split is somewhere in the middle.
EVEN = Costs(1e-4, 0, 1e-4, 1e-6, 1e-4, 1e-6, 1e-5, 0, 0)
pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])


@dataclass(frozen=True)
class Size:
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    tokens: int
    rank: int


SMALL = Size(8, 128, 64, 2, 41, 4)
QWEN = Size(128, 2048, 768, 8, 512, 8)


def make_store(size: Size, spec: str = "bf16", seed: int = 0, biased: bool = False) -> ExpertStore:
    generator = torch.Generator().manual_seed(seed)
    e, h, i = size.experts, size.hidden, size.intermediate

    def random(count: int, *shape: int) -> Tensor:
        """Windows of one stretch of numbers: a real layer would take seconds to draw."""
        each = math.prod(shape)
        pool = (torch.randn(each + 997 * count, generator=generator) / shape[-1] ** 0.5).bfloat16()
        return torch.stack([pool[997 * at : 997 * at + each].view(shape) for at in range(count)])

    matrices: dict[str, Any] = {"gate": random(e, i, h), "up": random(e, i, h), "down": random(e, h, i)}
    if spec != "bf16":
        matrices = {name: encode(matrix, spec) for name, matrix in matrices.items()}
    if biased:
        matrices |= {"gate_bias": random(e, i), "up_bias": random(e, i), "down_bias": random(e, h)}
    store = ExpertStore(e, h, i, formats=spec)
    store.pack(**matrices)
    return store


def placed(
    store: ExpertStore,
    device: str,
    policy: str,
    slots: int,
    residents: tuple[int, ...] = (),
    pinned: int = 1 << 40,
    split: bool = True,
) -> PlacedStore:
    """`pinned`: bytes that may be registered with the driver; `split`: auto is as if both sides had been found best."""
    where, sizes = torch.device(device), geometry_of(store)
    registered = RegisteredMemory(pinned) if where.type == "cuda" and pinned else None
    engine = ExpertEngine(where, policy, ExpertCache(sizes, slots, where, registered))
    layer = new_layer(engine, 0, store, Gate("silu"), sizes)
    layer.costs = engine.dispatcher.costs = {"forward": EVEN, "backward": EVEN}
    engine.layers[0] = layer
    if split:
        engine.dispatcher.forced = "split" if policy == "auto" else None
    if residents:
        engine.executor.residents[0] = ExpertCache(sizes, len(residents), where, registered)
        engine.executor.residents[0].fetch(0, layer.packed.source, residents)
    return PlacedStore(engine, layer)


@dataclass
class Inputs:
    hidden: Tensor
    ids: Tensor
    weights: Tensor
    lora: ExpertLora
    grad: Tensor

    def leaves(self) -> list[Tensor]:
        found = [self.hidden, self.weights]
        for factor in (self.lora.gate_up, self.lora.down):
            assert factor is not None
            found += [factor.a, factor.b]
        return found


def inputs(size: Size, device: str, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    e, h, i, r = size.experts, size.hidden, size.intermediate, size.rank

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    # B as PEFT has it: the expert is the innermost dimension.
    wide = Factor((random(e, r, h) / h**0.5), (random(2 * i, r, e) / r**0.5).permute(2, 0, 1), 0.5)
    down = Factor((random(e, r, i) / i**0.5), (random(h, r, e) / r**0.5).permute(2, 0, 1), 2.0)
    ids = torch.rand(size.tokens, e, generator=generator).topk(size.top_k).indices
    ids[0, 0] = -1
    made = Inputs(
        random(size.tokens, h).to(dtype).to(device),
        ids.to(device),
        torch.rand(size.tokens, size.top_k, generator=generator).to(device),
        ExpertLora(gate_up=wide, down=down),
        random(size.tokens, h).to(dtype).to(device),
    )
    for leaf in made.leaves():
        leaf.requires_grad_()
    return made


def error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().cpu().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def gradients(out: Tensor, given: Inputs) -> list[Tensor]:
    return list(torch.autograd.grad(out, given.leaves(), given.grad))


def expected(store: ExpertStore, given: Inputs, retain: bool = True) -> list[Tensor]:
    host = replace_device(given, "cpu")
    out = apply_experts(store, host.hidden, host.ids, host.weights, lora=host.lora, retain=retain)
    return [out, *gradients(out, host)]


def replace_device(given: Inputs, device: str) -> Inputs:
    moved = {name: getattr(given, name).detach().to(device) for name in ("hidden", "ids", "weights", "grad")}
    for name in ("hidden", "weights"):
        moved[name].requires_grad_()
    return replace(given, **moved)


def compare(got: list[Tensor], want: list[Tensor], times: float = 1) -> None:
    names = ("out", "hidden", "weights", "gate_up_a", "gate_up_b", "down_a", "down_b")
    found = {name: error(a, b) for name, a, b in zip(names, got, want, strict=False)}
    assert all(value < times * TOLERANCE for value in found.values()), found


def run(place: PlacedStore, given: Inputs, retain: bool, dropout: Dropout = NO_DROPOUT) -> list[Tensor]:
    out = place(given.hidden, given.ids, given.weights, factors_of(given.lora), dropout, retain)
    return [out, *gradients(out, given)]


@devices
@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize("policy", ["cpu", "stream", "resident", "auto"])
def test_policies(policy: str, retain: bool, device: str) -> None:
    """Twice, so that the second pass finds what the first one left; with room for all, and for three at a time."""
    store, given = make_store(SMALL), inputs(SMALL, device)
    want = expected(store, given)
    for slots in (16, 3):
        place = placed(store, device, policy, slots, residents=(1, 6) if policy in ("resident", "auto") else ())
        for turn in range(2):
            got = run(place, given, retain)
            if policy == "auto" and not turn:
                first = place.layer.last_split["forward"]
                assert first.cpu and first.resident and first.streamed, "nothing was split"
            assert got[0].dtype == given.hidden.dtype and str(got[0].device) == device
            compare(got, want)


@devices
@pytest.mark.parametrize("recomputed", [True, False])
@pytest.mark.parametrize("mode", ["cpu", "resident", "stream", "stream_all", "split", "host_callback"])
def test_every_mode_trains_alike(mode: str, recomputed: bool, device: str) -> None:
    """Also under activation checkpointing, whose recomputation has the same shapes; a mode that training does not have
    falls back to its nearest."""
    store, given = make_store(SMALL), inputs(SMALL, device)
    want, place = expected(store, given), placed(store, device, mode, 16, (1, 6), split=False)
    factors = factors_of(given.lora)

    def run_layer(x: Tensor) -> Tensor:
        return place(x, given.ids, given.weights, factors, NO_DROPOUT, not recomputed)

    for _ in range(3):
        out = checkpoint(run_layer, given.hidden, use_reentrant=False) if recomputed else run_layer(given.hidden)
        compare([out, *gradients(out, given)], want)


@devices
@pytest.mark.parametrize("spec", ["int8", "int4:32", "fp8:128x128", "mxfp4", "q4_0"])
def test_formats(spec: str, device: str) -> None:
    store, given = make_store(SMALL, spec), inputs(SMALL, device)
    compare(run(placed(store, device, "stream", 8), given, True), expected(store, given))


@devices
def test_biases(device: str) -> None:
    store, given = make_store(SMALL, biased=True), inputs(SMALL, device)
    compare(run(placed(store, device, "auto", 8), given, True), expected(store, given))


@devices
def test_dropout(device: str) -> None:
    """The same elements are dropped on both sides: all policies agree with the CPU."""
    store, given = make_store(SMALL), inputs(SMALL, device)
    dropout = Dropout(0.4, 12345)
    want = run(placed(store, device, "cpu", 8), given, True, dropout)
    assert error(want[0], expected(store, given)[0]) > 0.05
    for policy in ("stream", "auto"):
        compare([t.cpu() for t in run(placed(store, device, policy, 8), given, True, dropout)], [t.cpu() for t in want])


@devices
def test_checkpointing_finds_the_experts_again(device: str) -> None:
    """Three layers under non-reentrant checkpointing: every expert crosses once forward, and not again where the slots
    still hold it when its backward pass comes."""
    sizes = [make_store(SMALL, seed=seed) for seed in range(3)]
    given = inputs(SMALL, device)
    place = placed(sizes[0], device, "stream", 3 * SMALL.experts)
    layers = [place]
    for index, store in enumerate(sizes[1:], 1):
        layer = new_layer(place.engine, index, store, Gate("silu"), geometry_of(store))
        layer.costs = place.layer.costs
        place.engine.layers[index] = layer
        layers.append(PlacedStore(place.engine, layer))

    def model(x: Tensor, weights: Tensor, call: Any) -> Tensor:
        for at in range(3):
            x = x + checkpoint(lambda x, at=at: call(at, x, weights), x, use_reentrant=False)
        return x

    factors = factors_of(given.lora)
    out = model(given.hidden, given.weights, lambda at, x, w: layers[at](x, given.ids, w, factors, NO_DROPOUT, True))
    got = [out, *gradients(out, given)]
    host = replace_device(given, "cpu")
    out = model(host.hidden, host.weights, lambda at, x, w: apply_experts(sizes[at], x, host.ids, w, lora=host.lora))
    compare(got, [out, *gradients(out, host)], times=6)  # each layer takes on what the one before it rounded
    assert place.engine.cache.copied_bytes == 3 * SMALL.experts * geometry_of(sizes[0]).expert_bytes


@devices
@pytest.mark.parametrize("by", ["torch", "us"])
def test_checkpointing_keeps_what_was_computed(by: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What training with `retain` does: the pass that is computed again finds the experts' outputs, and calls none."""
    store, given = make_store(SMALL), inputs(SMALL, device)
    place, calls = placed(store, device, "auto", 8), []
    monkeypatch.setattr(
        place.engine, "forward", lambda *args, inner=place.engine.forward: calls.append(1) or inner(*args)
    )

    def keep(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        ours = operator.namespace == "ktransformers"
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    factors = factors_of(given.lora)
    out = checkpoint(
        lambda x: place(2 * x, given.ids, given.weights, factors, NO_DROPOUT, True) * 0.5,
        given.hidden / 2,
        use_reentrant=False,
        context_fn=save_expert_outputs if by == "us" else functools.partial(create_selective_checkpoint_contexts, keep),
    )
    got = [out * 2, *gradients(out * 2, given)]
    compare(got, expected(store, given))
    assert len(calls) == 1


@devices
def test_no_rows_and_inference(device: str) -> None:
    store, given = make_store(SMALL), inputs(SMALL, device)
    place = placed(store, device, "auto", 8)
    nobody = torch.full_like(given.ids, -1)
    out = place(given.hidden, nobody, given.weights, None, NO_DROPOUT, True)
    assert not out.any()
    (grad,) = torch.autograd.grad(out, given.hidden, given.grad)
    assert not grad.any()
    with torch.inference_mode():
        out = place(given.hidden, given.ids, given.weights, None, NO_DROPOUT, False)
    compare([out], [apply_experts(store, *(t.detach().cpu() for t in (given.hidden, given.ids, given.weights)))])


@devices
@pytest.mark.parametrize("residents", [(), (1, 6), tuple(range(8))], ids=["none", "some", "all"])
@pytest.mark.parametrize("way", ["cpu", "resident", "stream", "split", "stream_all", "host_callback"])
def test_few_tokens_in_every_mode(way: str, residents: tuple[int, ...], device: str) -> None:
    """With gradients too; what is not possible here is done in the way that is nearest to it."""
    size = replace(SMALL, tokens=3)
    store, given = make_store(size), inputs(size, device)
    place = placed(store, device, "auto", 8, residents)
    place.engine.dispatcher.forced = way
    for _ in range(2):
        compare(run(place, given, True), expected(store, given))
    last = place.layer.last_split["forward"]
    wanted = set(given.ids[given.ids >= 0].tolist())
    on_cpu = {"cpu": wanted, "resident": wanted - set(residents), "host_callback": wanted - set(residents)}
    if way != "split":
        assert set(last.cpu) == on_cpu.get(way, set())
        assert set(last.resident + last.streamed) == wanted - set(last.cpu)


def test_counts_are_kept() -> None:
    store, given = make_store(SMALL), inputs(SMALL, "cpu")
    place = placed(store, "cpu", "cpu", 8)
    run(place, given, True)
    ids = given.ids[given.ids >= 0]
    assert np.array_equal(place.layer.counts, np.bincount(ids.numpy(), minlength=SMALL.experts))


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [0, 1000], ids=["stage", "beyond the budget"])
def test_staging(pinned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through pinned buffers that are smaller than an expert, so that the ring goes round many times."""
    monkeypatch.setattr("ktransformers.place.gpu.pinned.STAGE_BYTES", 10_000)
    store, given = make_store(SMALL), inputs(SMALL, "cuda:0")
    place = placed(store, "cuda:0", "stream", 3, pinned=pinned)
    assert not place.engine.cache.can_copy_directly(place.layer.packed.source)
    for _ in range(2):
        compare(run(place, given, True), expected(store, given))


@pytest.mark.gpu
def test_registered_memory_is_copied_from_directly() -> None:
    store = make_store(QWEN)
    place = placed(store, "cuda:0", "stream", 128)
    assert place.engine.cache.can_copy_directly(place.layer.packed.source)
    assert place.layer.packed.source.first.is_pinned()


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["bf16", "int4:32"])
def test_real_layer(spec: str) -> None:
    store, given = make_store(QWEN, spec), inputs(QWEN, "cuda:0")
    want = expected(store, given)
    for policy in ("stream", "auto", "resident", "cpu"):
        place = placed(store, "cuda:0", policy, 128, residents=tuple(range(16)) if policy == "resident" else ())
        for _ in range(2):
            compare(run(place, given, True), want)
