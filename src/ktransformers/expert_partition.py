"""Which rank of an expert-parallel group holds which experts of which layer, and the bytes that travel between ranks.

A partition is a table of ranks, `owners[layer][expert]`; layers are the layers of experts in the order of the model,
experts keep the ids that the router gives them. Three functions make one: `by_experts` (ranges of ids), `by_layers`
(ranges of layers) and `by_frequency` (from counts of routed tokens). All are pure and give the same table on every
rank. A rank's store holds its experts of a layer in ascending order of their ids.

`exchange_bytes` is what a rank sends in one pass of one layer of experts (`nn/exchange.py`): a row of hidden states
goes to each rank that has at least one of its experts, once, with the ids and weights of its k routes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ktransformers.errors import InputError

PARTITIONS = ("experts", "layers", "frequency")
COUNT_BYTES = 8  # of the number of rows that a rank announces to each other rank, before the rows
FIELD_ALIGNMENT = 8  # bytes; hidden states, weights and ids of a row each begin at a multiple of it
ID_BYTES = 4


@dataclass(frozen=True)
class LayerShard:
    """The experts of one layer that one rank holds: `owners[expert]` is the rank of each expert of the layer."""

    owners: tuple[int, ...]
    rank: int
    ranks: int

    @cached_property
    def experts(self) -> tuple[int, ...]:
        """Ids of this rank's experts, ascending: the order of its store."""
        return tuple(expert for expert, owner in enumerate(self.owners) if owner == self.rank)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The place of each expert of the layer in the store of its rank."""
        counts = [0] * self.ranks
        positions = []
        for owner in self.owners:
            positions.append(counts[owner])
            counts[owner] += 1
        return tuple(positions)

    def experts_of(self, rank: int) -> tuple[int, ...]:
        return tuple(expert for expert, owner in enumerate(self.owners) if owner == rank)


@dataclass(frozen=True)
class ExpertPartition:
    """`owners[layer][expert]` is a rank, 0 to `ranks - 1`. A rank may have no expert of a layer."""

    owners: tuple[tuple[int, ...], ...]
    ranks: int

    def __post_init__(self) -> None:
        for layer, row in enumerate(self.owners):
            wrong = next((owner for owner in row if not 0 <= owner < self.ranks), None)
            if wrong is not None:
                raise InputError(f"layer {layer}", f"rank {wrong}", f"0 to {self.ranks - 1}")

    def layer(self, layer: int, rank: int) -> LayerShard:
        return LayerShard(self.owners[layer], rank, self.ranks)

    def experts_per_rank(self) -> tuple[int, ...]:
        """Experts of all layers that each rank holds, which is its share of the memory."""
        counts = [0] * self.ranks
        for row in self.owners:
            for owner in row:
                counts[owner] += 1
        return tuple(counts)

    def imbalance(self, counts: Sequence[Sequence[int]]) -> float:
        """Rows of the busiest rank over the mean, averaged over layers by rows: every layer waits for its busiest rank.
        1 is even; `counts[layer][expert]` are routed rows."""
        busiest = total = 0
        for row, layer_counts in zip(self.owners, counts, strict=True):
            loads = [0] * self.ranks
            for owner, count in zip(row, layer_counts, strict=True):
                loads[owner] += int(count)
            busiest, total = busiest + max(loads), total + sum(loads)
        return busiest * self.ranks / total if total else 1.0


@dataclass(frozen=True)
class ExpertShard:
    """The part of a partition that one rank holds, the argument of `load_model`."""

    partition: ExpertPartition
    rank: int

    def layer(self, layer: int) -> LayerShard:
        return self.partition.layer(layer, self.rank)


def by_experts(layers: int, experts: int, ranks: int) -> ExpertPartition:
    """Ranges of expert ids, the same in every layer; sizes differ by at most one."""
    _require_enough("experts of a layer", experts, ranks)
    row = tuple(expert * ranks // experts for expert in range(experts))
    return ExpertPartition((row,) * layers, ranks)


def by_layers(layers: int, experts: int, ranks: int) -> ExpertPartition:
    """Ranges of layers: a rank has all experts of its layers, and all rows of such a layer go to it."""
    _require_enough("layers of experts", layers, ranks)
    return ExpertPartition(tuple((layer * ranks // layers,) * experts for layer in range(layers)), ranks)


def by_frequency(counts: Sequence[Sequence[int]], ranks: int) -> ExpertPartition:
    """Even work by measured routing: `counts[layer][expert]` are routed tokens. In every layer the busiest expert that
    is left goes to the rank with the fewest rows so far; no rank gets more than its share of the experts, rounded up,
    so that memory stays even too."""
    rows = []
    for layer_counts in counts:
        _require_enough("experts of a layer", len(layer_counts), ranks)
        most = math.ceil(len(layer_counts) / ranks)
        loads, sizes, row = [0] * ranks, [0] * ranks, [0] * len(layer_counts)
        for expert in sorted(range(len(layer_counts)), key=lambda expert: (-int(layer_counts[expert]), expert)):
            owner = min(
                (rank for rank in range(ranks) if sizes[rank] < most), key=lambda rank: (loads[rank], sizes[rank], rank)
            )
            row[expert] = owner
            loads[owner] += int(layer_counts[expert])
            sizes[owner] += 1
        rows.append(tuple(row))
    return ExpertPartition(tuple(rows), ranks)


def _require_enough(what: str, given: int, ranks: int) -> None:
    if ranks < 1:
        raise InputError("kt_expert_parallel", ranks, "1 or more")
    if given < ranks:
        raise InputError(
            "kt_expert_parallel", f"{ranks} ranks for {given} {what}", f"at most {given}", "use fewer ranks per group"
        )


def row_bytes(hidden: int, top_k: int, element: int, weight: int = 4) -> tuple[int, int, int]:
    """Bytes of one row on its way: hidden states, k weights and k ids to the rank that computes; the result back (also
    the gradient of the output in backward); and in backward the gradients of hidden states and weights back. `element`
    and `weight` are the bytes of one number of the hidden states and of the routing weights."""
    state, weights, ids = (_aligned(size) for size in (hidden * element, top_k * weight, top_k * ID_BYTES))
    return state + weights + ids, state, state + weights


def _aligned(size: int) -> int:
    return -(-size // FIELD_ALIGNMENT) * FIELD_ALIGNMENT


def reach_probability(experts: int, held: int, top_k: int) -> float:
    """Probability that at least one of a token's k different experts is among the `held` of a rank, if all are equally
    likely."""
    if held <= 0:
        return 0.0
    if experts - held < top_k:
        return 1.0
    return 1.0 - math.comb(experts - held, top_k) / math.comb(experts, top_k)


def exchanged_rows(tokens: float, owners: Sequence[int], ranks: int, rank: int, top_k: int) -> float:
    """Rows that `rank` is expected to send to other ranks for a layer with these owners, with uniform routing."""
    held = [sum(owner == other for owner in owners) for other in range(ranks)]
    return sum(tokens * reach_probability(len(owners), held[other], top_k) for other in range(ranks) if other != rank)


def exchange_bytes(rows_out: float, rows_in: float, ranks: int, sizes: tuple[int, int, int], training: bool) -> float:
    """Bytes that a rank sends in one pass of one layer: forward, and with `training` also backward.

    `rows_out` go from this rank to others and `rows_in` come from them; results travel against them. `sizes` are those
    of `row_bytes`. A layer that gradient checkpointing recomputes under `kt_cpu_activation: recompute` does its forward
    exchange twice; under `retain` it does not.
    """
    there, result, gradients = sizes
    forward = COUNT_BYTES * (ranks - 1) + rows_out * there + rows_in * result
    backward = rows_out * result + rows_in * gradients
    return forward + (backward if training else 0.0)
