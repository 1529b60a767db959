"""Factors that are packed before they are asked for: the next layer's, once, and with the numbers that it has then."""

from __future__ import annotations

from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch

from ktransformers.nn.lora_factors import LoraFactors, is_adapter_packed, packed_adapter, repack_last
from ktransformers.nn.lora_prefetch import LoraPrefetch
from ktransformers.nn.store import ExpertStore

EXPERTS, HIDDEN, WIDE, RANK = 4, 32, 64, 4


class Recorder(Executor):
    """Runs nothing."""

    def __init__(self) -> None:
        self.asked: list[ExpertStore] = []

    def submit(self, work: Any, /, *args: Any, **words: Any) -> Future[Any]:
        self.asked += args
        return Future()


def layer(seed: int) -> tuple[ExpertStore, LoraFactors]:
    torch.manual_seed(seed)
    store = ExpertStore(EXPERTS, HIDDEN, WIDE)
    store.pack(gate_up=torch.randn(EXPERTS, 2 * WIDE, HIDDEN), down=torch.randn(EXPERTS, HIDDEN, WIDE))
    tensors = torch.randn(EXPERTS, RANK, WIDE), torch.randn(EXPERTS, HIDDEN, RANK)
    return store, LoraFactors(("down_a", "down_b"), tensors, (1.0, 1.0, 1.0))


def answer(store: ExpertStore, factors: LoraFactors) -> torch.Tensor:
    torch.manual_seed(9)
    hidden, ids, weights = torch.randn(6, HIDDEN), torch.randint(EXPERTS, (6, 2)), torch.rand(6, 2)
    return store.forward(hidden, ids, weights, adapters=[packed_adapter(store, factors)])


def test_the_layer_that_came_next_is_packed() -> None:
    layers = [layer(seed) for seed in range(3)]
    with ThreadPoolExecutor(1) as worker:
        ahead = LoraPrefetch(worker)
        for store, factors in layers:
            packed_adapter(store, factors)
            ahead.layer_done(store)
        for _, factors in layers:
            for tensor in factors.tensors:
                tensor.mul_(2)
        assert not any(is_adapter_packed(store, factors) for store, factors in layers)
        packed_adapter(*layers[0])
        ahead.layer_done(layers[0][0])
        worker.submit(lambda: None).result()
        assert is_adapter_packed(*layers[1]) and not is_adapter_packed(*layers[2])
    fresh, _ = layer(1)
    assert torch.equal(answer(*layers[1]), answer(fresh, layers[1][1]))


def test_what_changes_meanwhile_is_packed_when_it_is_asked_for() -> None:
    store, factors = layer(0)
    before = answer(store, factors)
    factors.tensors[0].mul_(2)
    repack_last(store)
    assert is_adapter_packed(store, factors)
    factors.tensors[0].mul_(2)
    assert not is_adapter_packed(store, factors)
    again = answer(store, factors)
    fresh, _ = layer(0)
    assert torch.equal(again, answer(fresh, factors)) and not torch.equal(again, before)


def test_recomputation_is_no_walk() -> None:
    """The layers of a checkpointed model come by backwards in a backward pass; the order of the walk forward stays."""
    (first, _), (second, _) = layer(0), layer(1)
    ahead = LoraPrefetch(worker := Recorder())
    weight = torch.ones((), requires_grad=True)
    for store in (first, second):
        ahead.layer_done(store)
    out = weight * 1
    out.register_hook(lambda grad: [ahead.layer_done(store) for store in (second, first)] and None)
    out.backward()
    assert not worker.asked
    ahead.layer_done(first)
    assert worker.asked == [second]


def test_inference_tensors_are_left_to_whoever_asks() -> None:
    store, factors = layer(0)
    with torch.inference_mode():
        mine = LoraFactors(factors.roles, tuple(tensor.clone() for tensor in factors.tensors), factors.scales)
        before = answer(store, mine)
        mine.tensors[0].mul_(2)
        repack_last(store)
        assert not torch.equal(answer(store, mine), before)


def test_nothing_to_pack() -> None:
    repack_last(ExpertStore(EXPERTS, HIDDEN, WIDE))
    LoraPrefetch().layer_done(layer(0)[0])
