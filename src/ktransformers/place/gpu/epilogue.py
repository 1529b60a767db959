"""Element-wise steps between the grouped products of `place/gpu/grouped_mlp.py`: activation forward and backward, LoRA
dropout, and the scatter-add of rows into tokens.

Each step has two implementations. torch covers every activation on every device; on a GPU, Triton kernels
(`place/gpu/epilogue_triton.py`) fuse the activation that nearly all models have (silu without a limit) and the
scatter-add of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ktransformers.experts.gate import ACTIVATIONS, Gate
from ktransformers.ground.packages import import_triton_module

SILU = Gate("silu")


def kernels_for(device: torch.device) -> ModuleType | None:
    return import_triton_module("ktransformers.place.gpu.epilogue_triton") if device.type == "cuda" else None


def _halves(gate_up: Tensor, addend: Tensor | None, gated: bool) -> tuple[Tensor, ...]:
    total = gate_up.float() if addend is None else gate_up.float() + addend
    return total.chunk(2, dim=1) if gated else (total,)


def _apply(gate: Gate, halves: tuple[Tensor, ...]) -> Tensor:
    return gate(*halves) if len(halves) == 2 else ACTIVATIONS[gate.activation](halves[0])


def activate(gate_up: Tensor, addend: Tensor | None, gate: Gate, gated: bool) -> Tensor:
    """bf16 [R, 2I or I], plus `addend` -> bf16 [R, I]."""
    if gated and gate == SILU and (kernels := kernels_for(gate_up.device)) is not None:
        h: Tensor = kernels.activate(gate_up, addend)
        return h
    return _apply(gate, _halves(gate_up, addend, gated)).to(torch.bfloat16)


def activate_backward(
    gate_up: Tensor,
    addend: Tensor | None,
    grad: Tensor,
    lora_grad: Tensor | None,
    weight: Tensor,
    gate: Gate,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The activation bf16 [R, I]; the gradient of `gate_up` in bf16, rows scaled by `weight`; that of `weight`.

    The sum of `grad` and `lora_grad` is the gradient of the activation before weighting.
    """
    if gated and gate == SILU and (kernels := kernels_for(gate_up.device)) is not None:
        fused: tuple[Tensor, Tensor, Tensor] = kernels.activate_backward(gate_up, addend, grad, lora_grad, weight)
        return fused
    halves = tuple(half.requires_grad_() for half in _halves(gate_up, addend, gated))
    grad_h = grad.float() if lora_grad is None else grad.float() + lora_grad
    with torch.enable_grad():
        h = _apply(gate, halves)
    grads = torch.autograd.grad(h, halves, grad_h * weight[:, None])
    return h.detach().to(torch.bfloat16), torch.cat(grads, dim=1).to(torch.bfloat16), (grad_h * h.detach()).sum(1)


def scatter(
    rows: Tensor,
    addend: Tensor | None,
    token: Tensor,
    weight: Tensor | None,
    out: Tensor,
    valid_rows: Tensor | None = None,
) -> None:
    """out[token] += weight * (rows + addend); float32 [T, H] from bf16 [R, H], of which the first `valid_rows` [1]."""
    kernels = kernels_for(rows.device)
    if kernels is not None and not torch.are_deterministic_algorithms_enabled():
        kernels.scatter(rows, addend, token, weight, out, valid_rows)
        return
    total = rows.float() if addend is None else rows.float() + addend
    if weight is not None:
        total = total * weight[:, None]
    if valid_rows is not None:
        total = total.where(torch.arange(len(rows), device=rows.device)[:, None] < valid_rows, 0.0)
    out.index_add_(0, token, total)


@dataclass(frozen=True)
class DropoutMask:
    """Dropout of LoRA inputs by the native core's hash: CPU and GPU drop the same elements. It is linear, so
    gradients pass through the same call."""

    probability: float
    seed: int
    position: Tensor  # int64 [R]: token * k + slot

    def __call__(self, rows: Tensor, stage: int) -> Tensor:
        """`stage`: 1 for the inputs of gate and up, 2 for those of down."""
        if not self.probability:
            return rows
        seeds = _mix(self.seed + _signed(0x9E3779B97F4A7C15) * (2 * self.position + stage))
        if (kernels := kernels_for(rows.device)) is not None and rows.dtype == torch.bfloat16:
            dropped: Tensor = kernels.dropout(rows, seeds, int(self.probability * 2**32), 1 / (1 - self.probability))
            return dropped
        x = torch.arange(rows.shape[1], device=rows.device) * 0x9E3779B9 & 0xFFFFFFFF
        x = x[None] ^ seeds[:, None]
        x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
        dropped_mask = (x ^ (x >> 16)) < int(self.probability * 2**32)
        return (rows.float() * (1 / (1 - self.probability))).to(rows.dtype).masked_fill(dropped_mask, 0)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _mix(x: Tensor) -> Tensor:
    """Hash 64 bits to 32; int64 arithmetic wraps like unsigned, only right shifts need their sign bits masked."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return (x ^ (x >> 31 & (1 << 33) - 1)) >> 32 & 0xFFFFFFFF
