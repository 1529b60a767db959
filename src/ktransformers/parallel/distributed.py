"""Expert LoRA under DistributedDataParallel and FSDP2: left out of both, with an all-reduce of its own.

DDP requires all parameters of a module on one kind of device, and expert LoRA stays in host memory. So the model lists
the names that DDP ignores: the expert LoRA, and the placeholders, widened and quantized weights, which DDP cannot
broadcast and which are the same on every rank. For the expert LoRA this module then does what DDP does: it broadcasts
the values of rank 0, and after every backward pass that DDP synchronises (not under `no_sync`) it averages gradients in
place, over gloo if DDP's own group has no CPU backend. No call by the trainer is needed: an expert layer that runs
inside DDP's forward finds the active DDP module and registers the hooks, because trainers build their DDP themselves
and know nothing of expert LoRA. Under FSDP2 (`parallel/sharding.py`) the same averager is attached when the model is
sharded.

Where the ranks of a group divide the experts (`parallel/exchange.py`), a rank's gradient is already the mean over its
group, and is averaged over the ranks that hold the same experts in other groups, if there are any."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.parallel import DistributedDataParallel

from ktransformers.experts.peft_lora import before_gradients, lora_parameters, own_lora_parameters
from ktransformers.experts.placeholder import Placeholder
from ktransformers.parallel.exchange import expert_group
from ktransformers.quantized.frozen_weight import FrozenWeight

# Prefixes of parameter names that DDP sees: of the model itself, and of the model inside a PeftModel.
DDP_NAME_PREFIXES = ("", "base_model.model.")
_averagers: weakref.WeakKeyDictionary[nn.Module, GradientAverager] = weakref.WeakKeyDictionary()
_gloo_groups: dict[Any, Any] = {}  # group without a CPU backend -> gloo group of the same ranks


class DdpIgnoredNames:
    """Names of the parameters that DDP ignores, collected when DDP reads them: adapters are added after the model is
    loaded."""

    def __init__(self, model: nn.Module, already_ignored: Iterable[str] = ()) -> None:
        self._model = weakref.ref(model)
        self._already_ignored = already_ignored

    def __iter__(self) -> Iterator[str]:
        yield from self._already_ignored
        model = self._model()
        if model is None:
            return
        parameters, lora = dict(model.named_parameters()), lora_parameters(model)
        names = [name for name, parameter in parameters.items() if isinstance(parameter, Placeholder | FrozenWeight)]
        # DDP raises if it has no trainable parameter. A CPU model that trains expert LoRA alone leaves it to DDP, if
        # all ranks hold the same experts.
        other_parameters = [parameter for name, parameter in parameters.items() if name not in lora]
        others = any(parameter.requires_grad or parameter.device.type != "cpu" for parameter in other_parameters)
        if others or expert_group(model) is not None:
            names += lora
        yield from (prefix + name for name in names for prefix in DDP_NAME_PREFIXES)


def exclude_from_ddp(model: nn.Module) -> None:
    """Add the expert LoRA and the placeholders to the names that DDP ignores."""
    already_ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    model._ddp_params_and_buffers_to_ignore = DdpIgnoredNames(model, already_ignored)  # type: ignore[assignment]


class GradientAverager:
    """Averages the gradients of a model's expert LoRA over `group` after its backward passes, if `is_synced` says so at
    the time. `parameters` has the same order on all ranks and gets the values of the group's first rank. Without a
    group this rank alone has them, and nothing is averaged."""

    def __init__(self, parameters: list[Tensor], group: Any | None, is_synced: Callable[[], bool]) -> None:
        self._parameters = parameters
        self._is_synced = is_synced
        self._is_paused = False
        self._group = group
        self._with_grad: set[int] = set()  # indices of parameters that this backward pass has reached
        if group is not None:
            broadcast_tensors([parameter.data for parameter in parameters], group)
            increment_version(parameters)
        for index, parameter in enumerate(parameters):
            hooked: Any = parameter
            hooked.register_post_accumulate_grad_hook(lambda _, index=index: self._grad_accumulated(index))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes inside accumulate; the next one outside averages the sum."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _grad_accumulated(self, index: int) -> None:
        if self._is_paused or not self._is_synced():
            return
        if not self._with_grad:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._backward_done)
        self._with_grad.add(index)

    def _backward_done(self) -> None:
        with_grad, self._with_grad = self._with_grad, set()
        _average(self._parameters, with_grad, self._group)


def _attach_to_active_ddp() -> None:
    """Average the expert LoRA of the DDP module whose forward pass is running from now on. Expert layers call it in
    every training forward pass; the first call is collective (a broadcast), and all ranks reach it in the same pass."""
    ddp: DistributedDataParallel | None = DistributedDataParallel._active_ddp_module
    if ddp is None or ddp in _averagers:
        return
    trained: list[Tensor] = [
        parameter
        for name, parameter in lora_parameters(ddp.module).items()
        if parameter.requires_grad and name in ddp.parameters_to_ignore
    ]
    trained += own_lora_parameters(ddp.module).values()
    if trained:
        module = weakref.ref(ddp)
        _averagers[ddp] = GradientAverager(
            trained, averaging_group(ddp.module, ddp.process_group), lambda: _syncs(module())
        )


before_gradients.append(_attach_to_active_ddp)


def _syncs(ddp: DistributedDataParallel | None) -> bool:
    return ddp is not None and bool(ddp.require_backward_grad_sync)


def broadcast_own_lora(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give all ranks the values of rank 0 for LoRA that is not PEFT's, which no other program broadcasts. A collective
    call."""
    tensors = list(own_lora_parameters(model).values())
    broadcast_tensors([tensor.data for tensor in tensors], group or dist.group.WORLD)
    increment_version(tensors)


