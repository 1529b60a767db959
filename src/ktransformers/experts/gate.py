"""Identifies the activation of an experts module by calling it.

A module of transformers computes its gate in `_apply_gate` (or `act_fn` without a gate), and its class name does not
say which formula that is. So the function is evaluated in float64: f(g, u) for a gate g and an up u. A few points give
the clamp and the slope, then the candidate formula must agree on a grid. A module that matches no formula of the
kernels is refused with sample values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ktransformers.ground.errors import InputError
from ktransformers.ground.log import logger

LOG = logger(__name__)
BEYOND_CLAMP = 1e30  # within the range of float32, in which some modules compute their gate
SLOPE_STEP = 1e-3
TOLERANCE = 1e-5  # activation kernels of some modules compute in float32
# Always explicit: while transformers builds a model, tensors default to the meta device and to the model's dtype.
EXACT: Any = {"dtype": torch.float64, "device": "cpu"}

Function = Callable[[Tensor, Tensor], Tensor]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True)
class Gate:
    activation: str
    limit: float = 0.0
    alpha: float = 0.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """The formula of the kernels."""
        if self.limit > 0:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.activation == "swiglu_oai":
            return gate * torch.sigmoid(self.alpha * gate) * (up + 1)
        return ACTIVATIONS[self.activation](gate) * up


def probe_gate(name: str, apply_gate: Callable[[Tensor], Tensor], interleaved: bool) -> Gate:
    """The gate of a function on `[rows, 2n]`: n columns of gate and n of up, concatenated or interleaved."""

    def function(gate: Tensor, up: Tensor) -> Tensor:
        columns = torch.stack((gate, up), dim=-1).flatten(-2) if interleaved else torch.cat((gate, up), dim=-1)
        return apply_gate(columns).double()

    grid = torch.cat((torch.linspace(-12, 12, 97, **EXACT), torch.tensor([-40.0, 40.0], **EXACT)))
    gate, up = (axis.contiguous() for axis in torch.meshgrid(grid, grid, indexing="ij"))
    try:
        candidates = _candidates(function)
        values = function(gate, up)
    except Exception as error:
        raise InputError(name, f"a gate that cannot be evaluated ({error})", _supported()) from error
    for candidate in candidates:
        if values.shape == gate.shape and torch.allclose(values, candidate(gate, up), rtol=TOLERANCE, atol=TOLERANCE):
            return candidate
    points = ((1, 1), (-1, 1), (1, 0), (9, 9))
    samples = ", ".join(f"f({g:g}, {u:g}) = {_evaluate(function, g, u):.6g}" for g, u in points)
    LOG.info("%s: the gate has %s", name, samples)
    raise InputError(name, "an unknown gate", _supported(), "-v shows values of it")


def probe_activation(name: str, act_fn: Callable[[Tensor], Tensor]) -> Gate:
    """The activation of experts without a gate."""
    grid = torch.linspace(-12, 12, 241, **EXACT)[None]
    try:
        values = act_fn(grid).double()
    except Exception as error:
        raise InputError(name, f"an activation that cannot be evaluated ({error})", _supported()) from error
    for activation, function in ACTIVATIONS.items():
        if torch.allclose(values, function(grid), rtol=TOLERANCE, atol=TOLERANCE):
            return Gate(activation)
    samples = ", ".join(f"f({x:g}) = {float(act_fn(torch.tensor([[x]], **EXACT))):.6g}" for x in (-1.0, 0.5, 1.0))
    LOG.info("%s: the activation has %s", name, samples)
    raise InputError(name, "an unknown activation", _supported(), "-v shows values of it")


def _supported() -> str:
    return "one of " + ", ".join([*ACTIVATIONS, "swiglu_oai"])


def _evaluate(function: Function, gate: float, up: float) -> float:
    return float(function(torch.tensor([[gate]], **EXACT), torch.tensor([[up]], **EXACT)))


def _candidates(function: Function) -> list[Gate]:
    """Formulas that fit the values at g = 1, where f is linear in u up to a clamp: zero at u = 0, or at u = -1."""
    at_zero = _evaluate(function, 1.0, 0.0)
    slope = (_evaluate(function, 1.0, SLOPE_STEP) - at_zero) / SLOPE_STEP
    if not slope > 0 or not math.isfinite(slope):
        return []
    clamp = (_evaluate(function, 1.0, BEYOND_CLAMP) - at_zero) / slope
    limit = float(f"{clamp:.9g}") if clamp < BEYOND_CLAMP / 2 else 0.0
    if abs(at_zero) < TOLERANCE * slope:
        return [Gate(activation, limit) for activation in ACTIVATIONS]
    inner = min(1.0, limit) if limit else 1.0
    ratio = at_zero / inner  # sigmoid(alpha * inner)
    if not 0 < ratio < 1:
        return []
    return [Gate("swiglu_oai", limit, float(f"{math.log(ratio / (1 - ratio)) / inner:.9g}"))]
