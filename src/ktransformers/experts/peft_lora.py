"""PEFT's expert LoRA, passed to the operator as low-rank factors.

PEFT wraps an experts module in a `ParamWrapper` for each adapted parameter, with lora_A [E * r, in] and lora_B
[out, r * E] (the expert index fastest) per adapter. In a forward pass it registers a parametrization that adds B A to
the full weight: a dense difference up to version 0.20; from 0.21 a folded product for one adapter and a dense
difference for more. For experts that "kt" computes the factors go to the operator instead, in every version, because
the dense difference has the size of the weights. Importing this module therefore replaces five methods of PEFT's
classes; for all other layers they call PEFT's own. `_activate_lora` passes the factors, `_apply` keeps expert LoRA in
host memory when a model is moved to a GPU (with its optimiser state it would fill the GPU), `forward` pins that memory
if hidden states are on a GPU, `_check_merge_allowed` refuses a merge into packed weights, and `update_layer` keeps the
factors of this rank's experts alone where ranks divide them (`experts/lora_shards.py`).

The ContextVar `_active_factors` carries (experts module, parameter name, factor) of every adapted parameter from PEFT's
wrappers past the stock model to `experts_forward`. It is per thread, so that two threads may run one model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.lora.model import LoraModel
from torch import Tensor, nn

from ktransformers.experts.backend import KtExperts, packed_experts
from ktransformers.experts.contract import IMPLEMENTATION, expert_modules, is_experts
from ktransformers.experts.lora import ExpertLora, LoraPair
from ktransformers.experts.lora_shards import keep_shard
from ktransformers.ground.errors import InputError

_active_factors: ContextVar[tuple[tuple[nn.Module, str, LoraPair], ...]] = ContextVar("active_factors", default=())


# Called when a layer reads LoRA in a pass with gradients; `parallel/distributed.py` finds DDP by it.
before_gradients: list[Callable[[], None]] = []


def read_lora(module: nn.Module, kt: KtExperts) -> ExpertLora | None:
    """The LoRA of these experts in the running forward pass: what PEFT has active on them, or `kt.lora`, factors that a
    program trains without PEFT; None: none."""
    lora = _read_lora(module, kt)
    if lora is not None and torch.is_grad_enabled():
        for call in before_gradients:
            call()
    return lora


def _read_lora(module: nn.Module, kt: KtExperts) -> ExpertLora | None:
    factors = {name: factor for owner, name, factor in _active_factors.get() if owner is module}
    own, contract = kt.lora, kt.contract
    if own is not None:
        if factors:
            two = f"LoRA of PEFT on {', '.join(factors)} and `kt.lora`"
            raise InputError(type(module).__name__, two, "one of them", "leave the experts out of PEFT's targets")
        return own if module.training and torch.is_grad_enabled() else replace(own, dropout=0.0)
    if not factors:
        return None
    if contract.lora_exchanged:
        exchanged = ((name, factor.b.transpose(1, 2), factor.a.transpose(1, 2)) for name, factor in factors.items())
        factors = {name: LoraPair(a, b, factors[name].scaling) for name, a, b in exchanged}
    shape = contract.shape
    sizes = {
        "gate_up_proj": (shape.hidden, 2 * shape.intermediate),
        "up_proj": (shape.hidden, shape.intermediate),
        "down_proj": (shape.intermediate, shape.hidden),
    }
    for name, factor in factors.items():
        given, expected = (factor.a.shape[2], factor.b.shape[1]), sizes.get(name)
        if given != expected:
            raise InputError(f"LoRA on {name}", f"{given} inputs and outputs", f"{expected}")
    gate_up, gate, up = factors.get("gate_up_proj"), None, factors.get("up_proj")
    if gate_up is not None and contract.interleaved:
        gate = LoraPair(gate_up.a, gate_up.b[:, 0::2], gate_up.scaling)
        up = LoraPair(gate_up.a, gate_up.b[:, 1::2], gate_up.scaling)
        gate_up = None
    dropout = kt.lora_dropout if module.training and torch.is_grad_enabled() else 0.0
    return ExpertLora(gate_up=gate_up, gate=gate, up=up, down=factors.get("down_proj"), dropout=dropout)


def set_lora_dropout(model: nn.Module, rate: float) -> None:
    """Drop elements of the expert LoRA's inputs with probability `rate` in training. PEFT itself refuses
    `lora_dropout` on parameters."""
    if not 0 <= rate < 1 or not math.isfinite(rate):
        raise InputError("dropout", rate, "at least 0 and less than 1")
    for name, module in expert_modules(model).items():
        kt = packed_experts(module)
        if kt is not None:
            kt.lora_dropout = rate
        elif module.config._experts_implementation == IMPLEMENTATION:  # type: ignore[union-attr]
            raise InputError(
                name, "experts that are not packed yet", "packed ones", "call ktransformers.nn.attach first"
            )


def expert_adapters(model: nn.Module) -> dict[str, ParamWrapper]:
    """Name -> PEFT's module of every adapted parameter of experts that "kt" computes."""
    wrappers = {name: layer for name, layer in model.named_modules() if isinstance(layer, ParamWrapper)}
    return {name: layer for name, layer in wrappers.items() if _wraps_kt_experts(layer)}


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of the expert LoRA of all adapters; these stay in host memory."""
    parameters: dict[str, nn.Parameter] = {}
    for name, layer in expert_adapters(model).items():
        for part in ("lora_A", "lora_B"):
            for inner, parameter in getattr(layer, part).named_parameters():
                parameters[".".join(word for word in (name, part, inner) if word)] = parameter
    return parameters


def own_lora_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Name -> tensor of the LoRA that expert modules have as `kt.lora`; it is no parameter of the model."""
    tensors: dict[str, Tensor] = {}
    for name, module in expert_modules(model).items():
        kt = packed_experts(module)
        if kt is not None and kt.lora is not None:
            factors = kt.lora
            named = zip(factors.roles, factors.tensors, strict=True)
            tensors |= {f"{name}.kt.lora.{role}": tensor for role, tensor in named}
    return tensors


