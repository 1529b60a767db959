"""Expert LoRA under DistributedDataParallel: kept from its buckets, and its gradients averaged here.

DDP wants all parameters of a module on one kind of device, and expert LoRA stays in host memory. So the model carries
the names that DDP leaves alone: those of the expert LoRA, and of the ghosts, which have nothing to broadcast. What DDP
does for the others then happens here: the first rank's numbers are broadcast, and after each backward pass that DDP
synchronises (not under `no_sync`) gradients are averaged in place, over gloo where DDP's own group is for GPUs only.
The surprising decision: no call is needed. An expert layer that is computed inside DDP's forward finds the DDP around
it, so that trainers which build their DDP themselves train expert LoRA without knowing of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.nn.parallel import DistributedDataParallel

from ktransformers.nn.peft_lora import lora_parameters
from ktransformers.nn.placeholder import Placeholder

# A module's name as DDP sees it, when it wraps the model itself and when it wraps PEFT's.
PREFIXES = ("", "base_model.model.")
_followed: weakref.WeakKeyDictionary[nn.Module, Averaged] = weakref.WeakKeyDictionary()


class HostNames:
    """Names of what DDP is to leave alone, found when DDP asks: adapters come after the model."""

    def __init__(self, model: nn.Module, others: Iterable[str] = ()) -> None:
        self._model = weakref.ref(model)
        self._others = others

    def __iter__(self) -> Iterator[str]:
        yield from self._others
        model = self._model()
        if model is None:
            return
        parameters, lora = dict(model.named_parameters()), lora_parameters(model)
        names = [name for name, parameter in parameters.items() if isinstance(parameter, Placeholder)]
        # DDP refuses a module of which it is to train nothing; expert LoRA alone, in a model on the CPU, is its own.
        rest = [parameter for name, parameter in parameters.items() if name not in lora]
        if any(parameter.requires_grad or parameter.device.type != "cpu" for parameter in rest):
            names += lora
        yield from (prefix + name for name in names for prefix in PREFIXES)


def keep_from_ddp(model: nn.Module) -> None:
    others = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    model._ddp_params_and_buffers_to_ignore = HostNames(model, others)  # type: ignore[assignment]


class Averaged:
    """The expert LoRA of one DDP module, averaged after its backward passes. `parameters` in the order of all ranks."""

    def __init__(self, parameters: list[nn.Parameter], ddp: DistributedDataParallel) -> None:
        self._parameters = parameters
        self._ddp = weakref.ref(ddp)
        self._group = _host_group(ddp.process_group)
        self._arrived: set[int] = set()
        first = dist.get_global_rank(self._group, 0)
        for parameter in parameters:
            dist.broadcast(parameter.data, first, group=self._group)
        increment_version(parameters)
        for index, parameter in enumerate(parameters):
            watched: Any = parameter
            watched.register_post_accumulate_grad_hook(lambda _, index=index: self._note(index))

    def _note(self, index: int) -> None:
        ddp = self._ddp()
        if ddp is None or not ddp.require_backward_grad_sync:
            return
        if not self._arrived:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish)
        self._arrived.add(index)

    def _finish(self) -> None:
        arrived, self._arrived = self._arrived, set()
        _average(self._parameters, arrived, self._group)


def follow(ddp: DistributedDataParallel) -> None:
    """Called where experts are computed for a backward pass; the first time, every rank is here at the same moment."""
    if ddp in _followed:
        return
    trained = [
        parameter
        for name, parameter in lora_parameters(ddp.module).items()
        if parameter.requires_grad and name in ddp.parameters_to_ignore
    ]
    if trained:
        _followed[ddp] = Averaged(trained, ddp)


def active_ddp() -> DistributedDataParallel | None:
    """The DDP whose forward pass this is."""
    ddp: DistributedDataParallel | None = DistributedDataParallel._active_ddp_module
    return ddp


def average_expert_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """For training loops without DDP: average the expert LoRA's gradients over all ranks, each of which calls this."""
    parameters = [parameter for parameter in lora_parameters(model).values() if parameter.requires_grad]
    arrived = {index for index, parameter in enumerate(parameters) if parameter.grad is not None}
    _average(parameters, arrived, _host_group(group or dist.group.WORLD))


def _average(parameters: list[nn.Parameter], arrived: set[int], group: dist.ProcessGroup) -> None:
    """Gradients that some rank has; a rank that lacks one counts as zero."""
    size = dist.get_world_size(group)
    if size == 1:
        return
    wanted = torch.zeros(len(parameters), dtype=torch.uint8)
    wanted[list(arrived)] = 1
    dist.all_reduce(wanted, dist.ReduceOp.MAX, group=group)
    work = []
    for index in wanted.nonzero().flatten().tolist():
        parameter = parameters[index]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        work.append((parameter.grad, dist.all_reduce(parameter.grad, group=group, async_op=True)))
    for gradient, done in work:
        done.wait()
        gradient.div_(size)


def _host_group(group: Any) -> dist.ProcessGroup:
    """The group itself if it can pass tensors in host memory, otherwise a gloo group of the same ranks."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        made: Any = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
        return made  # type: ignore[no-any-return]
    return group  # type: ignore[no-any-return]
