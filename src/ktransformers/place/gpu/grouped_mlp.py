"""Some experts of one layer on a device, over decoded weights: rows forward, and their gradients.

Rows `[R, H]` lie sorted by expert (and adapter, where there are several); `ends` says where each expert's rows end.
Products are torch's grouped ones in bf16 with f32 sums; the activation, biases and the weighting of rows are in f32, so
a result differs from the CPU's by the rounding of gate, up and the output row to bf16. Backward takes only the rows'
inputs and computes gate and up again: the weights have to be there anyway. The gradient of a routing weight is the
inner product of the activation and its own gradient, so no output row is ever computed twice. The surprising decision:
the formulas stand here in single steps instead of being left to autograd, because a batch is waited for by Python at
every step, and what lies between two products is one kernel each (`steps.py`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ktransformers.nn.gate import Gate
from ktransformers.place.gpu import epilogue
from ktransformers.place.gpu.epilogue import DropoutMask

ALIGN = 8  # bf16 numbers in 16 bytes: what the grouped product wants of strides


@dataclass(frozen=True)
class Decoded:
    """Weights of G experts in bf16; biases in float32."""

    first: Tensor  # [G, 2I or I, H]: gate's rows before up's
    down: Tensor  # [G, H, I]
    first_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def gated(self) -> bool:
        return self.first.shape[1] == 2 * self.down.shape[2]


@dataclass(frozen=True)
class StackedLora:
    """LoRA of one matrix in bf16, the scale in B: A [n, r, in], B [n, out, r]; r is a multiple of ALIGN."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class GroupLora:
    """Factors for the same rows: `ends` may cut an expert's rows further, by adapter."""

    ends: Tensor
    first: StackedLora | None
    down: StackedLora | None


@dataclass(frozen=True)
class GroupedRows:
    """Which rows of a batch a group of experts computes, sorted by expert."""

    token: Tensor  # int64 [R]
    weight: Tensor  # float32 [R]
    ends: Tensor  # int32 [G]
    live: Tensor | None = None  # int32 [1]: rows from there on are nobody's and are added nowhere; None: all are


Gradient = tuple[Tensor, Tensor]  # of A and of B, as Pair has them


def _grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if not a.is_cuda and a.dtype == torch.bfloat16:  # for tests: few CPUs multiply bf16, all of them f32
        return _grouped(a.float(), b.float(), ends).to(torch.bfloat16)
    if hasattr(F, "grouped_mm"):
        return F.grouped_mm(a, b, offs=ends)
    return torch._grouped_mm(a, b, offs=ends)


def product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """rows of group g times matrices[g]: [R, K], [G, K, N] -> [R, N]."""
    if rows.shape[1] % ALIGN == 0 and matrices.shape[2] % ALIGN == 0:
        return _grouped(rows, matrices, ends)
    bounds = [0, *ends.tolist()]
    parts = [rows[a:b] @ matrix for a, b, matrix in zip(bounds, bounds[1:], matrices, strict=False)]
    return torch.cat(parts)


def outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """left of group g, transposed, times right of group g: [R, M], [R, N] -> [G, M, N]."""
    if left.shape[1] % ALIGN == 0 and right.shape[1] % ALIGN == 0:
        return _grouped(left.t(), right, ends)
    bounds = [0, *ends.tolist()]
    return torch.stack([left[a:b].t() @ right[a:b] for a, b in itertools.pairwise(bounds)])


def _bias(bias: Tensor | None, ends: Tensor, rows: int) -> Tensor | None:
    """Of each row, float32."""
    if bias is None:
        return None
    expert = torch.searchsorted(ends, torch.arange(rows, device=ends.device, dtype=ends.dtype), right=True)
    return bias[expert]


def _thin(thin: DropoutMask | None, rows: Tensor, which: int) -> Tensor:
    return rows if thin is None else thin(rows, which)


