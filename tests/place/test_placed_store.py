"""Inference through the engine: several adapters in one batch, batches by size. Each against the CPU's own store, to
bf16's rounding as in test_engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ktransformers.experts.backend import ExpertBatch
from ktransformers.experts.contract import expert_modules
from ktransformers.experts.lora import ExpertLora, MixedLora, packed_adapter, use_mixed_lora
from ktransformers.experts.operator import apply_experts
from ktransformers.experts.store import NO_DROPOUT
from ktransformers.place import attach
from ktransformers.place.gpu.multi_lora import LoraCache
from ktransformers.place.residents import RoutingCounter
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
        got = apply_experts(place, hidden, ids, weights, mixed=lora)
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
        assert relative_error(apply_experts(place, hidden, ids, weights, retain=False), want) < TOLERANCE
        assert not place.layer.last_split["forward"].cpu
        assert (
            place.engine.dispatcher.mode(
                place.layer, ExpertBatch(hidden[:9], ids[:9], weights[:9], None, NO_DROPOUT), training=False
            )
            == "host_callback"
        )
        assert (
            relative_error(apply_experts(place, hidden[:9], ids[:9], weights[:9], retain=False), want[:9]) < TOLERANCE
        )
        place.engine.dispatcher.forced = "resident"
        assert (
            relative_error(apply_experts(place, hidden[:9], ids[:9], weights[:9], retain=False), want[:9]) < TOLERANCE
        )
    assert not place.layer.last_split["forward"].streamed and set(place.layer.last_split["forward"].resident) <= {1, 6}


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
        store: Any = module.kt.store
        e, h, i = store.num_experts, store.hidden_size, store.intermediate_size
        which = []
        for seed in (1, 2):
            made = torch.Generator().manual_seed(seed)
            tensors = (torch.randn(e, 4, i, generator=made) / 4, torch.randn(e, h, 4, generator=made) / 4)
            which.append(ExpertLora.of_tensors(("down_a", "down_b"), tensors, (1.0, 1.0, 1.0)))
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
