"""Some experts of one layer on a device, over decoded weights: rows forward, and their gradients.

Rows `[R, H]` lie sorted by expert (and adapter, where there are several); `ends` says where each expert's rows end.
Products are torch's grouped ones in bf16 with f32 sums; the activation, biases and the weighting of rows are in f32, so
a result differs from the CPU's by the rounding of gate, up and the output row to bf16. Backward takes only the rows'
inputs and computes gate and up again: the weights have to be there anyway. The surprising decision: the way back is
torch's own, through the few operators of `rows_forward`; there is no second set of formulas to keep right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ktransformers.nn.gate import Gate
from ktransformers.nn.reference import ACTIVATIONS

ALIGN = 8  # bf16 numbers in 16 bytes: what the grouped product wants of strides
ROLES = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")


@dataclass(frozen=True)
class Decoded:
    """Weights of G experts in bf16; biases in float32."""

    first: Tensor  # [G, 2I or I, H]: gate's rows before up's
    down: Tensor  # [G, H, I]
    first_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True)
class GroupLora:
    """Factors for the same rows: `ends` may cut an expert's rows further, by adapter. A [n, r, in], B [n, out, r]."""

    ends: Tensor
    factors: dict[str, Tensor]  # by role, of ROLES; gate's A is up's where `up_a` is absent
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)  # of gate, up and down


@dataclass(frozen=True)
class Thinning:
    """Dropout of LoRA's inputs by the hash that the native core uses: the same elements, wherever a row is computed."""

    share: float
    seed: int
    place: Tensor  # int64 [R]: token * k + slot

    def __call__(self, rows: Tensor, which: int) -> Tensor:
        """`which`: 1 for the inputs of gate and up, 2 for those of down."""
        if not self.share:
            return rows
        seeds = _mix(self.seed + _signed(0x9E3779B97F4A7C15) * (2 * self.place + which))
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


def product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """rows of group g times matrices[g] transposed: [R, K], [G, N, K] -> [R, N]."""
    if not rows.is_cuda and rows.dtype == torch.bfloat16:  # for tests: few CPUs multiply bf16, all of them f32
        return product(rows.float(), matrices.float(), ends).to(torch.bfloat16)
    if rows.shape[1] % ALIGN == 0 and matrices.shape[1] % ALIGN == 0:
        turned = matrices.transpose(1, 2)
        if hasattr(F, "grouped_mm"):
            return F.grouped_mm(rows, turned, offs=ends)
        return torch._grouped_mm(rows, turned, offs=ends)
    bounds = [0, *ends.tolist()]
    parts = [rows[a:b] @ matrix.t() for a, b, matrix in zip(bounds, bounds[1:], matrices, strict=False)]
    return torch.cat(parts)


def _padded(factor: Tensor, dim: int) -> Tensor:
    """The rank, in dimension `dim`, made a multiple of what the grouped product wants."""
    more = -factor.shape[dim] % ALIGN
    return F.pad(factor, (0, more) if dim == 2 else (0, 0, 0, more)) if more else factor


def _extra(rows: Tensor, lora: GroupLora, a: str, b: str, scale: float) -> Tensor | None:
    if b not in lora.factors:
        return None
    inner = product(rows, _padded(lora.factors[a], 1).to(rows.dtype), lora.ends)
    return product(inner, _padded(lora.factors[b], 2).to(rows.dtype), lora.ends).float() * scale


def _sum(whole: Tensor, extra: Tensor | None) -> Tensor:
    return whole if extra is None else whole + extra


def _bias(bias: Tensor | None, ends: Tensor, rows: int) -> Tensor | None:
    if bias is None:
        return None
    expert = torch.searchsorted(ends, torch.arange(rows, device=ends.device, dtype=ends.dtype), right=True)
    return bias[expert]


def rows_forward(
    x: Tensor, weights: Decoded, ends: Tensor, gate: Gate, lora: GroupLora | None, thin: Thinning | None
) -> Tensor:
    """bf16 [R, H] -> bf16 [R, H], before the routing weights."""
    gated = weights.first.shape[1] == 2 * weights.down.shape[2]
    wide = _sum(product(x, weights.first, ends).float(), _bias(weights.first_bias, ends, x.shape[0]))
    gates, ups = wide.chunk(2, dim=1) if gated else (None, wide)
    if lora is not None:
        source = thin(x, 1) if thin is not None else x
        if gates is not None:
            gates = _sum(gates, _extra(source, lora, "gate_a", "gate_b", lora.scales[0]))
        shared = "up_a" if "up_a" in lora.factors else "gate_a"
        ups = _sum(ups, _extra(source, lora, shared, "up_b", lora.scales[1]))
    inner = (gate(gates, ups) if gates is not None else ACTIVATIONS[gate.activation](ups)).to(x.dtype)
    out = product(inner, weights.down, ends)
    bias, extra = _bias(weights.down_bias, ends, x.shape[0]), None
    if lora is not None:
        extra = _extra(thin(inner, 2) if thin is not None else inner, lora, "down_a", "down_b", lora.scales[2])
    if bias is None and extra is None:
        return out
    return _sum(_sum(out.float(), bias), extra).to(x.dtype)


@dataclass(frozen=True)
class Rows:
    """Which rows of a batch a group of experts computes, sorted by expert."""

    token: Tensor  # int64 [R]
    weight: Tensor  # float32 [R]
    ends: Tensor  # int32 [G]


def forward(
    hidden: Tensor,
    rows: Rows,
    weights: Decoded,
    gate: Gate,
    out: Tensor,
    lora: GroupLora | None = None,
    thin: Thinning | None = None,
) -> None:
    """Adds to `out`, float32 [T, H]."""
    x = hidden[rows.token].to(torch.bfloat16)
    with torch.no_grad():
        y = rows_forward(x, weights, rows.ends, gate, lora, thin)
        out.index_add_(0, rows.token, y.float().mul_(rows.weight[:, None]))


def backward(
    grad_out: Tensor,
    hidden: Tensor,
    rows: Rows,
    weights: Decoded,
    gate: Gate,
    grad_hidden: Tensor,
    lora: GroupLora | None = None,
    thin: Thinning | None = None,
    wanted: Sequence[str] = (),
) -> tuple[Tensor, dict[str, Tensor]]:
    """Adds to `grad_hidden`, float32 [T, H]; returns the routing weights' gradient, float32 [R], and those of the
    factors named in `wanted`."""
    x = hidden[rows.token].to(torch.bfloat16).requires_grad_()
    leaves = {role: lora.factors[role].detach().requires_grad_() for role in wanted} if lora is not None else {}
    with torch.enable_grad():
        if lora is not None and leaves:
            lora = GroupLora(lora.ends, {**lora.factors, **leaves}, lora.scales)
        y = rows_forward(x, weights, rows.ends, gate, lora, thin)
    with torch.no_grad():
        rising = grad_out[rows.token].float()
        grad_weight = torch.linalg.vecdot(rising, y.detach().float())
        scaled = rising.mul_(rows.weight[:, None]).to(torch.bfloat16)
    grads = torch.autograd.grad(y, (x, *leaves.values()), scaled)
    grad_hidden.index_add_(0, rows.token, grads[0].float())
    return grad_weight, dict(zip(leaves, grads[1:], strict=True))
