"""Bytes of a rank for everything but the routed experts and their LoRA, and how evenly a partition divides rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ktransformers.experts.partition import ExpertPartition
from ktransformers.experts.peft_lora import lora_parameters
from ktransformers.experts.placeholder import Placeholder
from ktransformers.parallel.sharding import local_tensor, reshard
from ktransformers.quantized.widened import WidenedWeight


def parameter_bytes(model: nn.Module) -> int:
    """A tied weight counts once."""
    reshard(model)
    expert_lora = {id(parameter) for parameter in lora_parameters(model).values()}
    held = 0
    for parameter in {id(p): p for p in model.parameters()}.values():
        if isinstance(parameter, Placeholder) or id(parameter) in expert_lora:
            continue
        held += (parameter.stored if isinstance(parameter, WidenedWeight) else local_tensor(parameter)).nbytes
    return held


def imbalance(partition: ExpertPartition, counts: Sequence[Sequence[int]]) -> float:
    """Rows of the busiest rank over the mean, averaged over layers by rows; 1 is even. `counts[layer][expert]`."""
    busiest = total = 0
    for row, layer_counts in zip(partition.owners, counts, strict=True):
        loads = [0] * partition.ranks
        for owner, count in zip(row, layer_counts, strict=True):
            loads[owner] += count
        busiest, total = busiest + max(loads), total + sum(loads)
    return busiest * partition.ranks / total if total else 1.0
