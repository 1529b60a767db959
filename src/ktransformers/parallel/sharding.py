"""FSDP2 for everything but the routed experts: torch's `fully_shard` on decoder layers and on the rest of the model.

Each rank holds a share of attention, norms, routers, shared experts, embeddings, head and their LoRA, and gathers one
layer at a time. Experts are packed in host memory, one copy for all ranks of a host or divided over groups of ranks
(`parallel/exchange.py`), so placeholders are left out; so is expert LoRA, which stays in host memory and whose
gradients `parallel/distributed.py` averages. Gradients are summed and divided, because gloo has no average.
`parallel/whole_state.py` makes whole tensors of all parts.

Two things would surprise a reader. `WidenedWeight` (bf16 numbers that compute in float32) becomes a plain bf16
parameter that FSDP widens when it gathers: shards are stored in bf16, and a layer computes in float32 as before. And a
state dict of whole tensors, an adapter's file for example, is loaded by any program: a hook cuts the shards out of it.
Between forward and backward modules hold gathered parameters, so functions here reshard before they look.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ktransformers.experts.peft_lora import lora_parameters, own_lora_parameters
from ktransformers.experts.placeholder import Placeholder
from ktransformers.ground.errors import InputError
from ktransformers.parallel.distributed import GradientAverager, averaging_group, broadcast_tensors, host_group
from ktransformers.quantized.widened import WidenedWeight


@dataclass(frozen=True)
class ShardOptions:
    cpu_offload: bool = False  # shards in host memory, gathered on the device
    reshard_after_forward: bool = True  # False: layers stay gathered until backward
    layer_classes: tuple[str, ...] = ()  # classes of the layers that are gathered one by one; empty: the model's own


@dataclass(frozen=True)
class Sharding:
    """What `shard_model` has done to a model."""

    mesh: DeviceMesh
    compute_dtype: torch.dtype  # of the input embeddings when they are gathered
    averager: GradientAverager | None  # of expert LoRA, None without


_shardings: weakref.WeakKeyDictionary[nn.Module, Sharding] = weakref.WeakKeyDictionary()


def sharding_of(model: nn.Module) -> Sharding | None:
    return _shardings.get(model)


def shard_model(model: Any, options: ShardOptions, device: torch.device) -> Sharding:
    """Shard a transformers or PEFT model over all ranks, with the trained values of rank 0. A collective call, after
    adapters were added and before an optimiser exists."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise InputError("fsdp", "one process", "several, started by torchrun or accelerate launch")
    compute_dtype = model.get_input_embeddings().weight.dtype
    expert_lora = list(lora_parameters(model).values())
    _broadcast_trained(model, expert_lora)
    gathered_dtype = _store_widened(model)
    placeholders: list[Any] = [parameter for parameter in model.parameters() if isinstance(parameter, Placeholder)]
    policy = MixedPrecisionPolicy(param_dtype=gathered_dtype, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if options.cpu_offload else OffloadPolicy()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    given: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    given["ignored_params"] = {*expert_lora, *placeholders}
    for layer in _layers(model, options.layer_classes):
        fully_shard(layer, reshard_after_forward=options.reshard_after_forward, **given)
    if gathered_dtype is None and not _is_tied(model):
        fully_shard(model.get_input_embeddings(), reshard_after_forward=options.reshard_after_forward, **given)
    fully_shard(model, **given)
    model.set_force_sum_reduction_for_comms(True)
    trained: list[Tensor] = [parameter for parameter in expert_lora if parameter.requires_grad]
    trained += own_lora_parameters(model).values()
    same_experts = averaging_group(model, dist.group.WORLD)
    averager = GradientAverager(trained, same_experts, lambda: True) if trained else None
    sharding = _shardings[model] = Sharding(mesh, compute_dtype, averager)
    model.register_load_state_dict_pre_hook(_load_shards)
    model.no_sync = lambda: _without_reduction(model, sharding)
    return sharding


def _broadcast_trained(model: nn.Module, expert_lora: list[nn.Parameter]) -> None:
    """As DDP does: a rank may have drawn other initial values. Expert LoRA gets them from its averager."""
    left_out = {id(parameter) for parameter in expert_lora}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in left_out]
    broadcast_tensors([parameter.data for parameter in trained], dist.group.WORLD)


