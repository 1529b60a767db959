"""Grouped MLPs of some experts on a device over dequantised weights: forward, and the gradients.

Rows `[R, H]` are sorted by expert (and by adapter, in batches that mix adapters); `ends` holds where the rows of each
expert end. Products are grouped GEMMs in bf16 with float32 accumulation, torch's or ours (`own_kernels`); the
activation, biases and routing weights are applied in float32, so results differ from the CPU's by the rounding of gate,
up and the output row to bf16. Backward takes only the inputs of the rows and recomputes gate and up, because the
weights have to be there anyway. The gradient of a routing weight is the inner product of the activation and its own
gradient, so no output row is computed twice. The formulas are written out instead of being left to autograd, because
launch time dominates: what lies between two products is one kernel (`place/gpu/epilogue.py`).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from ktransformers.experts.gate import Gate
from ktransformers.experts.lora import LoraPair
from ktransformers.ground.packages import import_triton_module
from ktransformers.place.gpu import epilogue
from ktransformers.place.gpu.epilogue import DropoutMask

TRITON = "ktransformers.place.gpu.grouped_product_triton"
ALIGN = 8  # bf16 numbers in 16 bytes: the stride alignment that torch's grouped GEMMs require
# Major compute capabilities where torch's grouped GEMM is one kernel; elsewhere it reads the group sizes back to the
# host and launches a product for each group, which a CUDA graph cannot hold.
TORCH_CAPABILITIES = (9, 10)


@dataclass(frozen=True)
class Decoded:
    """Dequantised weights of G experts in bf16; biases in float32."""

    first: Tensor  # [G, 2I or I, H]: gate's rows before up's
    down: Tensor  # [G, H, I]
    first_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def gated(self) -> bool:
        return self.first.shape[1] == 2 * self.down.shape[2]


@dataclass(frozen=True)
class GroupLora:
    """LoRA for the rows of a group: stacked pairs in bf16, their scaling folded into B, their rank a multiple of ALIGN.
    `ends` may cut the rows of an expert further, by adapter."""

    ends: Tensor
    first: LoraPair | None
    down: LoraPair | None


@dataclass(frozen=True)
class GroupedRows:
    """The rows of a batch that a group of experts computes, sorted by expert."""

    token: Tensor  # int64 [R]
    weight: Tensor  # float32 [R]
    ends: Tensor  # int32 [G]
    valid_rows: Tensor | None = None  # int32 [1]: number of rows that count; rows from there on are padding. None: all


Gradient = tuple[Tensor, Tensor]  # of A and of B, as in GroupLora


@functools.cache
def own_kernels(device: torch.device) -> ModuleType | None:
    """Our grouped products, if they are the ones to use on this device; None: torch's."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in TORCH_CAPABILITIES:
        return None
    return import_triton_module(TRITON)


def is_capturable(device: torch.device) -> bool:
    """Whether a grouped product does not synchronise the host, so that a CUDA graph can hold it."""
    return own_kernels(device) is not None or torch.cuda.get_device_capability(device)[0] in TORCH_CAPABILITIES


def _grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if not a.is_cuda and a.dtype == torch.bfloat16:  # tests: not every CPU multiplies bf16
        return _grouped(a.float(), b.float(), ends).to(torch.bfloat16)
    if hasattr(F, "grouped_mm"):
        return F.grouped_mm(a, b, offs=ends)
    return torch._grouped_mm(a, b, offs=ends)


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """rows of group g times matrices[g]: [R, K], [G, K, N] -> [R, N]."""
    if (kernels := own_kernels(rows.device)) is not None:
        product: Tensor = kernels.product(rows.contiguous(), matrices, ends)
        return product
    if rows.shape[1] % ALIGN == 0 and matrices.shape[2] % ALIGN == 0:
        return _grouped(rows, matrices, ends)
    bounds = [0, *ends.tolist()]
    parts = [rows[a:b] @ matrix for a, b, matrix in zip(bounds, bounds[1:], matrices, strict=False)]
    return torch.cat(parts)


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """left of group g, transposed, times right of group g: [R, M], [R, N] -> [G, M, N]."""
    if (kernels := own_kernels(left.device)) is not None:
        product: Tensor = kernels.outer(left.contiguous(), right.contiguous(), ends)
        return product
    if left.shape[1] % ALIGN == 0 and right.shape[1] % ALIGN == 0:
        return _grouped(left.t(), right, ends)
    bounds = [0, *ends.tolist()]
    return torch.stack([left[a:b].t() @ right[a:b] for a, b in itertools.pairwise(bounds)])


def _bias(bias: Tensor | None, ends: Tensor, rows: int) -> Tensor | None:
    """The bias of each row, float32."""
    if bias is None:
        return None
    expert = torch.searchsorted(ends, torch.arange(rows, device=ends.device, dtype=ends.dtype), right=True)
    return bias[expert]


