"""What transformers promises about an experts module, read off the module.

A module whose class carries `@use_experts_implementation` has 3-D parameters `gate_up_proj` and `down_proj` (or
`up_proj` where there is no gate), maybe biases, flags that say how they lie, and `_apply_gate`. Older versions lack
some flags; their absence means the default. Whatever goes beyond that is refused by name, because it would be computed
wrongly without a sign.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from torch import nn

from ktransformers.checkpoint import ExpertShape
from ktransformers.errors import InputError
from ktransformers.nn.gate import Gate, probe_activation, probe_gate

IMPLEMENTATION = "kt"  # our name among transformers' experts implementations


@dataclass(frozen=True)
class Contract:
    shape: ExpertShape
    interleaved: bool  # rows of gate and up in turns
    gate: Gate

    def parameters(self) -> dict[str, str]:
        """Role -> name of the module's parameter."""
        return {role: _parameter(role) for role in self.shape.fused()}


def _parameter(role: str) -> str:
    matrix, bias = role.removesuffix("_bias"), role.endswith("_bias")
    return f"{matrix}_proj" + ("_bias" if bias else "")


def is_experts(module: nn.Module) -> bool:
    """Dispatched by transformers' experts interface: the decorator leaves these marks."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed") and hasattr(module, "config")


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module of every expert layer that transformers dispatches."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def read_contract(name: str, module: nn.Module) -> Contract:
    """`name` is for errors. The module still has its parameters; they may be on the meta device."""
    kind = f"{name} ({type(module).__name__})" if name else type(module).__name__
    if not is_experts(module):
        raise InputError(kind, "a module without transformers' experts interface", "@use_experts_implementation")
    if getattr(module, "has_post_expert_norm", False):
        raise InputError(kind, "has_post_expert_norm", "experts without a norm of their own", "it cannot be computed")
    gated, biased = bool(getattr(module, "has_gate", True)), bool(getattr(module, "has_bias", False))
    transposed = bool(module.is_transposed)
    first = "gate_up" if gated else "up"
    expected = {_parameter(role) for role in (first, "down")}
    if biased:
        expected |= {f"{parameter}_bias" for parameter in expected}
    found = {parameter: tuple(tensor.shape) for parameter, tensor in module.named_parameters()}
    if set(found) != expected:
        raise InputError(kind, f"parameters {sorted(found)}", str(sorted(expected)), "this layout is not known")
    down = found["down_proj"]
    if len(down) != 3:
        raise InputError(f"{kind}.down_proj", f"shape {list(down)}", "[experts, hidden, intermediate]")
    experts, hidden, intermediate = (down[0], down[2], down[1]) if transposed else down
    shape = ExpertShape(experts, hidden, intermediate, gated, biased, transposed)
    for role, size in shape.fused().items():
        if found[_parameter(role)] != size:
            raise InputError(f"{kind}.{_parameter(role)}", f"shape {list(found[_parameter(role)])}", str(list(size)))
    asked: Any = module
    if not gated:
        return Contract(shape, False, probe_activation(kind, asked.act_fn))
    if hasattr(module, "is_concatenated"):
        return Contract(
            shape, not module.is_concatenated, probe_gate(kind, asked._apply_gate, not module.is_concatenated)
        )
    # transformers 5.6 has no such flag, and its gpt_oss interleaves all the same: the numbers tell.
    with contextlib.suppress(InputError):
        return Contract(shape, True, probe_gate(kind, asked._apply_gate, True))
    return Contract(shape, False, probe_gate(kind, asked._apply_gate, False))
