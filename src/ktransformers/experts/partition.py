"""Which rank of an expert-parallel group holds which experts of which layer.

A partition is a table of ranks, `owners[layer][expert]`; layers are the layers of experts in the order of the model,
experts keep the ids that the router gives them. Three functions make one: `by_experts` (ranges of ids), `by_layers`
(ranges of layers) and `by_frequency` (from counts of routed tokens). All are pure and give the same table on every
rank. A rank's store holds its experts of a layer in ascending order of their ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ktransformers.ground.errors import InputError


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
