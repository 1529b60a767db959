"""Factors that are packed before they are asked for: the next layer's, once, and with the numbers that it has then."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from ktransformers.nn.ahead import Ahead
from ktransformers.nn.factors import Factors, is_packed, pack_again, packed
from ktransformers.nn.store import ExpertStore

EXPERTS, HIDDEN, WIDE, RANK = 4, 32, 64, 4


def layer(seed: int) -> tuple[ExpertStore, Factors]:
    torch.manual_seed(seed)
    store = ExpertStore(EXPERTS, HIDDEN, WIDE)
    store.pack(gate_up=torch.randn(EXPERTS, 2 * WIDE, HIDDEN), down=torch.randn(EXPERTS, HIDDEN, WIDE))
    tensors = torch.randn(EXPERTS, RANK, WIDE), torch.randn(EXPERTS, HIDDEN, RANK)
    return store, Factors(("down_a", "down_b"), tensors, (1.0, 1.0, 1.0))


def answer(store: ExpertStore, factors: Factors) -> torch.Tensor:
    torch.manual_seed(9)
    hidden, ids, weights = torch.randn(6, HIDDEN), torch.randint(EXPERTS, (6, 2)), torch.rand(6, 2)
    return store.forward(hidden, ids, weights, adapters=[packed(store, factors)])


def test_the_layer_that_came_next_is_packed() -> None:
    layers = [layer(seed) for seed in range(3)]
    with ThreadPoolExecutor(1) as worker:
        ahead = Ahead(worker)
        for store, factors in layers:
            packed(store, factors)
            ahead.passed(store)
        for _, factors in layers:
            for tensor in factors.tensors:
                tensor.mul_(2)
        assert not any(is_packed(store, factors) for store, factors in layers)
        packed(*layers[0])
        ahead.passed(layers[0][0])
        worker.submit(lambda: None).result()
        assert is_packed(*layers[1]) and not is_packed(*layers[2])
    fresh, _ = layer(1)
    assert torch.equal(answer(*layers[1]), answer(fresh, layers[1][1]))


def test_what_changes_meanwhile_is_packed_when_it_is_asked_for() -> None:
    store, factors = layer(0)
    before = answer(store, factors)
    factors.tensors[0].mul_(2)
    pack_again(store)
    assert is_packed(store, factors)
    factors.tensors[0].mul_(2)
    assert not is_packed(store, factors)
    again = answer(store, factors)
    fresh, _ = layer(0)
    assert torch.equal(again, answer(fresh, factors)) and not torch.equal(again, before)


def test_nothing_to_pack() -> None:
    pack_again(ExpertStore(EXPERTS, HIDDEN, WIDE))
    Ahead().passed(layer(0)[0])
