"""Expert parallelism of a run (`kt_expert_parallel: N` under torchrun): groups of N ranks divide the experts.

Every rank trains on its own rows, attention and router included; rows travel to the ranks that hold their experts
(`parallel/exchange.py`). A rank that has fewer passes in a step than others takes part in the rest of theirs with rows
that count nothing. Partition and number of processes are checked before a model is loaded. Norms, adapters and
optimiser states over all experts are made by `parallel/whole_state.py`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ktransformers.experts.contract import expert_modules, read_contract
from ktransformers.experts.lora_shards import factor_shards
from ktransformers.experts.partition import ExpertPartition, ExpertShard, by_experts, by_frequency, by_layers
from ktransformers.ground.errors import InputError
from ktransformers.parallel.exchange import connect, expert_group, new_expert_group
from ktransformers.place.residents import load_counts
from ktransformers.train.settings import TrainSettings
from ktransformers.train.sharding import OPTIMIZERS


def check_ranks(settings: TrainSettings) -> None:
    """Raises, before anything is read, if the processes cannot form the groups."""
    ranks = settings.experts.kt_expert_parallel
    if ranks is None:
        return
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world % ranks:
        given = f"{ranks} with {world} {'process' if world == 1 else 'processes'}"
        remedy = f"start the run with torchrun and {ranks}, {2 * ranks}, ... processes"
        raise InputError("kt_expert_parallel", given, "a divisor of the number of processes", remedy)
    if ranks > 1:
        _check_settings(settings)
    if settings.experts.kt_expert_partition == "frequency" and settings.place.init_expert_location is None:
        remedy = "record them in an earlier run with kt_record_experts, and name the file"
        raise InputError("init_expert_location", None, "counts of routed tokens for kt_expert_partition", remedy)


def _check_settings(settings: TrainSettings) -> None:
    options = settings.place
    if options.policy not in ("cpu", "auto"):
        raise InputError("kt_place", options.policy, "cpu with kt_expert_parallel", "experts are computed by the CPUs")
    optimizer = str(settings.trainer.get("optim", OPTIMIZERS[0]))
    if optimizer not in OPTIMIZERS:
        expected = f"with kt_expert_parallel one of {', '.join(OPTIMIZERS)}"
        raise InputError("optim", optimizer, expected, "states of others cannot be divided by experts")
    if settings.trainer.get("fp16"):
        remedy = "the gradient scaler of each rank sees the experts of that rank alone"
        raise InputError("fp16", True, "bf16 or float32 with kt_expert_parallel", remedy)


def make_partition(settings: TrainSettings, model: nn.Module) -> ExpertPartition | None:
    """The experts of each rank of a group; `model` may be on the meta device. None: every process has all."""
    ranks = settings.experts.kt_expert_parallel
    if ranks is None or ranks == 1:
        return None
    contracts = {name: read_contract(name, module) for name, module in expert_modules(model).items()}
    counts = {contract.shape.num_experts for contract in contracts.values()}
    if len(counts) != 1:
        raise InputError("kt_expert_parallel", f"layers of {sorted(counts)} experts", "one number in all layers")
    experts, layers = counts.pop(), len(contracts)
    if settings.experts.kt_expert_partition == "layers":
        return by_layers(layers, experts, ranks)
    if settings.experts.kt_expert_partition == "frequency":
        file = Path(str(settings.place.init_expert_location))
        rows = load_counts(file, list(contracts), experts)
        return by_frequency([row.tolist() for row in rows], ranks)
    return by_experts(layers, experts, ranks)


def own_shard(partition: ExpertPartition | None) -> ExpertShard | None:
    """The part of this process."""
    if partition is None:
        return None
    return ExpertShard(partition, int(os.environ.get("RANK", "0")) % partition.ranks)


def connect_ranks(model: nn.Module, partition: ExpertPartition | None) -> None:
    """A collective call of all processes, once the model is loaded."""
    if partition is not None:
        connect(model, new_expert_group(partition.ranks))


def check_trained(model: nn.Module) -> None:
    """Raises if expert LoRA is all that is trained: DDP needs a parameter that is the same on all ranks."""
    if expert_group(model) is None:
        return
    shards = factor_shards(model)
    if not any(parameter.requires_grad and name not in shards for name, parameter in model.named_parameters()):
        raise InputError(
            "lora_target", "routed experts alone", "with kt_expert_parallel also modules of every rank", "add q_proj"
        )


def most_passes(model: nn.Module, passes: int) -> int:
    """The largest number of passes that a rank of the group has in this step. A collective call."""
    group = expert_group(model)
    if group is None:
        return passes
    most = torch.tensor([passes])
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group.members)
    return int(most)


def share_flags(model: nn.Module, module: str, experts: Tensor, flags: Sequence[bool]) -> tuple[Tensor, list[bool]]:
    """Joins `experts` [e] of this rank and (b_seen, a_seen, a_could) over the group. A collective call."""
    group = expert_group(model)
    layer: Any = model.get_submodule(module)
    shard = layer.get_base_layer().kt.shard
    joined = torch.zeros(len(shard.owners) + 3, dtype=torch.uint8)
    joined[list(shard.experts)] = experts.to(torch.uint8)
    joined[-3:] = torch.tensor(list(flags), dtype=torch.uint8)
    assert group is not None
    dist.all_reduce(joined, dist.ReduceOp.MAX, group=group.members)
    return joined[:-3].bool(), joined[-3:].bool().tolist()


def is_writer(model: nn.Module) -> tuple[bool, bool]:
    """(this process takes part in writing the output, it is the one that writes)."""
    group = expert_group(model)
    first = int(os.environ.get("RANK", "0")) == 0
    return (first, first) if group is None else (group.is_first_group, first)
