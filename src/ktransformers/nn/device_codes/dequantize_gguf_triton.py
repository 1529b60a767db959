"""The decoder of GGUF's K types and of codes in two planes, in Triton: as `dequantize_triton.py`, with values that are
a product, or a product and a sum or difference, of small numbers in the headers.

A fused multiply-add would round once less than the format's definition does, so the kernel is compiled without.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktransformers.nn.device_codes import layout
from ktransformers.nn.device_codes.layout import PackedMatrix, StripFormat

COLUMNS = 128
NOWHERE = tl.constexpr(layout.NOWHERE)
LINE = tl.constexpr(layout.LINE)  # bytes that all experts and blocks are multiples of
# Kinds of scales (csrc/kernels/format.h).
FLOAT, SCALE_AND_MIN, Q2_K, Q3_K, Q4_K, Q6_K = (tl.constexpr(number) for number in range(6))
SCALE_KINDS = {
    "floats": FLOAT,
    "scale_and_min": SCALE_AND_MIN,
    "q2_k": Q2_K,
    "q3_k": Q3_K,
    "q4_k": Q4_K,
    "q6_k": Q6_K,
}


@triton.jit
def _plane(words, base, n, k, inside, BITS: tl.constexpr):
    """A plane's codes; `base` is the word at which its part of the tile begins."""
    step, lane = (k % 32) // 2, n * 2 + k % 2
    if BITS == 1:  # 16 bits for each lane
        word = tl.load(words + base + lane // 2, mask=inside, other=0)
        return (word >> ((lane % 2) * 16 + step)) & 1
    bit = step * BITS
    word = tl.load(words + base + (bit // 32) * 32 + lane, mask=inside, other=0)
    return (word >> (bit % 32)) & ((1 << BITS) - 1)


@triton.jit
def _byte(bytes_, at, inside):
    return tl.load(bytes_ + at, mask=inside, other=0).to(tl.int32)


@triton.jit
def _half(halves, at, inside):
    return tl.load(halves + at // 2, mask=inside, other=0).to(tl.float32)


@triton.jit
def gguf_values(
    words,
    bytes_,
    halves,
    base,  # first byte of the strip
    n,
    k,
    inside,
    codes_at,
    span_bytes,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,  # point of the codes
    LOW: tl.constexpr,  # bits of the first plane
    HIGH: tl.constexpr,  # and of the second, or 0
    SPAN: tl.constexpr,
):
    """float32: those of outputs n at numbers k of K."""
    tile = (base + codes_at) // 4 + (k // 32) * (16 * (LOW + HIGH))
    code = _plane(words, tile, n, k, inside, LOW)
    if HIGH > 0:
        code = code | (_plane(words, tile + 16 * LOW, n, k, inside, HIGH) << LOW)
    header = base + (k // SPAN) * span_bytes
    sub = k % SPAN
    if KIND == FLOAT:
        value = (code - ZERO).to(tl.float32) * _half(halves, header + 2 * n, inside)
    elif KIND == SCALE_AND_MIN:
        value = code.to(tl.float32) * _half(halves, header + 2 * n, inside)
        value = value + _half(halves, header + 32 + 2 * n, inside)
    elif KIND == Q6_K:
        scale = _byte(bytes_, header + (sub // 16) * 16 + n, inside)
        scale = tl.where(scale > 127, scale - 256, scale).to(tl.float32)
        value = _half(halves, header + 256 + 2 * n, inside) * scale * (code - ZERO).to(tl.float32)
    elif KIND == Q2_K:
        both = _byte(bytes_, header + (sub // 16) * 16 + n, inside)
        slope = _half(halves, header + 256 + 2 * n, inside) * (both & 15).to(tl.float32)
        low = _half(halves, header + 288 + 2 * n, inside) * (both >> 4).to(tl.float32)
        value = slope * code.to(tl.float32) - low
    elif KIND == Q3_K:
        at = sub // 16
        nibble = (_byte(bytes_, header + (at % 8) * 16 + n, inside) >> (4 * (at // 8))) & 15
        pair = (_byte(bytes_, header + (8 + at % 4) * 16 + n, inside) >> (2 * (at // 4))) & 3
        scale = ((nibble | (pair << 4)) - 32).to(tl.float32)
        value = _half(halves, header + 192 + 2 * n, inside) * scale * (code - ZERO).to(tl.float32)
    else:
        at, scales = sub // 32, header + 64
        four = at % 4
        d = _byte(bytes_, scales + four * 16 + n, inside)
        m = _byte(bytes_, scales + (4 + four) * 16 + n, inside)
        top = _byte(bytes_, scales + (8 + four) * 16 + n, inside)
        scale = tl.where(at < 4, d & 63, (top & 15) | ((d >> 2) & 48)).to(tl.float32)
        least = tl.where(at < 4, m & 63, (top >> 4) | ((m >> 2) & 48)).to(tl.float32)
        slope = _half(halves, header + 2 * n, inside) * scale
        low = _half(halves, header + 32 + 2 * n, inside) * least
        value = slope * code.to(tl.float32) - low
    return value


@triton.jit
def _decode(
    words,
    bytes_,
    halves,
    where,
    out,
    unit,
    block_bytes,
    strip_at,
    codes_at,
    span_bytes,
    block_rows,
    first_row,
    half_rows,
    columns,
    out_rows,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    place, block, chunk = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0)
    distance = tl.load(where + place).to(tl.int64)
    if distance == NOWHERE:
        return
    base = tl.multiple_of(distance * unit, LINE) + block.to(tl.int64) * block_bytes + strip_at
    n, k = tl.arange(0, 16)[:, None], chunk * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (k < columns) & (n < 16)
    value = gguf_values(words, bytes_, halves, base, n, k, inside, codes_at, span_bytes, KIND, ZERO, LOW, HIGH, SPAN)
    row = block * block_rows + n
    target = out + (place * out_rows + first_row + row) * columns + k
    tl.store(target, value.to(tl.bfloat16), mask=inside & (row < half_rows))


def supports(form: StripFormat) -> bool:
    halves = form.scales != "floats" or [field.kind for field in form.fields] == ["f16"]
    return form.element == "uint" and form.scales in SCALE_KINDS and halves


def decode_half(packed: Tensor, where: Tensor, unit: int, matrix: PackedMatrix, half: int, out: Tensor) -> None:
    flat, form, strip = packed.view(-1), matrix.formats[half], matrix.strip(half)
    first = half * matrix.half_rows
    launch: Any = _decode[(-(-matrix.columns // COLUMNS), matrix.blocks, where.shape[0])]
    launch(
        flat.view(torch.int32),
        flat,
        flat.view(torch.float16),
        where,
        out,
        unit,
        matrix.block_bytes,
        matrix.strip_at(half),
        strip.codes_at,
        strip.span_bytes,
        matrix.block_rows,
        first,
        matrix.rows if matrix.paired else matrix.rows - first,
        matrix.columns,
        matrix.out_rows,
        KIND=SCALE_KINDS[form.scales],
        ZERO=form.zero_point,
        LOW=form.planes[0],
        HIGH=form.planes[1] if len(form.planes) > 1 else 0,
        SPAN=form.span,
        WIDTH=COLUMNS,
        enable_fp_fusion=False,
    )
