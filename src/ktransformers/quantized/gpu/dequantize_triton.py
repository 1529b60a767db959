"""The one-pass decoder in Triton: a program takes 16 outputs by 128 of K of one expert from packed bytes to bf16.

Codes are read as 32-bit words (16-bit for bf16), of which a tile's 512 values share a few, so that the loads of a warp
fall into one or two lines; headers are read through views of the same buffer in their own types. Kinds of elements and
scales are numbers at compile time. Values whose quants lie in two planes or whose scales are those of GGUF's K types
come from `dequantize_gguf_triton.py`; bf16:12 has a kernel of its own (`dequantize_bf16_12_triton.py`).
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktransformers.quantized.gpu import dequantize_bf16_12_triton, dequantize_gguf_triton, layout
from ktransformers.quantized.gpu.dequantize_gguf_triton import gguf_values, unsigned_number
from ktransformers.quantized.gpu.layout import TILE_BYTES, PackedMatrix, StripFormat

COLUMNS = 128  # of K that a program takes
NOWHERE = tl.constexpr(layout.NOWHERE)
LINE = tl.constexpr(layout.LINE)  # bytes that all experts and blocks are multiples of
# Kinds of elements and of scales (csrc/kernels/format.h); the scales of GGUF are of its own kinds.
BF16, INT8, UINT, E4M3, E2M1, GGUF = (tl.constexpr(number) for number in range(6))
FLOAT, E8M0, NESTED = (tl.constexpr(number) for number in range(3))
ELEMENTS = {"bf16": BF16, "int8": INT8, "uint": UINT, "e4m3": E4M3, "e2m1": E2M1}
SCALE_KINDS = {"none": FLOAT, "floats": FLOAT, "e8m0": E8M0, "e4m3": NESTED}
SCALES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "u8": torch.uint8}


@triton.jit
def from_e4m3(code):
    """Exponent and mantissa are moved into float32's, whose bias is larger by 120; subnormal numbers stay exact."""
    bits = ((code & 127) << 20) | ((code & 128) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((code & 127) == 127, float("nan"), value)


@triton.jit
def from_e2m1(code):
    """As `from_e4m3`; the bias is larger by 126."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def from_e8m0(code):
    bits = code.to(tl.int32)
    bits = tl.where(bits == 0, 0x00400000, tl.where(bits == 255, 0x7FC00000, bits << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def number_of(code, CODE: tl.constexpr, ZERO: tl.constexpr):
    """Codes as float32."""
    if CODE == INT8:
        number = unsigned_number(code ^ 128, 128)
    elif CODE == UINT:
        number = unsigned_number(code, ZERO)
    elif CODE == E4M3:
        number = from_e4m3(code)
    else:
        number = from_e2m1(code)
    return number


@triton.jit
def scale_of(
    scales,
    factors,
    base,  # first byte of the strip
    spans_at,
    n,
    k,
    inside,
    SCALE: tl.constexpr,
    SPAN: tl.constexpr,
    ENTRIES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
    """Of output n and number k of K."""
    span = k // SPAN if SPAN > 0 else k * 0
    if SCALE == NESTED:
        sub = span * 32 + ((k % SPAN) // 16) * 16
        inner = tl.load(scales + base + spans_at + sub + n, mask=inside, other=0)
        scale = from_e4m3(inner.to(tl.int32)) * tl.load(factors + base // 4)
    else:
        entry = n if ENTRIES == 16 else n * 0
        raw = tl.load(scales + (base + spans_at) // SCALE_BYTES + span * ENTRIES + entry, mask=inside, other=0)
        scale = from_e8m0(raw) if SCALE == E8M0 else raw.to(tl.float32)
    return scale


@triton.jit
def _decode(
    words,  # the buffer as int32, or int16 for bf16
    scales,  # the buffer in the type of the scales; as bytes for GGUF
    factors,  # and as float32; as float16 for GGUF
    where,
    out,
    unit,  # bytes that `where` counts in
    block_bytes,
    first_half,
    half_bytes,  # from half 0 to half 1 of a block
    codes_at,  # within the strip
    spans_at,  # the bytes of a span for GGUF
    block_rows,
    half_rows,  # from half 0 to half 1 in the output
    end_rows,  # of half 0 and half 1, all blocks together
    end_rows_1,
    columns,
    out_rows,
    CODE: tl.constexpr,
    ZERO: tl.constexpr,  # point of unsigned quants
    SCALE: tl.constexpr,
    BITS: tl.constexpr,  # of the first plane
    HIGH: tl.constexpr,  # and of the second, or 0
    SPAN: tl.constexpr,
    ENTRIES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    WIDTH: tl.constexpr,
    HALVES: tl.constexpr,
):
    place, block, chunk = (tl.program_id(2) // HALVES).to(tl.int64), tl.program_id(1), tl.program_id(0)
    half = first_half + tl.program_id(2) % HALVES
    distance = tl.load(where + place).to(tl.int64)
    if distance == NOWHERE:
        return
    base = tl.multiple_of(distance * unit, LINE) + block.to(tl.int64) * block_bytes + half * half_bytes
    n, k = tl.arange(0, 16)[:, None], chunk * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = k < columns
    tile, step = k // 32, (k % 32) // 2
    if CODE == BF16:
        at = base // 2 + tile * 1024 + step * 32 + n * 2 + k % 2
        value = tl.load(words + at, mask=inside & (n < 16), other=0).to(tl.bfloat16, bitcast=True)
    elif CODE == GGUF:
        value = gguf_values(
            words, scales, factors, base, n, k, inside & (n < 16), codes_at, spans_at, SCALE, ZERO, BITS, HIGH, SPAN
        ).to(tl.bfloat16)
    else:
        bit = step * BITS
        at = (base + codes_at) // 4 + tile * (16 * BITS) + (bit // 32) * 32 + n * 2 + k % 2
        code = (tl.load(words + at, mask=inside & (n < 16), other=0) >> (bit % 32)) & ((1 << BITS) - 1)
        scale = scale_of(scales, factors, base, spans_at, n, k, inside & (n < 16), SCALE, SPAN, ENTRIES, SCALE_BYTES)
        value = (number_of(code, CODE, ZERO) * scale).to(tl.bfloat16)
    row = block * block_rows + n
    target = out + (place * out_rows + half * half_rows + row) * columns + k
    tl.store(target, value, mask=inside & (row < tl.where(half == 0, end_rows, end_rows_1)))


def kind_of(form: StripFormat) -> tuple[Any, Any] | None:
    """The kinds of elements and scales; None for those of GGUF, of bf16:12, or of none."""
    if len(form.planes) > 1 or form.bits == 1 or form.element not in ELEMENTS or form.scales not in SCALE_KINDS:
        return None
    return ELEMENTS[form.element], SCALE_KINDS[form.scales]


def supports(matrix: PackedMatrix) -> bool:
    others = (dequantize_gguf_triton.supports, dequantize_bf16_12_triton.supports)
    return all(kind_of(form) is not None or any(supported(form) for supported in others) for form in matrix.formats)


def unit_of(where: Tensor, matrix: PackedMatrix) -> int:
    return 1 if where.dtype == torch.int64 else matrix.expert_bytes


def decode(packed: Tensor, where: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
    """As `dequantize.decode`; experts with NOWHERE for their slot are left out. Both halves of a block are decoded in
    one launch where they have one format; the last half block may hold fewer rows than a whole one."""
    flat, unit = packed.view(-1), unit_of(where, matrix)
    together = matrix.formats[0] == matrix.formats[1] and not dequantize_bf16_12_triton.supports(matrix.formats[0])
    for half in (0,) if together else (0, 1):
        form = matrix.formats[half]
        if dequantize_bf16_12_triton.supports(form):
            dequantize_bf16_12_triton.decode_half(packed, where, unit, matrix, half, out)
            continue
        views, spans_at, constants = _stored(flat, matrix, half)
        halves = 2 if together else 1
        launch: Any = _decode[(-(-matrix.columns // COLUMNS), matrix.blocks, halves * where.shape[0])]
        launch(
            *views,
            where,
            out,
            unit,
            matrix.block_bytes,
            half,
            TILE_BYTES if matrix.plain else matrix.strip_at(1),
            0 if matrix.plain else matrix.strip(half).codes_at,
            spans_at,
            matrix.block_rows,
            matrix.half_rows,
            matrix.rows,
            matrix.rows if matrix.paired else matrix.rows - matrix.half_rows,
            matrix.columns,
            matrix.out_rows,
            ZERO=form.zero_point,
            SPAN=form.span,
            WIDTH=COLUMNS,
            HALVES=halves,
            **constants,
        )


def _stored(flat: Tensor, matrix: PackedMatrix, half: int) -> tuple[tuple[Tensor, Tensor, Tensor], int, dict[str, Any]]:
    """Of the format of a half block: words, scales and factors; `spans_at`; kinds and sizes."""
    form, kind = matrix.formats[half], kind_of(matrix.formats[half])
    if kind is None:
        low, high = (*form.planes, 0)[:2]
        constants = {"CODE": GGUF, "SCALE": dequantize_gguf_triton.SCALE_KINDS[form.scales], "BITS": low, "HIGH": high}
        constants |= {"ENTRIES": 0, "SCALE_BYTES": 0}
        # A fused multiply-add would round once less than the format's definition does.
        constants["enable_fp_fusion"] = False
        return (flat.view(torch.int32), flat, flat.view(torch.float16)), matrix.strip(half).span_bytes, constants
    constants = {"CODE": kind[0], "SCALE": kind[1], "BITS": form.bits, "HIGH": 0}
    if matrix.plain:
        return (flat.view(torch.int16), flat, flat), 0, constants | {"ENTRIES": 16, "SCALE_BYTES": 1}
    field = (form.fields or form.row)[0]
    scales = flat.view(SCALES[field.kind])
    constants |= {"ENTRIES": 1 if field.shared else 16, "SCALE_BYTES": scales.element_size()}
    views = (flat.view(torch.int32), scales, flat.view(torch.float32))
    return views, matrix.strip(half).row_bytes if form.span else 0, constants
