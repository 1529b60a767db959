"""Which activation an experts module applies, found by asking it.

A module of transformers computes its gate in `_apply_gate` (or `act_fn` where there is no gate), and class names say
nothing about it. So it is called with numbers in float64: f(g, u) for a gate g and an up u. The answers at a few points
give the clamp and the slope, then the whole formula must agree on a grid; a module that fits no formula of ours is
refused with what was seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktransformers.errors import InputError
from ktransformers.nn.reference import ACTIVATIONS

HUGE = 1e30  # far beyond any clamp, and still a float32: some modules compute their gate in it
TINY = 1e-3
# Kernels of activations that modules bring along may compute in float32.
TOLERANCE = 1e-5
# Always said: while transformers builds a model, tensors are on the meta device and in the model's dtype by default.
EXACT: Any = {"dtype": torch.float64, "device": "cpu"}

Function = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Gate:
    activation: str
    limit: float = 0.0
    alpha: float = 0.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """What the kernels compute."""
        if self.limit > 0:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.activation == "swiglu_oai":
            return gate * torch.sigmoid(self.alpha * gate) * (up + 1)
        return ACTIVATIONS[self.activation](gate) * up


def probe_gate(name: str, apply_gate: Callable[[Tensor], Tensor], interleaved: bool) -> Gate:
    """The gate of `[rows, 2n]` columns, halves side by side or in turns."""

    def function(gate: Tensor, up: Tensor) -> Tensor:
        columns = torch.stack((gate, up), dim=-1).flatten(-2) if interleaved else torch.cat((gate, up), dim=-1)
        return apply_gate(columns).double()

    grid = torch.cat((torch.linspace(-12, 12, 97, **EXACT), torch.tensor([-40.0, 40.0], **EXACT)))
    gate, up = (axis.contiguous() for axis in torch.meshgrid(grid, grid, indexing="ij"))
    try:
        candidates = _candidates(function)
        seen = function(gate, up)
    except Exception as error:
        raise InputError(name, f"a gate that cannot be asked ({error})", _known()) from error
    for candidate in candidates:
        if seen.shape == gate.shape and torch.allclose(seen, candidate(gate, up), rtol=TOLERANCE, atol=TOLERANCE):
            return candidate
    samples = ", ".join(f"f({g:g}, {u:g}) = {_at(function, g, u):.6g}" for g, u in ((1, 1), (-1, 1), (1, 0), (9, 9)))
    raise InputError(name, f"an unknown gate with {samples}", _known())


def probe_activation(name: str, act_fn: Callable[[Tensor], Tensor]) -> Gate:
    """The activation of experts without a gate."""
    grid = torch.linspace(-12, 12, 241, **EXACT)[None]
    try:
        seen = act_fn(grid).double()
    except Exception as error:
        raise InputError(name, f"an activation that cannot be asked ({error})", _known()) from error
    for activation, function in ACTIVATIONS.items():
        if torch.allclose(seen, function(grid), rtol=TOLERANCE, atol=TOLERANCE):
            return Gate(activation)
    samples = ", ".join(f"f({x:g}) = {float(act_fn(torch.tensor([[x]], **EXACT))):.6g}" for x in (-1.0, 0.5, 1.0))
    raise InputError(name, f"an unknown activation with {samples}", _known())


def _known() -> str:
    return "one of " + ", ".join([*ACTIVATIONS, "swiglu_oai"])


def _at(function: Function, gate: float, up: float) -> float:
    return float(function(torch.tensor([[gate]], **EXACT), torch.tensor([[up]], **EXACT)))


def _candidates(function: Function) -> list[Gate]:
    """What the module may be, by its values at g = 1: linear in u up to a clamp, through zero or through u = -1."""
    at_zero = _at(function, 1.0, 0.0)
    slope = (_at(function, 1.0, TINY) - at_zero) / TINY
    if not slope > 0 or not math.isfinite(slope):
        return []
    reach = (_at(function, 1.0, HUGE) - at_zero) / slope
    limit = float(f"{reach:.9g}") if reach < HUGE / 2 else 0.0
    if abs(at_zero) < TOLERANCE * slope:
        return [Gate(activation, limit) for activation in ACTIVATIONS]
    inner = min(1.0, limit) if limit else 1.0
    ratio = at_zero / inner  # sigmoid(alpha * inner)
    if not 0 < ratio < 1:
        return []
    return [Gate("swiglu_oai", limit, float(f"{math.log(ratio / (1 - ratio)) / inner:.9g}"))]
