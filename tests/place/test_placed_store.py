"""Passes without gradients through the engine: several adapters in one batch, deferred experts, residents that follow
the routing, batches by size. Each against the CPU's own store, to bf16's rounding as in test_engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ktransformers.experts.contract import expert_modules
from ktransformers.experts.lora_factors import LoraFactors, packed_adapter
from ktransformers.experts.mixed_lora import MixedLora, use_mixed_lora
from ktransformers.experts.store import NO_DROPOUT
from ktransformers.place import attach
from ktransformers.place.gpu.executor import ExpertBatch
from ktransformers.place.gpu.multi_lora import LoraCache
from ktransformers.place.placed_store import select
from ktransformers.place.routing_counts import RoutingCounter
from tests.support.placed_experts import (
    ADAPTERS,
    SMALL,
    TOLERANCE,
    devices,
    make_inputs,
    make_store,
    mixed_lora,
    placed_for_inference,
    relative_error,
    tiny_packed_model,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")


@devices
@pytest.mark.parametrize("policy", ["stream", "resident", "auto"])
def test_mixed_adapters_match_the_cpu(policy: str, device: str) -> None:
    """Other ranks, other matrices, other scales, and rows without any; each row as if it were alone."""
    store, given = make_store(SMALL, biased=True), make_inputs(SMALL, device)
    lora = mixed_lora(store, ADAPTERS, SMALL.tokens)
    hidden, ids, weights = (tensor.detach() for tensor in (given.hidden, given.ids, given.weights))
    want = store.forward(hidden.cpu(), ids.cpu(), weights.cpu(), adapter=lora.rows, adapters=lora.adapters)
    bare = store.forward(hidden.cpu(), ids.cpu(), weights.cpu())
    assert relative_error(bare, want) > 0.05, "the adapters do something"
    place = placed_for_inference(store, device, policy, residents=(1, 6) if policy != "stream" else ())
    for _ in range(2):
        got = place.forward_mixed(hidden, ids, weights, lora)
        assert relative_error(got, want) < TOLERANCE
        alone = lora.rows < 0
        assert relative_error(got[alone.to(device)], bare[alone]) < TOLERANCE


def test_lora_cache_evicts_the_least_recently_used() -> None:
    wide, device = 2 * SMALL.intermediate, torch.device("cpu")
    whole = LoraCache(device, 1 << 30)
    for one in ADAPTERS:
        whole.get(one, wide)
    assert [whole.get(one, wide) is whole.get(one, wide) for one in ADAPTERS] == [True] * 3
    small = LoraCache(device, 1)
    first = small.get(ADAPTERS[0], wide)
    assert small.get(ADAPTERS[0], wide) is first
    small.get(ADAPTERS[1], wide)
    assert small.get(ADAPTERS[0], wide) is not first


@devices
def test_threshold_streams_large_batches_only(device: str) -> None:
    store, given = make_store(SMALL), make_inputs(SMALL, device)
    hidden, ids, weights = (tensor.detach() for tensor in (given.hidden, given.ids, given.weights))
    want = store.forward(hidden.cpu(), ids.cpu(), weights.cpu())
    place = placed_for_inference(store, device, "auto", residents=(1, 6), threshold=10)
    with torch.no_grad():
        assert relative_error(place(hidden, ids, weights, None, NO_DROPOUT, False), want) < TOLERANCE
        assert not place.layer.last_split["forward"].cpu
        assert (
            place.engine.dispatcher.mode(
                place.layer, ExpertBatch(hidden[:9], ids[:9], weights[:9], None, NO_DROPOUT), training=False
            )
            == "host_callback"
        )
        assert relative_error(place(hidden[:9], ids[:9], weights[:9], None, NO_DROPOUT, False), want[:9]) < TOLERANCE
        place.engine.dispatcher.forced = "resident"
        assert relative_error(place(hidden[:9], ids[:9], weights[:9], None, NO_DROPOUT, False), want[:9]) < TOLERANCE
    assert not place.layer.last_split["forward"].streamed and set(place.layer.last_split["forward"].resident) <= {1, 6}


@devices
def test_residents_follow_the_routing(device: str) -> None:
    store, given = make_store(SMALL), make_inputs(SMALL, device)
    hidden, weights = given.hidden.detach(), given.weights.detach()
    ids = torch.tensor([[3, 5], [3, 5], [3, 1], [5, 2]]).repeat(5, 1)
    want = store.forward(hidden[:20].cpu(), ids, weights[:20].cpu())
    place = placed_for_inference(store, device, "resident", residents=(1, 6), threshold=16)
    place.updates_residents = True
    room = place.engine.executor.residents[0]
    with torch.no_grad():
        few = place(hidden[:4], ids[:4].to(device), weights[:4], None, NO_DROPOUT, False)
        assert place.residents() == {1, 6}, "a small batch tells nothing"
        many = place(hidden[:20], ids.to(device), weights[:20], None, NO_DROPOUT, False)
        assert place.residents() == {3, 5} and room.copied_bytes == 4 * room.expert_bytes
        again = place(hidden[:4], ids[:4].to(device), weights[:4], None, NO_DROPOUT, False)
        place.engine.dispatcher.forced = "resident"
        asked = place(hidden[:4], ids[:4].to(device), weights[:4], None, NO_DROPOUT, False)
    assert set(place.layer.last_split["forward"].resident) == {3, 5}
    for got, part in ((few, want[:4]), (many, want), (again, want[:4]), (asked, want[:4])):
        assert relative_error(got, part) < TOLERANCE
    assert place.update_residents(np.array([0, 0, 0, 1, 0, 0, 0, 0])) == 0, "of equals those that are there stay"


def test_selection_of_deferred_experts_is_kt_kernels() -> None:
    """An expert among the first k - d of any token is computed at once for all; residents always are."""
    ids = torch.tensor([[0, 1, 2], [2, 3, 4], [5, -1, 0]])
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.1, 0.3], [0.9, 0.8, 0.1]])
    none = torch.zeros(7, dtype=torch.bool)
    now, late = select(ids, weights, 1, 6, none)
    # First two of each: 0 1 | 2 4 | 5 and nobody. So of the last ones 2 and 0 are somebody's first, 3 is not.
    assert now.tolist() == [[0, 1, 2], [2, -1, 4], [5, -1, 0]]
    assert late.tolist() == [[-1, -1, -1], [-1, 3, -1], [-1, -1, -1]]
    now, late = select(ids[:1], weights[:1], 2, 6, none)
    assert (now.tolist(), late.tolist()) == ([[0, -1, -1]], [[-1, 1, 2]]), "of one token exactly d"
    resident = none.clone()
    resident[1] = True
    assert select(ids[:1], weights[:1], 3, 6, resident)[0].tolist() == [[-1, 1, -1]]


def placed_model(count: int, policy: str = "resident") -> tuple[Any, Any]:
    model = tiny_packed_model().eval()
    placement = attach(model, policy=policy, device="cpu")
    assert placement is not None
    placement.place_residents(count=count)
    return model, placement


def test_model_runs_through_the_engine() -> None:
    """On torch's CPU device: what is placed there is computed by the engine, not by the store beside it."""
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want = tiny_packed_model().eval()(tokens).logits.float()
        model, placement = placed_model(4)
        got = model(tokens).logits.float()
        assert 0 < relative_error(got, want) < 0.02
        assert sum(int(row.sum()) for row in placement.counts()) == 3 * 2 * 16 * 2
        placement.detach()
        assert torch.equal(model(tokens).logits.float(), want)


