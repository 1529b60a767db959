"""What ranks hold in parts, as one process holds it: trained tensors, states of the optimiser, the norm of gradients.

A parameter is divided in one of two ways, and a model may have both. FSDP2 shards everything but the experts by rows
over all ranks (`parallel/sharding.py`); the ranks of an expert-parallel group hold the LoRA factors of different
experts, and other groups hold the same (`experts/lora_shards.py`). Files have whole tensors, so that a run goes on
with any number of ranks and any division. All functions are collective calls of all ranks, which visit parameters in
one order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ktransformers.experts.lora_shards import FactorShard, factor_shards
from ktransformers.ground.errors import InputError
from ktransformers.parallel.distributed import host_group
from ktransformers.parallel.exchange import ExpertGroup, expert_group
from ktransformers.parallel.sharding import local_tensor, reshard, sharded_like, sharding_of, whole_tensor


def is_divided(model: nn.Module) -> bool:
    """Whether this process holds parts of what is trained; not a collective call."""
    return sharding_of(model) is not None or expert_group(model) is not None


def _gather(part: Tensor, divided: FactorShard, group: ExpertGroup) -> Tensor | None:
    """On the first process of all; ranks of other groups hold the same and take no part."""
    return gather_experts(part, divided, group.members) if group.is_first_group else None


def whole_trained(model: nn.Module) -> dict[str, Tensor]:
    """Name -> whole tensor of every trained parameter. Factors of divided experts are on the first process alone."""
    reshard(model)
    group, shards = expert_group(model), factor_shards(model)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        whole = (
            _gather(parameter, shards[name], group) if group is not None and name in shards else whole_tensor(parameter)
        )
        if whole is not None:
            tensors[name] = whole
    return tensors


def gradient_norm(model: nn.Module) -> Tensor:
    """The norm of all gradients, on the CPU."""
    group, shards = expert_group(model), factor_shards(model)
    sharded, divided, whole = squares = torch.zeros(3, dtype=torch.float64, device="cpu").unbind()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            kind = 0 if isinstance(parameter.grad, DTensor) else 1 if name in shards else 2
            squares[kind].add_(local_tensor(parameter.grad).double().square().sum().cpu())
    if sharding_of(model) is not None:
        dist.all_reduce(sharded, group=host_group(dist.group.WORLD))
    if group is not None:
        dist.all_reduce(divided, group=group.members)
    return (sharded + divided + whole).sqrt().float()


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` over all parameters of the model; returns the norm before."""
    norm = gradient_norm(model)
    scale = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
    if scale < 1.0 or not bool(norm.isfinite()):
        for parameter in model.parameters():
            if parameter.grad is not None:
                local_tensor(parameter.grad).mul_(scale)
    return norm


def _parameters(optimizer: Any) -> list[Tensor]:
    """In the order of the indices of a state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _divisions(model: nn.Module) -> dict[Tensor, FactorShard]:
    shards = factor_shards(model)
    return {parameter: shards[name] for name, parameter in model.named_parameters() if name in shards}


def whole_optimizer_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The optimiser's state dict as one process has it, on the first process; on others states of divided experts are
    None."""
    state: dict[str, Any] = optimizer.state_dict()
    group, divisions, parameters = expert_group(model), _divisions(model), _parameters(optimizer)

    def whole(key: str, value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor):
            return value
        divided = divisions.get(parameter)
        if divided is None or group is None or not value.dim():
            return whole_tensor(value)
        return _gather(_like(key, value, parameter), divided, group)

    entries = {
        index: {key: whole(key, value, parameters[index]) for key, value in state["state"][index].items()}
        for index in sorted(state["state"])
    }
    return {**state, "state": entries}


def _like(key: str, value: Tensor, parameter: Tensor) -> Tensor:
    if value.shape != parameter.shape:
        given = f"an optimizer with {key} of shape {list(value.shape)} for a parameter of {list(parameter.shape)}"
        raise InputError("optim", given, "one whose states have the shape of their parameter, with kt_expert_parallel")
    return value


def load_optimizer_state(model: nn.Module, optimizer: Any, state: Mapping[str, Any]) -> None:
    """The reverse of `whole_optimizer_state`, from a run with any number of ranks; needs no communication."""
    divisions, parameters = _divisions(model), _parameters(optimizer)

    def own(value: Any, parameter: Tensor) -> Any:
        divided = divisions.get(parameter)
        if not isinstance(value, Tensor):
            return value
        if divided is not None and tuple(value.shape) == divided.whole_shape(parameter):
            return divided.cut(value).clone()
        if isinstance(parameter, DTensor) and value.shape == parameter.shape:
            return sharded_like(value, parameter)
        return value

    entries = {
        index: {key: own(value, parameters[int(index)]) for key, value in entry.items()}
        for index, entry in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": entries})


def gather_experts(part: Tensor, divided: FactorShard, members: Any) -> Tensor | None:
    """The whole tensor on the first rank of the group, None on the others. A collective call; `part` is a factor, or
    anything of its shape that belongs to it, such as a state of the optimiser."""
    shard = divided.shard
    part = part.detach().cpu().contiguous()
    if shard.rank != 0:
        if part.numel():
            dist.send(part, dist.get_global_rank(members, 0), group=members)
        return None
    whole = torch.empty(divided.whole_shape(part), dtype=part.dtype)
    divided.insert(whole, part, shard.experts)
    for other in range(1, shard.ranks):
        experts = shard.experts_of(other)
        if experts:
            arrived = torch.empty(divided.shape(part, len(experts)), dtype=part.dtype)
            dist.recv(arrived, dist.get_global_rank(members, other), group=members)
            divided.insert(whole, arrived, experts)
    return whole


def scatter_experts(whole: Tensor | None, part: Tensor, divided: FactorShard, members: Any) -> None:
    """The reverse of `gather_experts`: fills `part` on the other ranks of the group from the whole tensor on the first,
    whose own part is left to the caller. A collective call."""
    shard = divided.shard
    if shard.rank != 0:
        if part.numel():
            arrived = torch.empty(part.shape, dtype=part.dtype)
            dist.recv(arrived, dist.get_global_rank(members, 0), group=members)
            part.copy_(arrived)
        return
    for other in range(1, shard.ranks):
        experts = shard.experts_of(other)
        if experts:
            sent = torch.full(divided.shape(part, len(experts)), torch.nan, dtype=part.dtype)
            if whole is not None:
                sent.copy_(divided.cut(whole, experts))
            dist.send(sent, dist.get_global_rank(members, other), group=members)