def _dropout(dropout: DropoutMask | None, rows: Tensor, stage: int) -> Tensor:
    return rows if dropout is None else dropout(rows, stage)


def _gate_up(
    x: Tensor, weights: Decoded, ends: Tensor, lora: GroupLora | None, dropout: DropoutMask | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gate and up in bf16, the sum of LoRA and bias to be added, LoRA's input, and its product with A."""
    gate_up = grouped_product(x, weights.first.transpose(1, 2), ends)
    extra = _bias(weights.first_bias, ends, x.shape[0])
    if lora is None or lora.first is None:
        return gate_up, extra, None, None
    lora_input = _dropout(dropout, x, 1)
    low_rank_rows = grouped_product(lora_input, lora.first.a.transpose(1, 2), lora.ends)
    lora_out = grouped_product(low_rank_rows, lora.first.b.transpose(1, 2), lora.ends)
    return gate_up, lora_out if extra is None else extra + lora_out, lora_input, low_rank_rows


def forward(
    hidden: Tensor,
    rows: GroupedRows,
    weights: Decoded,
    gate: Gate,
    out: Tensor,
    lora: GroupLora | None = None,
    dropout: DropoutMask | None = None,
) -> None:
    """Add the experts' weighted outputs to `out`, float32 [T, H]."""
    x = hidden.index_select(0, rows.token).to(torch.bfloat16)
    gate_up, extra, _, _ = _gate_up(x, weights, rows.ends, lora, dropout)
    h = epilogue.activate(gate_up, extra, gate, weights.gated)
    y = grouped_product(h, weights.down.transpose(1, 2), rows.ends)
    extra = _bias(weights.down_bias, rows.ends, x.shape[0])
    if lora is not None and lora.down is not None:
        low_rank_rows = grouped_product(_dropout(dropout, h, 2), lora.down.a.transpose(1, 2), lora.ends)
        lora_out = grouped_product(low_rank_rows, lora.down.b.transpose(1, 2), lora.ends)
        extra = lora_out if extra is None else extra + lora_out
    epilogue.scatter(y, extra, rows.token, rows.weight, out, rows.valid_rows)


def backward(
    grad_out: Tensor,
    hidden: Tensor,
    rows: GroupedRows,
    weights: Decoded,
    gate: Gate,
    grad_hidden: Tensor,
    lora: GroupLora | None = None,
    dropout: DropoutMask | None = None,
    needs_grad: bool = False,
) -> tuple[Tensor, dict[str, Gradient]]:
    """Add to `grad_hidden`, float32 [T, H]; returns the gradient of the routing weights, float32 [R], and with
    `needs_grad` the gradients of the LoRA pairs "first" and "down"."""
    x = hidden.index_select(0, rows.token).to(torch.bfloat16)
    grad_rows = grad_out.index_select(0, rows.token).to(torch.bfloat16)
    gate_up, extra, lora_input, low_rank_rows = _gate_up(x, weights, rows.ends, lora, dropout)
    grad_h, lora_grad, low_rank = grouped_product(grad_rows, weights.down, rows.ends), None, None
    if lora is not None and lora.down is not None:
        low_rank = grouped_product(grad_rows, lora.down.b, lora.ends)
        lora_grad = _dropout(dropout, grouped_product(low_rank, lora.down.a, lora.ends), 2)
    h, grad_wide, grad_weight = epilogue.activate_backward(
        gate_up, extra, grad_h, lora_grad, rows.weight, gate, weights.gated
    )
    if (bias := _bias(weights.down_bias, rows.ends, x.shape[0])) is not None:
        grad_weight = grad_weight + torch.linalg.vecdot(grad_rows.float(), bias)
    grad_x, lora_grad = grouped_product(grad_wide, weights.first, rows.ends), None
    lora_grads: dict[str, Gradient] = {}
    if lora is not None and lora.first is not None:
        assert lora_input is not None and low_rank_rows is not None
        down = grouped_product(grad_wide, lora.first.b, lora.ends)
        lora_grad = _dropout(dropout, grouped_product(down, lora.first.a, lora.ends), 1)
        if needs_grad:
            lora_grads["first"] = (
                grouped_outer(down, lora_input, lora.ends),
                grouped_outer(grad_wide, low_rank_rows, lora.ends),
            )
    if lora is not None and lora.down is not None and needs_grad:
        assert low_rank is not None
        down_input, weight = _dropout(dropout, h, 2), rows.weight[:, None]
        weighted_rows = (grouped_product(down_input, lora.down.a.transpose(1, 2), lora.ends) * weight).to(
            torch.bfloat16
        )
        lora_grads["down"] = (
            grouped_outer((low_rank * weight).to(torch.bfloat16), down_input, lora.ends),
            grouped_outer(grad_rows, weighted_rows, lora.ends),
        )
    epilogue.scatter(grad_x, lora_grad, rows.token, None, grad_hidden, rows.valid_rows)
    return grad_weight, lora_grads