def _wraps_kt_experts(layer: Any) -> bool:
    module = layer.get_base_layer()
    return is_experts(module) and module.config._experts_implementation == IMPLEMENTATION


def _factor(layer: Any, adapters: list[str]) -> LoraPair | None:
    """The active adapters of one parameter as one factor: ranks concatenated, scales relative to the first."""
    parts = [
        LoraPair(_host(layer.lora_A[name].weight), _host(layer.lora_B[name].weight), float(layer.scaling[name]))
        for name in adapters
        if name in layer.lora_A
    ]
    experts = layer.num_experts
    parts = [
        LoraPair(
            part.a.view(experts, part.a.shape[0] // max(experts, 1), part.a.shape[1]),
            part.b.view(part.b.shape[0], part.b.shape[1] // max(experts, 1), experts).permute(2, 0, 1),
            part.scaling,
        )
        for part in parts
        if part.scaling != 0
    ]
    if len(parts) <= 1:
        return parts[0] if parts else None
    scale = parts[0].scaling
    return LoraPair(
        torch.cat([part.a for part in parts], dim=1),
        torch.cat([part.b if part.scaling == scale else part.b * (part.scaling / scale) for part in parts], dim=2),
        scale,
    )


def _host(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.cpu()


def _without_device_move(move: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`move` without its change of device; a cast remains."""

    def apply(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return move(tensor).cpu()
        sample = move(tensor.new_empty(0))
        if sample.device.type == "cpu":
            return move(tensor)
        kept = tensor.to(sample.dtype)
        return kept.pin_memory() if sample.device.type == "cuda" and not kept.is_pinned() else kept

    return apply


def _pin(layer: Any) -> None:
    """Pin adapters that `_apply` has not seen: created for, or loaded into, a model that was already on a GPU. PEFT
    creates, casts and fills them in several places, all before the first forward pass. The parameter objects stay the
    same, so an optimiser keeps them; only their memory changes."""
    for part in (layer.lora_A, layer.lora_B):
        for parameter in part.parameters():
            if parameter.device.type == "cpu" and not parameter.is_pinned():
                with torch.inference_mode(False):
                    parameter.data = parameter.data.pin_memory()


def _install() -> None:
    wrapper: Any = ParamWrapper
    tuner: Any = LoraModel
    stock_activate, stock_apply, stock_forward = wrapper._activate_lora, wrapper._apply, wrapper.forward
    stock_check_merge, stock_update = tuner._check_merge_allowed, wrapper.update_layer

    @contextmanager
    def activate_lora(self: Any, active_adapters: list[str]) -> Iterator[None]:
        if not _wraps_kt_experts(self):
            with stock_activate(self, active_adapters):
                yield
            return
        factor = _factor(self, active_adapters)
        entries = () if factor is None else ((self.get_base_layer(), self.parameter_name, factor),)
        token = _active_factors.set(_active_factors.get() + entries)
        try:
            yield
        finally:
            _active_factors.reset(token)

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.is_cuda and _wraps_kt_experts(self):
            _pin(self)
        result: Tensor = stock_forward(self, x, *args, **kwargs)
        return result

    def apply_on_host(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if not _wraps_kt_experts(self) or not recurse:
            return stock_apply(self, fn, recurse)
        for child in self.children():
            child._apply(fn if child is self.base_layer else _without_device_move(fn))
        return self

    def check_merge(self: Any) -> None:
        for name in expert_adapters(self):
            raise InputError(f"merge of {name}", "packed experts", "a stock model", "load it without ktransformers")
        stock_check_merge(self)

    def update_layer(self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        kt = packed_experts(self.get_base_layer())
        shard = None if kt is None else kt.shard
        if shard is not None:  # created for all experts, with the random numbers that a single process would draw
            self.num_experts = len(shard.owners)
        stock_update(self, adapter_name, *args, **kwargs)
        if shard is not None:
            keep_shard(self, adapter_name, shard)

    wrapper._activate_lora, wrapper._apply, wrapper.forward = activate_lora, apply_on_host, forward
    wrapper.update_layer = update_layer
    tuner._check_merge_allowed = check_merge


_install()


def refused_modules(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Those of the linear modules that PEFT does not adapt in this architecture; it would raise when it meets them."""
    from peft import LoraConfig
    from peft.tuners import tuners_utils

    check: Any = getattr(tuners_utils, "_check_lora_target_modules_mamba", None)
    refused = []
    for name in names if check is not None else ():
        try:
            check(LoraConfig(), model, name.rpartition(".")[2])
        except ValueError:
            refused.append(name)
    return refused