def _layers(model: Any, names: tuple[str, ...]) -> list[nn.Module]:
    """The modules that are gathered one by one, inner ones first."""
    stock = model.get_base_model() if hasattr(model, "get_base_model") else model
    wanted = names or tuple(getattr(stock, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in wanted]
    missing = [name for name in names if name not in {type(layer).__name__ for layer in layers}]
    if missing or not layers:
        given = missing[0] if missing else f"{type(stock).__name__}, which names no layers"
        raise InputError("transformer_layer_cls_to_wrap", given, "classes of the model's layers")
    return layers[::-1]


def _is_tied(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is None or head.weight is model.get_input_embeddings().weight


def _store_widened(model: nn.Module) -> torch.dtype | None:
    """Replace widened weights by their bf16 numbers. Returns the dtype that gathered parameters are cast to, None if
    nothing was widened. With parameters of several dtypes a cast would change the others, so the widened ones are
    stored in their own dtype."""
    owners = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, WidenedWeight)
    ]
    if not owners:
        return None
    others = [p for p in model.parameters() if p.is_floating_point() and not isinstance(p, Placeholder)]
    dtypes = {parameter.dtype for parameter in others}
    stored: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for module, name, parameter in owners:
        if parameter.requires_grad:
            raise InputError("fsdp", f"{name} of {type(module).__name__}, trained in bf16", "frozen weights and LoRA")
        if id(parameter) not in stored:
            numbers = parameter.stored if len(dtypes) == 1 else parameter.stored.to(parameter.dtype)
            stored[id(parameter)] = nn.Parameter(numbers.contiguous(), requires_grad=False)
        module.register_parameter(name, stored[id(parameter)])
    return dtypes.pop() if len(dtypes) == 1 else None


@contextlib.contextmanager
def _without_reduction(model: Any, sharding: Sharding) -> Iterator[None]:
    """Gradients of backward passes inside are accumulated and reduced by the next one outside."""
    model.set_requires_gradient_sync(False)
    with sharding.averager.paused() if sharding.averager is not None else contextlib.nullcontext():
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, which a forward pass without backward leaves."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard, another tensor as it is; without a copy."""
    detached: Any = tensor.detach()
    local: Tensor = detached.to_local() if isinstance(tensor, DTensor) else detached
    return local


def whole_tensor(tensor: Tensor) -> Tensor:
    """All shards of a tensor, another tensor as it is. Collective for a sharded one."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh_device = tensor.device_mesh.device_type
    on_mesh: Any = tensor.detach() if tensor.to_local().device.type == mesh_device else tensor.detach().to(mesh_device)
    whole: Tensor = on_mesh.full_tensor()
    return whole.to(tensor.to_local().device)


def cut_shard(whole: Tensor, like: DTensor) -> Tensor:
    """The rows of `whole` that this rank's shard of `like` holds, as a tensor; no communication."""
    count, rank = like.device_mesh.size(), like.device_mesh.get_local_rank()
    chunks = whole.chunk(count, dim=0)
    return chunks[rank] if rank < len(chunks) else whole[:0]


def sharded_like(whole: Tensor, like: DTensor) -> DTensor:
    """A sharded tensor with the values of `whole`, laid out as `like`."""
    local = cut_shard(whole, like).to(like.to_local().device).contiguous()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=like.stride()
    )


def _load_shards(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a load: whole tensors are copied into the shards of sharded parameters, which stand in for them then."""
    reshard(model)
    for name, parameter in model.named_parameters():
        given = state.get(prefix + name)
        if isinstance(parameter, DTensor) and given is not None and not isinstance(given, DTensor):
            if given.shape != parameter.shape:
                continue  # reported by the load
            with torch.no_grad():
                parameter.to_local().copy_(cut_shard(given, parameter))
            state[prefix + name] = parameter.detach()


def on_any_rank(flags: list[bool]) -> list[bool]:
    """Whether a flag is set on any rank. A collective call with as many flags on all."""
    values = torch.tensor(flags, dtype=torch.uint8, device="cpu")
    dist.all_reduce(values, dist.ReduceOp.MAX, group=host_group(dist.group.WORLD))
    return [bool(value) for value in values.tolist()]


def split_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups of an optimiser with sharded and whole tensors apart: its kernels take a list of one kind."""
    split = []
    for group in groups:
        for is_sharded in (True, False):
            members = [p for p in group["params"] if isinstance(p, DTensor) == is_sharded]
            if members:
                split.append({**group, "params": members})
    return split


def separate_steps(optimizer: Any) -> None:
    """Let the optimiser see sharded and whole tensors in groups of their own while it steps. Outside of a step its
    groups are those that it was built with, so its state, and that of a scheduler, is the one of a single process."""
    given: list[list[dict[str, Any]]] = []

    def before(stepping: Any, *_: Any) -> None:
        given.append(stepping.param_groups)
        stepping.param_groups = split_groups(stepping.param_groups)

    def after(stepping: Any, *_: Any) -> None:
        stepping.param_groups = given.pop()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
