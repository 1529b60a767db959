"""bf16:12 in Triton, in two kernels: low bytes and high bytes by index, 16 outputs by 128 of K in a program; then the
patches of a strip. Bytes are in the order of `csrc/kernels/bf16_12.h`, and the result has the bits of the bf16 numbers
that were packed. Nothing depends on the number of patches, so a CUDA graph can hold it.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktransformers.quantized.gpu import layout
from ktransformers.quantized.gpu.layout import PackedMatrix, StripFormat

COLUMNS = 128
NOWHERE = tl.constexpr(layout.NOWHERE)
LINE = tl.constexpr(layout.LINE)
LOW_BYTES = tl.constexpr(512)  # of a k tile; its indices follow
TILE = tl.constexpr(768)  # bytes


@triton.jit
def _decode(
    bytes_,
    where,
    out,  # int16: the bits of bf16
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
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    place, block, chunk = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0)
    distance = tl.load(where + place).to(tl.int64)
    if distance != NOWHERE:
        base = tl.multiple_of(distance * unit, LINE) + block.to(tl.int64) * block_bytes + strip_at
        n, k = tl.arange(0, 16)[:, None], chunk * WIDTH + tl.arange(0, WIDTH)[None, :]
        inside = (k < columns) & (n < 16)
        at = (k % 32) // 2 * 32 + n * 2 + k % 2  # in the order of tiles of bf16 pairs
        stored = at // 64 * 64 + at // 8 % 4 * 16 + at // 32 % 2 * 8 + at % 8
        tile = bytes_ + base + codes_at + k // 32 * TILE
        low = tl.load(tile + stored, mask=inside, other=0).to(tl.int32)
        pair = tl.load(tile + LOW_BYTES + stored // 128 * 64 + stored % 64, mask=inside, other=0).to(tl.int32)
        index = (pair >> (stored // 64 % 2 * 4)) & 15
        high = tl.load(bytes_ + base + k // SPAN * span_bytes + index, mask=inside, other=0).to(tl.int32)
        row = block * block_rows + n
        target = out + (place * out_rows + first_row + row) * columns + k
        tl.store(target, (high << 8 | low).to(tl.int16), mask=inside & (row < half_rows))


@triton.jit
def _patch(
    words,  # the packed experts as int32
    where,
    out,
    unit,
    block_bytes,
    strip_at,
    patches_at,
    patches,
    block_rows,
    first_row,
    half_rows,
    columns,
    out_rows,
    WIDE: tl.constexpr,
):
    block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    distance = tl.load(where + place).to(tl.int64)
    if distance != NOWHERE:
        base = tl.multiple_of(distance * unit, LINE) + block.to(tl.int64) * block_bytes + strip_at
        p = tl.arange(0, WIDE)
        patch = tl.load(words + (base + patches_at) // 4 + p, mask=p < patches, other=-1)
        at = (patch >> 8) & 0xFFFFFF
        k, n = at // 512 * 32 + at % 512 // 32 * 2 + at % 2, at % 32 // 2
        row = block * block_rows + n
        valid = (patch != -1) & (k < columns) & (row < half_rows)
        target = out + (place * out_rows + first_row + row) * columns + k
        low = tl.load(target, mask=valid, other=0).to(tl.int32) & 255
        tl.store(target, ((patch & 255) << 8 | low).to(tl.int16), mask=valid)


def supports(form: StripFormat) -> bool:
    return form.element == "bf16_12"


def decode_half(packed: Tensor, where: Tensor, unit: int, matrix: PackedMatrix, half: int, out: Tensor) -> None:
    """As `dequantize_gguf_triton.decode_half`."""
    flat, form, strip = packed.view(-1), matrix.formats[half], matrix.strip(half)
    first, bits = half * matrix.half_rows, out.view(torch.int16)
    rows = matrix.rows if matrix.paired else matrix.rows - first
    ends = (matrix.block_rows, first, rows, matrix.columns, matrix.out_rows)
    place = (where, bits, unit, matrix.block_bytes, matrix.strip_at(half))
    decode: Any = _decode[(-(-matrix.columns // COLUMNS), matrix.blocks, where.shape[0])]
    decode(flat, *place, strip.codes_at, strip.span_bytes, *ends, SPAN=form.span, WIDTH=COLUMNS)
    patch: Any = _patch[(matrix.blocks, where.shape[0])]
    wide = triton.next_power_of_2(strip.patches)
    patch(flat.view(torch.int32), *place, strip.patches_at, strip.patches, *ends, WIDE=wide)