def average_expert_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """For training loops without DDP: average the expert LoRA's gradients over all ranks. A collective call."""
    parameters: list[Tensor] = [parameter for parameter in lora_parameters(model).values() if parameter.requires_grad]
    parameters += own_lora_parameters(model).values()
    with_grad = {index for index, parameter in enumerate(parameters) if parameter.grad is not None}
    _average(parameters, with_grad, averaging_group(model, group or dist.group.WORLD))


def averaging_group(model: nn.Module, group: Any) -> Any | None:
    """The ranks that hold the same expert LoRA, as a group with a CPU backend; None: this rank alone."""
    experts = expert_group(model)
    if experts is not None:
        return experts.replicas
    on_host = host_group(group)
    return on_host if dist.get_world_size(on_host) > 1 else None


def _average(parameters: list[Tensor], with_grad: set[int], group: Any | None) -> None:
    """All-reduce the gradients that at least one rank has; a rank without one contributes zeros."""
    if group is None:
        return
    size = dist.get_world_size(group)
    on_any_rank = torch.zeros(len(parameters), dtype=torch.uint8)
    on_any_rank[list(with_grad)] = 1
    dist.all_reduce(on_any_rank, dist.ReduceOp.MAX, group=group)
    reductions = []
    for index in on_any_rank.nonzero().flatten().tolist():
        parameter = parameters[index]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        reductions.append((parameter.grad, dist.all_reduce(parameter.grad, group=group, async_op=True)))
    for gradient, reduction in reductions:
        reduction.wait()
        gradient.div_(size)


def broadcast_tensors(tensors: Iterable[Tensor], group: Any) -> None:
    """Give all ranks of the group the values of its first rank. A collective call."""
    on_host = host_group(group)
    first = dist.get_global_rank(on_host, 0)
    for tensor in tensors:
        if tensor.device.type == "cpu":
            dist.broadcast(tensor, first, group=on_host)
        else:
            copy = tensor.cpu()
            dist.broadcast(copy, first, group=on_host)
            tensor.copy_(copy)


def host_group(group: Any) -> dist.ProcessGroup:
    """The group itself if it has a CPU backend, otherwise a gloo group of the same ranks, made once."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        if group not in _gloo_groups:
            ranks = dist.get_process_group_ranks(group)
            _gloo_groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return _gloo_groups[group]  # type: ignore[no-any-return]
    return group  # type: ignore[no-any-return]
