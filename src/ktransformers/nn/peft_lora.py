"""Expert LoRA as PEFT keeps it, handed to the operator as factors.

PEFT puts a `ParamWrapper` around an experts module for each parameter that it adapts, with lora_A [E * r, in] and
lora_B [out, r * E] (the expert index fastest) per adapter. For a forward pass it registers a parametrization that adds
B A to the whole weight: up to 0.20 a dense difference, from 0.21 a folded product for a single adapter and a dense
difference for several. Here, in every version, experts that "kt" computes get the factors instead, so nothing of the
size of the weights is ever built. That is the surprising decision: four methods of PEFT's classes are replaced when
this module is imported, and go on to PEFT's own for everything that is not ours. The others keep expert LoRA in host
memory when a model is moved to a GPU (with its optimiser state it would fill one), pin it there at the latest when
hidden states come from a GPU, and refuse a merge into weights that are packed before it begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.lora.model import LoraModel
from torch import Tensor, nn

from ktransformers.errors import InputError
from ktransformers.nn.contract import IMPLEMENTATION, Contract, expert_modules, is_experts
from ktransformers.nn.lora import ExpertLora, Factor

# Factors of the layers that are being computed right now, by module and parameter; per thread, so that two threads may
# run one model.
_lent: ContextVar[tuple[tuple[nn.Module, str, Factor], ...]] = ContextVar("lent", default=())


def read_lora(module: nn.Module, contract: Contract) -> ExpertLora | None:
    """What PEFT has active on these experts, in the middle of their forward pass; None: nothing."""
    found = {name: factor for owner, name, factor in _lent.get() if owner is module}
    if not found:
        return None
    shape = contract.shape
    sizes = {
        "gate_up_proj": (shape.hidden, 2 * shape.intermediate),
        "up_proj": (shape.hidden, shape.intermediate),
        "down_proj": (shape.intermediate, shape.hidden),
    }
    for name, factor in found.items():
        given, expected = (factor.a.shape[2], factor.b.shape[1]), sizes.get(name)
        if given != expected:
            raise InputError(f"LoRA on {name}", f"{given} inputs and outputs", f"{expected}")
    gate_up, gate, up = found.get("gate_up_proj"), None, found.get("up_proj")
    if gate_up is not None and contract.interleaved:
        gate = Factor(gate_up.a, gate_up.b[:, 0::2], gate_up.scale)
        up = Factor(gate_up.a, gate_up.b[:, 1::2], gate_up.scale)
        gate_up = None
    dropout = getattr(module, "kt_lora_dropout", 0.0) if module.training and torch.is_grad_enabled() else 0.0
    return ExpertLora(gate_up=gate_up, gate=gate, up=up, down=found.get("down_proj"), dropout=dropout)


def set_lora_dropout(model: nn.Module, share: float) -> None:
    """Drop this share of the expert LoRA's inputs in training. PEFT itself refuses `lora_dropout` on parameters."""
    if not 0 <= share < 1 or not math.isfinite(share):
        raise InputError("dropout", share, "at least 0 and less than 1")
    for module in expert_modules(model).values():
        module.kt_lora_dropout = share  # type: ignore[assignment]


def expert_adapters(model: nn.Module) -> dict[str, ParamWrapper]:
    """Name -> PEFT's module of every adapted parameter of experts that "kt" computes."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, ParamWrapper) and _ours(layer)}


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of the expert LoRA of all adapters: what stays in host memory."""
    found: dict[str, nn.Parameter] = {}
    for name, layer in expert_adapters(model).items():
        for part in ("lora_A", "lora_B"):
            for inner, parameter in getattr(layer, part).named_parameters():
                found[".".join(word for word in (name, part, inner) if word)] = parameter
    return found


def _ours(layer: Any) -> bool:
    module = layer.get_base_layer()
    return is_experts(module) and module.config._experts_implementation == IMPLEMENTATION


def _factor(layer: Any, adapters: list[str]) -> Factor | None:
    """The active adapters of one parameter as one factor: ranks side by side, scales relative to the first."""
    parts = [
        Factor(_host(layer.lora_A[name].weight), _host(layer.lora_B[name].weight), float(layer.scaling[name]))
        for name in adapters
        if name in layer.lora_A
    ]
    parts = [
        Factor(
            part.a.view(layer.num_experts, -1, part.a.shape[1]),
            part.b.view(part.b.shape[0], -1, layer.num_experts).permute(2, 0, 1),
            part.scale,
        )
        for part in parts
        if part.scale != 0
    ]
    if len(parts) <= 1:
        return parts[0] if parts else None
    scale = parts[0].scale
    return Factor(
        torch.cat([part.a for part in parts], dim=1),
        torch.cat([part.b if part.scale == scale else part.b * (part.scale / scale) for part in parts], dim=2),
        scale,
    )


def _host(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.cpu()


def _staying(move: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
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
    """Adapters that were never moved: made for, or read into, a model that was loaded to a GPU. PEFT makes, casts and
    fills them in several places; the first forward pass comes after all of these. An optimiser that has a parameter
    keeps it, only its memory is another."""
    for part in (layer.lora_A, layer.lora_B):
        for parameter in part.parameters():
            if parameter.device.type == "cpu" and not parameter.is_pinned():
                with torch.inference_mode(False):
                    parameter.data = parameter.data.pin_memory()


def _install() -> None:
    stock: Any = ParamWrapper
    tuner: Any = LoraModel
    activate, move, allow = stock._activate_lora, stock._apply, tuner._check_merge_allowed
    compute = stock.forward

    @contextmanager
    def lend(self: Any, active_adapters: list[str]) -> Iterator[None]:
        if not _ours(self):
            with activate(self, active_adapters):
                yield
            return
        factor = _factor(self, active_adapters)
        token = _lent.set(
            _lent.get() + (() if factor is None else ((self.get_base_layer(), self.parameter_name, factor),))
        )
        try:
            yield
        finally:
            _lent.reset(token)

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.is_cuda and _ours(self):
            _pin(self)
        result: Tensor = compute(self, x, *args, **kwargs)
        return result

    def stay(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if not _ours(self) or not recurse:
            return move(self, fn, recurse)
        for child in self.children():
            child._apply(fn if child is self.base_layer else _staying(fn))
        return self

    def refuse(self: Any) -> None:
        for name in expert_adapters(self):
            raise InputError(f"merge of {name}", "packed experts", "a stock model", "load it without ktransformers")
        allow(self)

    stock._activate_lora, stock._apply, stock.forward, tuner._check_merge_allowed = lend, stay, forward, refuse


_install()