def _wide(
    x: Tensor, weights: Decoded, ends: Tensor, lora: GroupLora | None, thin: DropoutMask | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gate and up in bf16, what LoRA and biases add to them, and LoRA's input and what A makes of it."""
    wide = product(x, weights.first.transpose(1, 2), ends)
    extra = _bias(weights.first_bias, ends, x.shape[0])
    if lora is None or lora.first is None:
        return wide, extra, None, None
    source = _thin(thin, x, 1)
    inner = product(source, lora.first.a.transpose(1, 2), lora.ends)
    added = product(inner, lora.first.b.transpose(1, 2), lora.ends)
    return wide, added if extra is None else extra + added, source, inner


def forward(
    hidden: Tensor,
    rows: GroupedRows,
    weights: Decoded,
    gate: Gate,
    out: Tensor,
    lora: GroupLora | None = None,
    thin: DropoutMask | None = None,
) -> None:
    """Adds to `out`, float32 [T, H]."""
    x = hidden.index_select(0, rows.token).to(torch.bfloat16)
    wide, extra, _, _ = _wide(x, weights, rows.ends, lora, thin)
    h = epilogue.activate(wide, extra, gate, weights.gated)
    y = product(h, weights.down.transpose(1, 2), rows.ends)
    extra = _bias(weights.down_bias, rows.ends, x.shape[0])
    if lora is not None and lora.down is not None:
        inner = product(_thin(thin, h, 2), lora.down.a.transpose(1, 2), lora.ends)
        added = product(inner, lora.down.b.transpose(1, 2), lora.ends)
        extra = added if extra is None else extra + added
    epilogue.scatter(y, extra, rows.token, rows.weight, out, rows.live)


def backward(
    grad_out: Tensor,
    hidden: Tensor,
    rows: GroupedRows,
    weights: Decoded,
    gate: Gate,
    grad_hidden: Tensor,
    lora: GroupLora | None = None,
    thin: DropoutMask | None = None,
    learns: bool = False,
) -> tuple[Tensor, dict[str, Gradient]]:
    """Adds to `grad_hidden`, float32 [T, H]; returns the routing weights' gradient, float32 [R], and with `learns` the
    gradients of LoRA's "first" and "down"."""
    x = hidden.index_select(0, rows.token).to(torch.bfloat16)
    rising = grad_out.index_select(0, rows.token).to(torch.bfloat16)
    wide, extra, source, inner = _wide(x, weights, rows.ends, lora, thin)
    grad_h, more, low = product(rising, weights.down, rows.ends), None, None
    if lora is not None and lora.down is not None:
        low = product(rising, lora.down.b, lora.ends)
        more = _thin(thin, product(low, lora.down.a, lora.ends), 2)
    h, grad_wide, grad_weight = epilogue.activate_back(wide, extra, grad_h, more, rows.weight, gate, weights.gated)
    if (bias := _bias(weights.down_bias, rows.ends, x.shape[0])) is not None:
        grad_weight = grad_weight + torch.linalg.vecdot(rising.float(), bias)
    grad_x, more = product(grad_wide, weights.first, rows.ends), None
    found: dict[str, Gradient] = {}
    if lora is not None and lora.first is not None:
        assert source is not None and inner is not None
        down = product(grad_wide, lora.first.b, lora.ends)
        more = _thin(thin, product(down, lora.first.a, lora.ends), 1)
        if learns:
            found["first"] = outer(down, source, lora.ends), outer(grad_wide, inner, lora.ends)
    if lora is not None and lora.down is not None and learns:
        assert low is not None
        seen, weight = _thin(thin, h, 2), rows.weight[:, None]
        raised = (product(seen, lora.down.a.transpose(1, 2), lora.ends) * weight).to(torch.bfloat16)
        found["down"] = outer((low * weight).to(torch.bfloat16), seen, lora.ends), outer(rising, raised, lora.ends)
    epilogue.scatter(grad_x, more, rows.token, None, grad_hidden, rows.live)
    return grad_weight, found
