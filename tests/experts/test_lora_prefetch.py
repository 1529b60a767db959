"""Prefetch of LoRA packing: the following layer's factors are packed once, with their current values."""

from __future__ import annotations

from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch

from ktransformers.experts.lora import ExpertLora, LoraPrefetch, _caches, _key, _versions, packed_adapter, repack_last
from ktransformers.experts.store import ExpertStore

EXPERTS, HIDDEN, WIDE, RANK = 4, 32, 64, 4


class Recorder(Executor):
    """Runs nothing."""

    def __init__(self) -> None:
        self.submitted: list[ExpertStore] = []

    def submit(self, work: Any, /, *args: Any, **words: Any) -> Future[Any]:
        self.submitted += args
        return Future()


def layer(seed: int) -> tuple[ExpertStore, ExpertLora]:
    torch.manual_seed(seed)
    store = ExpertStore(EXPERTS, HIDDEN, WIDE)
    store.pack(gate_up=torch.randn(EXPERTS, 2 * WIDE, HIDDEN), down=torch.randn(EXPERTS, HIDDEN, WIDE))
    tensors = torch.randn(EXPERTS, RANK, WIDE), torch.randn(EXPERTS, HIDDEN, RANK)
    return store, ExpertLora.of_tensors(("down_a", "down_b"), tensors, (1.0, 1.0, 1.0))


def is_adapter_packed(store: ExpertStore, factors: ExpertLora) -> bool:
    """Whether `packed_adapter` would return a cached adapter without packing."""
    cache = _caches.get(store)
    entry = None if cache is None else cache.entries.get(_key(factors))
    return entry is not None and entry.versions is not None and entry.versions == _versions(factors)


def output(store: ExpertStore, factors: ExpertLora) -> torch.Tensor:
    torch.manual_seed(9)
    hidden, ids, weights = torch.randn(6, HIDDEN), torch.randint(EXPERTS, (6, 2)), torch.rand(6, 2)
    return store.forward(hidden, ids, weights, adapters=[packed_adapter(store, factors)])


def test_prefetch_packs_the_following_layer() -> None:
    layers = [layer(seed) for seed in range(3)]
    with ThreadPoolExecutor(1) as worker:
        prefetch = LoraPrefetch(worker)
        for store, factors in layers:
            packed_adapter(store, factors)
            prefetch.layer_done(store)
        for _, factors in layers:
            for tensor in factors.tensors:
                tensor.mul_(2)
        assert not any(is_adapter_packed(store, factors) for store, factors in layers)
        packed_adapter(*layers[0])
        prefetch.layer_done(layers[0][0])
        worker.submit(lambda: None).result()
        assert is_adapter_packed(*layers[1]) and not is_adapter_packed(*layers[2])
    fresh, _ = layer(1)
    assert torch.equal(output(*layers[1]), output(fresh, layers[1][1]))


def test_factors_changed_after_prefetch_are_packed_again() -> None:
    store, factors = layer(0)
    before = output(store, factors)
    factors.tensors[0].mul_(2)
    repack_last(store)
    assert is_adapter_packed(store, factors)
    factors.tensors[0].mul_(2)
    assert not is_adapter_packed(store, factors)
    after = output(store, factors)
    fresh, _ = layer(0)
    assert torch.equal(after, output(fresh, factors)) and not torch.equal(after, before)


def test_recomputation_does_not_change_the_layer_order() -> None:
    """A checkpointed model recomputes its layers in reverse order; the recorded forward order stays."""
    (first, _), (second, _) = layer(0), layer(1)
    prefetch = LoraPrefetch(worker := Recorder())
    weight = torch.ones((), requires_grad=True)
    for store in (first, second):
        prefetch.layer_done(store)
    out = weight * 1
    out.register_hook(lambda grad: [prefetch.layer_done(store) for store in (second, first)] and None)
    out.backward()
    assert not worker.submitted
    prefetch.layer_done(first)
    assert worker.submitted == [second]


def test_prefetch_skips_inference_tensors() -> None:
    store, factors = layer(0)
    with torch.inference_mode():
        inference = ExpertLora.of_tensors(
            factors.roles, tuple(tensor.clone() for tensor in factors.tensors), factors.scales
        )
        before = output(store, inference)
        inference.tensors[0].mul_(2)
        repack_last(store)
        assert not torch.equal(output(store, inference), before)


def test_prefetch_without_packed_adapter_does_nothing() -> None:
    repack_last(ExpertStore(EXPERTS, HIDDEN, WIDE))
    LoraPrefetch().layer_done(layer(0)[0])