def test_routing_counter_counts_what_an_engine_counts() -> None:
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    model, placement = placed_model(0)
    with torch.inference_mode():
        recorder = RoutingCounter(model)
        model(tokens)
        recorder.close()
        model(tokens)
    assert all(
        np.array_equal(2 * recorder.counts[name], row)
        for name, row in zip(placement.names, placement.counts(), strict=True)
    )
    assert sum(int(row.sum()) for row in recorder.counts.values()) == 3 * 2 * 16 * 2


def test_mixed_adapters_of_a_model_reach_the_engine() -> None:
    model, placement = placed_model(4)
    rows = torch.tensor([0, -1, 1, 0] * 4, dtype=torch.int32)
    layers = {}
    for module in expert_modules(model).values():
        store: Any = module.kt_store
        e, h, i = store.num_experts, store.hidden_size, store.intermediate_size
        which = []
        for seed in (1, 2):
            made = torch.Generator().manual_seed(seed)
            tensors = (torch.randn(e, 4, i, generator=made) / 4, torch.randn(e, h, 4, generator=made) / 4)
            which.append(LoraFactors(("down_a", "down_b"), tensors, (1.0, 1.0, 1.0)))
        layers[module] = MixedLora(rows, [packed_adapter(store, one) for one in which], which)
    tokens = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        with use_mixed_lora(layers):
            got = model(tokens).logits.float()
        assert all(row.sum() == 32 for row in placement.counts())
        placement.detach()
        bare = model(tokens).logits.float()
        with use_mixed_lora(layers):
            want = model(tokens).logits.float()
    assert relative_error(bare, want) > 0.05 and relative_error(got, want) < 0.02


