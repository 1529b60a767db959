"""What lies between the products of `compute.py`: activation forward and back, dropout, and the sum over experts.

Each step is a function of tensors in two versions. torch alone computes every gate on every device; Triton, on a GPU,
the gate that nearly all models have (silu, without a limit) in one kernel (`fused.py`), and the others' sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ktransformers.nn.gate import Gate
from ktransformers.nn.reference import ACTIVATIONS
from ktransformers.triton_modules import import_triton_module

SILU = Gate("silu")


def kernels_for(device: torch.device) -> ModuleType | None:
    return import_triton_module("ktransformers.place.gpu.epilogue_triton") if device.type == "cuda" else None


def _halves(wide: Tensor, extra: Tensor | None, gated: bool) -> tuple[Tensor, ...]:
    whole = wide.float() if extra is None else wide.float() + extra
    return whole.chunk(2, dim=1) if gated else (whole,)


def _apply(gate: Gate, halves: tuple[Tensor, ...]) -> Tensor:
    return gate(*halves) if len(halves) == 2 else ACTIVATIONS[gate.activation](halves[0])


def activate(wide: Tensor, extra: Tensor | None, gate: Gate, gated: bool) -> Tensor:
    """bf16 [R, 2I or I] and what is added to it -> bf16 [R, I]."""
    if gated and gate == SILU and (kernels := kernels_for(wide.device)) is not None:
        found: Tensor = kernels.activate(wide, extra)
        return found
    return _apply(gate, _halves(wide, extra, gated)).to(torch.bfloat16)


def activate_back(
    wide: Tensor, extra: Tensor | None, grad: Tensor, more: Tensor | None, weight: Tensor, gate: Gate, gated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The activation bf16 [R, I]; the gradient of `wide` in bf16, rows weighted by `weight`; the gradient of `weight`.

    `grad` and `more` are the parts of the activation's gradient before weighting.
    """
    if gated and gate == SILU and (kernels := kernels_for(wide.device)) is not None:
        found: tuple[Tensor, Tensor, Tensor] = kernels.activate_back(wide, extra, grad, more, weight)
        return found
    halves = tuple(half.requires_grad_() for half in _halves(wide, extra, gated))
    rising = grad.float() if more is None else grad.float() + more
    with torch.enable_grad():
        h = _apply(gate, halves)
    grads = torch.autograd.grad(h, halves, rising * weight[:, None])
    return h.detach().to(torch.bfloat16), torch.cat(grads, dim=1).to(torch.bfloat16), (rising * h.detach()).sum(1)


def scatter(
    rows: Tensor, extra: Tensor | None, token: Tensor, weight: Tensor | None, out: Tensor, live: Tensor | None = None
) -> None:
    """out[token] += weight * (rows + extra); float32 [T, H] from bf16 [R, H], of which `live` [1] count."""
    kernels = kernels_for(rows.device)
    if kernels is not None and not torch.are_deterministic_algorithms_enabled():
        kernels.scatter(rows, extra, token, weight, out, live)
        return
    whole = rows.float() if extra is None else rows.float() + extra
    if weight is not None:
        whole = whole * weight[:, None]
    if live is not None:
        whole = whole.where(torch.arange(len(rows), device=rows.device)[:, None] < live, 0.0)
    out.index_add_(0, token, whole)


@dataclass(frozen=True)
class DropoutMask:
    """Dropout of LoRA's inputs by the hash that the native core uses: the same elements, wherever a row is computed.
    It is linear, so the gradient passes through the same call."""

    share: float
    seed: int
    place: Tensor  # int64 [R]: token * k + slot

    def __call__(self, rows: Tensor, which: int) -> Tensor:
        """`which`: 1 for the inputs of gate and up, 2 for those of down."""
        if not self.share:
            return rows
        seeds = _mix(self.seed + _signed(0x9E3779B97F4A7C15) * (2 * self.place + which))
        if (kernels := kernels_for(rows.device)) is not None and rows.dtype == torch.bfloat16:
            thinned: Tensor = kernels.thin(rows, seeds, int(self.share * 2**32), 1 / (1 - self.share))
            return thinned
        x = torch.arange(rows.shape[1], device=rows.device) * 0x9E3779B9 & 0xFFFFFFFF
        x = x[None] ^ seeds[:, None]
        x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
        gone = (x ^ (x >> 16)) < int(self.share * 2**32)
        return (rows.float() * (1 / (1 - self.share))).to(rows.dtype).masked_fill(gone, 0)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _mix(x: Tensor) -> Tensor:
    """64 bits to 32; int64 wraps around as unsigned numbers do, only shifts have to be made unsigned."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return (x ^ (x >> 31 & (1 << 33) - 1)) >> 32 & 0xFFFFFFFF
