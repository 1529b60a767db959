"""Reference implementation of an expert layer in plain torch and float64, which the kernels are compared with.

One loop over experts, nothing shared with the native core. Weights are rounded to the dtype `packed` in which a store
holds them (bf16 by default); biases, hidden states and routing weights are not rounded. `gate` is None for experts
without a gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.experts.gate import ACTIVATIONS


@dataclass(frozen=True)
class ReferenceLayer:
    up: Tensor  # [E, I, H]
    down: Tensor  # [E, H, I]
    gate: Tensor | None = None  # [E, I, H]
    up_bias: Tensor | None = None  # [E, I]
    down_bias: Tensor | None = None  # [E, H]
    gate_bias: Tensor | None = None  # [E, I]
    activation: str = "silu"
    limit: float = 0.0
    alpha: float = 0.0
    packed: torch.dtype = torch.bfloat16


def _linear(layer: ReferenceLayer, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    y = x @ matrix.to(layer.packed).double().T
    return y if bias is None else y + bias.double()


def _select(stacked: Tensor | None, expert: int) -> Tensor | None:
    return None if stacked is None else stacked[expert]


def expert(layer: ReferenceLayer, index: int, x: Tensor) -> Tensor:
    """One expert for rows `[n, H]` in float64."""
    up = _linear(layer, x, layer.up[index], _select(layer.up_bias, index))
    if layer.gate is None:
        return _linear(layer, ACTIVATIONS[layer.activation](up), layer.down[index], _select(layer.down_bias, index))
    gate = _linear(layer, x, layer.gate[index], _select(layer.gate_bias, index))
    if layer.limit > 0:
        gate, up = gate.clamp(max=layer.limit), up.clamp(-layer.limit, layer.limit)
    if layer.activation == "swiglu_oai":
        inner = gate * torch.sigmoid(layer.alpha * gate) * (up + 1)
    else:
        inner = ACTIVATIONS[layer.activation](gate) * up
    return _linear(layer, inner, layer.down[index], _select(layer.down_bias, index))


def forward(layer: ReferenceLayer, hidden: Tensor, ids: Tensor, weights: Tensor, skip: Tensor | None = None) -> Tensor:
    """`[T, H]` in float64; ids outside [0, E) and skipped experts add nothing."""
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    x, scale = hidden.double(), weights.double()
    for index in range(layer.up.shape[0]):
        if skip is not None and bool(skip[index]):
            continue
        token, slot = torch.where(ids == index)
        if len(token):
            out.index_add_(0, token, expert(layer, index, x[token]) * scale[token, slot, None])
    return out
