"""The contract of an experts module of transformers: shapes, memory layout and gate, read from the module.

A module whose class is decorated with `@use_experts_implementation` has 3-D parameters `gate_up_proj` and `down_proj`
(or `up_proj` without a gate), optional biases, flags for their layout, and `_apply_gate`. Older versions of
transformers lack some flags; an absent flag has its default. Anything beyond this contract is refused by name, because
it would silently be computed wrongly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ktransformers import _core
from ktransformers.checkpoint import ExpertShape
from ktransformers.experts.gate import Gate, probe_activation, probe_gate
from ktransformers.experts.store import ExpertStore
from ktransformers.ground.errors import InputError

IMPLEMENTATION = "kt"  # name in transformers' registry of experts implementations
# Of a module whose parameters are transposed although `is_transposed`, which PEFT reads, is False, as in the stock
# module (`scaled_input_experts.py`).
UNMARKED_TRANSPOSED = "kt_is_transposed"


@dataclass(frozen=True)
class Contract:
    shape: ExpertShape
    interleaved: bool  # rows of gate and up alternate
    gate: Gate
    lora_exchanged: bool = False  # PEFT takes the inputs of the parameters for outputs: its A and B are exchanged

    def parameters(self) -> dict[str, str]:
        """Role -> name of the module's parameter."""
        return {role: _parameter(role) for role in self.shape.fused()}


def _parameter(role: str) -> str:
    matrix, bias = role.removesuffix("_bias"), role.endswith("_bias")
    return f"{matrix}_proj" + ("_bias" if bias else "")


def is_experts(module: nn.Module) -> bool:
    """Whether transformers' experts interface dispatches the module: its decorator sets these attributes."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed") and hasattr(module, "config")


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module of every expert layer that transformers dispatches."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def read_contract(name: str, module: nn.Module) -> Contract:
    """`name` appears in errors. The module must still have its parameters; they may be on the meta device."""
    label = f"{name} ({type(module).__name__})" if name else type(module).__name__
    if not is_experts(module):
        raise InputError(label, "a module without transformers' experts interface", "@use_experts_implementation")
    if getattr(module, "has_post_expert_norm", False):
        raise InputError(label, "has_post_expert_norm", "experts without a norm of their own", "it cannot be computed")
    gated, biased = bool(getattr(module, "has_gate", True)), bool(getattr(module, "has_bias", False))
    unmarked = bool(getattr(module, UNMARKED_TRANSPOSED, False))
    transposed = unmarked or bool(module.is_transposed)
    first = "gate_up" if gated else "up"
    expected = {_parameter(role) for role in (first, "down")}
    if biased:
        expected |= {f"{parameter}_bias" for parameter in expected}
    shapes = {parameter: tuple(tensor.shape) for parameter, tensor in module.named_parameters()}
    if set(shapes) != expected:
        raise InputError(label, f"parameters {sorted(shapes)}", str(sorted(expected)), "this layout is not supported")
    down = shapes["down_proj"]
    if len(down) != 3:
        raise InputError(f"{label}.down_proj", f"shape {list(down)}", "[experts, hidden, intermediate]")
    experts, hidden, intermediate = (down[0], down[2], down[1]) if transposed else down
    shape = ExpertShape(experts, hidden, intermediate, gated, biased, transposed)
    for role, size in shape.fused().items():
        if shapes[_parameter(role)] != size:
            raise InputError(f"{label}.{_parameter(role)}", f"shape {list(shapes[_parameter(role)])}", str(list(size)))
    stock: Any = module
    if not gated:
        return Contract(shape, False, probe_activation(label, stock.act_fn))
    if hasattr(module, "is_concatenated"):
        interleaved = not module.is_concatenated
        return Contract(shape, interleaved, probe_gate(label, stock._apply_gate, interleaved), unmarked)
    # transformers 5.6 lacks the flag although its gpt_oss interleaves: both layouts are probed.
    with contextlib.suppress(InputError):
        return Contract(shape, True, probe_gate(label, stock._apply_gate, True))
    return Contract(shape, False, probe_gate(label, stock._apply_gate, False))


def new_store(
    contract: Contract,
    *,
    pool: _core.Pool | None = None,
    isa: str | None = None,
    precision: str = "bf16",
    formats: str | Mapping[str, str] = "bf16",
    experts: int | None = None,
) -> ExpertStore:
    """An empty store for experts of this shape and gate, for `experts` of them if it is not to hold all."""
    shape, gate = contract.shape, contract.gate
    return ExpertStore(
        shape.num_experts if experts is None else experts,
        shape.hidden,
        shape.intermediate,
        gated=shape.gated,
        activation=gate.activation,
        limit=gate.limit,
        alpha=gate.alpha,
        pool=pool,
        isa=isa,
        precision=precision,
        formats=formats,
    )
