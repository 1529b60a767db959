"""Products of 16 outputs of an expert with up to 16 rows of activations on tensor cores, of packed weights in GGUF's K
types, read without a decoded matrix in memory, or of a dequantised matrix.

Values are those of the decoder (`quantized/gpu/dequantize_gguf_triton.py`), rounded to bf16. Formats that take fewer
instructions a value have `block_products_triton.py`.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktransformers.quantized.gpu import dequantize_gguf_triton
from ktransformers.quantized.gpu.dequantize_gguf_triton import gguf_values
from ktransformers.quantized.gpu.layout import PackedMatrix

DENSE, GGUF = (tl.constexpr(number) for number in range(2))  # what is read: a dense matrix, or packed quants
TILE = {"STEP": 128, "num_warps": 4}  # numbers of K of one step, and warps of a program
NO_CODES = dict.fromkeys(("CODE", "ZERO", "LOW", "HIGH", "SPAN"), 0)


@triton.jit
def strip_values(
    words,  # the packed experts as int32; a dense matrix
    scales,  # the packed experts as bytes
    factors,  # and as float16
    base,  # first byte of the strip
    matrix,  # of a dense matrix: its first number,
    row,  # and the outputs [16]
    valid,
    start,  # first number of K
    columns,
    codes_at,  # within the strip
    span_bytes,
    SOURCE: tl.constexpr,
    CODE: tl.constexpr,  # the kind of scales
    ZERO: tl.constexpr,
    LOW: tl.constexpr,  # bits of the first plane
    HIGH: tl.constexpr,  # and of the second, or 0
    SPAN: tl.constexpr,
    STEP: tl.constexpr,  # numbers of K
):
    """bf16 [STEP, 16]: the weights of 16 outputs."""
    if SOURCE == DENSE:
        k = start + tl.arange(0, STEP)
        at = words + matrix + row[None, :] * columns + k[:, None]
        values = tl.load(at, mask=valid[None, :] & (k < columns)[:, None], other=0.0)
    else:
        n, k = tl.arange(0, 16)[None, :], start + tl.arange(0, STEP)[:, None]
        inside = (k < columns) & (n < 16)
        values = gguf_values(
            words, scales, factors, base, n, k, inside, codes_at, span_bytes, CODE, ZERO, LOW, HIGH, SPAN
        ).to(tl.bfloat16)
    return values


@triton.jit
def load_rows(x, present, start, columns, STEP: tl.constexpr):
    """bf16 [M, STEP] of the rows at pointers x [M]."""
    k = start + tl.arange(0, STEP)
    rows = tl.load(x[:, None] + k[None, :], mask=present[:, None] & (k < columns)[None, :], other=0.0)
    return rows.to(tl.bfloat16)


@triton.jit
def multiply_add(rows, values, total, WIDEN: tl.constexpr):
    """`total` [M, 16] plus the product; WIDEN: of the interpreter, which multiplies no bf16."""
    if WIDEN:
        total = tl.dot(rows.to(tl.float32), values.to(tl.float32), total, input_precision="ieee")
    else:
        total = tl.dot(rows, values, total)
    return total


def supports(matrix: PackedMatrix) -> bool:
    """Whether both halves have one format that can be multiplied packed."""
    form = matrix.formats[0]
    return form == matrix.formats[1] and dequantize_gguf_triton.supports(form)


def dense_arguments(matrices: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int], dict[str, Any]]:
    """Of `strip_values` for dequantised matrices."""
    return (matrices, matrices, matrices), (0, 0), NO_CODES | {"SOURCE": DENSE} | TILE


def arguments(packed: Tensor, matrix: PackedMatrix) -> tuple[tuple[Tensor, ...], tuple[int, int], dict[str, Any]]:
    """Of `strip_values`: words, scales and factors; codes_at and span_bytes; constants."""
    flat, form, strip = packed.view(-1), matrix.formats[0], matrix.strip(0)
    high = form.planes[1] if len(form.planes) > 1 else 0
    constants = {"SOURCE": GGUF, "CODE": dequantize_gguf_triton.SCALE_KINDS[form.scales], "ZERO": form.zero_point}
    constants |= {"LOW": form.planes[0], "HIGH": high, "SPAN": form.span} | TILE
    # A fused multiply-add would round values of GGUF's types once less than their decoder does.
    constants["enable_fp_fusion"] = False
    views = flat.view(torch.int32), flat, flat.view(torch.float16)
    return views, (strip.codes_at, strip.span_bytes), constants