def late_reference(model: Any, tokens: Tensor, late: int, dense: int | None) -> Tensor:
    """The definition, layer by layer: what the last `late` experts add comes one layer of experts later, if there is
    one. One token at a time, so that no token protects another's experts."""
    pending: dict[int, Tensor] = {}
    handles = []
    modules = list(expert_modules(model).values())

    def hook(at: int) -> Any:
        def compute(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            hidden, ids, weights = args
            store = module.kt_store
            if at == len(modules) - 1 or at + 1 == dense or at == dense:
                out = store.forward(hidden, ids, weights)
            else:
                order = weights.argsort(dim=1, descending=True)
                ranks = order.argsort(dim=1)
                first = ranks < ids.shape[1] - late
                out = store.forward(hidden, torch.where(first, ids, -1), weights)
                pending[at + 1] = store.forward(hidden, torch.where(first, -1, ids), weights)
            return out + pending.pop(at) if at in pending else out

        return compute

    for at, module in enumerate(modules):
        handles.append(module.register_forward_hook(hook(at)))
    try:
        return torch.stack([model(token.view(1, 1)).logits[0, 0].float() for token in tokens])
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("dense", [None, 1])
def test_deferred_experts_are_added_one_layer_later(dense: int | None) -> None:
    """One token at a time; with all experts on the CPU the engine gives the reference's bits. `dense`: that layer stays
    outside, as one without experts would, and nothing that is deferred is lost before it."""
    tokens = torch.randint(64, (6,), generator=torch.Generator().manual_seed(3))
    names = {} if dense is None else {f"model.layers.{dense}.mlp.experts": "cpu"}
    with torch.inference_mode():
        model = tiny_packed_model().eval()
        exact = torch.stack([model(token.view(1, 1)).logits[0, 0].float() for token in tokens])
        want = late_reference(model, tokens, 1, dense)
        placement = attach(model, policy="resident", device="cpu", device_by_layer=names)
        assert placement is not None and placement.defer(1) == (2 if dense is None else 0)
        got = torch.stack([model(token.view(1, 1)).logits[0, 0].float() for token in tokens])
        assert relative_error(got, want) < 1e-3
        assert (relative_error(got, exact) > 0.003) == (dense is None), (
            "it is an approximation, and none without a successor"
        )
        placement.defer(0)
        again = torch.stack([model(token.view(1, 1)).logits[0, 0].float() for token in tokens])
        assert torch.equal(again, exact)


def test_failed_pass_leaves_no_deferred_results() -> None:
    model, placement = placed_model(0)
    placement.defer(1)
    last: Any = list(expert_modules(model).values())[1]
    token, other = torch.tensor([[3]]), torch.tensor([[9]])
    with torch.inference_mode():
        want = model(other).logits.clone()
        handle = last.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("cut short")))
        with pytest.raises(RuntimeError, match="cut short"):
            model(token)
        handle.remove()
        assert torch.equal(model(other).logits, want)
