"""Partitions of experts over ranks; all pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktransformers.experts.partition import ExpertPartition, by_experts, by_frequency, by_layers
from ktransformers.ground.errors import InputError
from tests.support.rank_memory import imbalance


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 9))
def test_ranges_of_ids_cover_every_expert_once_and_evenly(layers: int, experts: int, ranks: int) -> None:
    if experts < ranks:
        with pytest.raises(InputError, match="kt_expert_parallel"):
            by_experts(layers, experts, ranks)
        return
    partition = by_experts(layers, experts, ranks)
    for layer in range(layers):
        held = [partition.layer(layer, rank).experts for rank in range(ranks)]
        assert [expert for ids in held for expert in ids] == list(range(experts))
        assert max(map(len, held)) - min(map(len, held)) <= 1


def test_positions_are_places_in_the_store_of_the_owner() -> None:
    shard = ExpertPartition(((1, 0, 1, 1, 0),), 2).layer(0, 1)
    assert shard.experts == (0, 2, 3) and shard.experts_of(0) == (1, 4)
    assert shard.positions == (0, 0, 1, 2, 1)


def test_ranges_of_layers_give_whole_layers() -> None:
    partition = by_layers(5, 4, 2)
    assert [set(row) for row in partition.owners] == [{0}, {0}, {0}, {1}, {1}]
    assert partition.layer(4, 0).experts == () and Counter(itertools.chain(*partition.owners)) == {0: 12, 1: 8}
    with pytest.raises(InputError, match="layers of experts"):
        by_layers(3, 8, 4)


@given(st.lists(st.lists(st.integers(0, 10**9), min_size=6, max_size=6), min_size=1, max_size=4), st.integers(1, 6))
def test_frequency_is_even_in_memory_and_never_worse_than_the_largest_expert_above_the_mean(
    counts: list[list[int]], ranks: int
) -> None:
    partition = by_frequency(counts, ranks)
    for row, layer_counts in zip(partition.owners, counts, strict=True):
        held = [[expert for expert in range(6) if row[expert] == rank] for rank in range(ranks)]
        assert all(0 < len(experts) <= math.ceil(6 / ranks) for experts in held)
        assert sorted(itertools.chain(*held)) == list(range(6))
        assert partition == by_frequency(counts, ranks)
        if ranks == 1:
            assert sum(layer_counts) == sum(layer_counts[expert] for expert in held[0])


def test_frequency_evens_what_ranges_of_ids_do_not() -> None:
    counts = [[100, 90, 80, 70, 4, 3, 2, 1]] * 3
    assert imbalance(by_experts(3, 8, 2), counts) > 1.9
    assert imbalance(by_frequency(counts, 2), counts) < 1.03
    assert imbalance(by_frequency([[0] * 8], 2), [[0] * 8]) == 1.0


def test_wrong_ranks_are_refused() -> None:
    with pytest.raises(InputError, match="rank 2"):
        ExpertPartition(((0, 2),), 2)
    with pytest.raises(InputError, match="1 or more"):
        by_experts(1, 4, 0)
