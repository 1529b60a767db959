"""Products of a block of 32 outputs of a packed expert with a few rows of activations, in float32 multiplications: for
decoding, where most experts have one or two rows.

Packed bytes go from memory to registers in the order in which they lie, 16 bytes a thread, and stay there: no tile in
shared memory, no barrier before the sums of a program's threads are added. A word of 32 bits holds two neighbouring
numbers of K of one output in bf16, and every second column of one output in quantized formats
(`quantized/gpu/layout.py`). Rows of x are read as pairs of neighbouring bf16 numbers, which every word of the same
numbers of K shares. Values of values are rounded to bf16 before the product, so they are those of the dequantized
matrix.

Loads of weights and scales have one shape per program size, in which Triton gives a thread the scales of its own
words; others would be exchanged between threads through shared memory. Hence a step has 4 rows of words for each warp,
or 8 or 16 of bf16. Words of the next step are loaded before those of this one are multiplied.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,no-redef,assignment"
# ruff: noqa: RUF005 - Triton has no unpacking inside of a tuple
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktransformers.quantized.gpu import dequantize_triton
from ktransformers.quantized.gpu.dequantize_triton import E2M1, E4M3, E8M0, INT8, NESTED, from_e4m3, from_e8m0
from ktransformers.quantized.gpu.layout import TILE_BYTES, TILE_K, PackedMatrix


@dataclass(frozen=True)
class Tile:
    warps: int  # of a program
    rows: int  # of bf16 in a step: 8 a warp, or 16


def tile_of(tokens: int) -> Tile:
    """As measured: one token has few programs, whose loads must be the larger."""
    return Tile(4, 16 if tokens == 1 else 8)


class Form(NamedTuple):
    """Constants of `block_products`, which unpacks them in this order."""

    plain: bool  # bf16, and all that follows up to `scale_bytes` is unused
    code: int = 0
    zero: int = 0
    scale: int = 0
    bits: int = 0
    span: int = 0
    entries: int = 16
    scale_bytes: int = 0
    step: int = 0  # rows of words
    pack: bool = True  # not in the interpreter, which has no assembler


@triton.jit
def _halves(word):
    """Two bf16 numbers of a word, as float32."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _multiply_add(sums, x, weights_even, weights_odd):
    """Sums of one half of a block plus rows' two numbers of K times their weights; `sums` and `x` are tuples."""
    added = ()
    for m in tl.static_range(len(x)):
        even, odd = _halves(x[m])
        added = added + (tl.fma(weights_odd, odd, tl.fma(weights_even, even, sums[m])),)
    return added


@triton.jit
def _loaded(rows, offset, inside):
    """Words of each row of x."""
    words = ()
    for m in tl.static_range(len(rows)):
        words = words + (tl.load(rows[m] + offset, mask=inside, other=0),)
    return words


@triton.jit
def _zeros(rows, STEP: tl.constexpr):
    """float32 [STEP, 16] for each row of x."""
    sums = ()
    for _ in tl.static_range(len(rows)):
        sums = sums + (tl.zeros((STEP, 16), tl.float32),)
    return sums


@triton.jit
def _sums(parts, FACTOR: tl.constexpr):
    """float32 [16] for each row of x."""
    sums = ()
    for m in tl.static_range(len(parts)):
        sums = sums + (FACTOR * tl.sum(parts[m], 0),)
    return sums


@triton.jit
def _integer(word, mask, s: tl.constexpr, BITS: tl.constexpr, FLIP: tl.constexpr):
    """2^e + code for the s-th code of a word, FLIP an exclusive or with its bits; and 2^e. The code is left where its
    bits are part of the mantissa, so words are shifted for two or three quants at once; with a mask in a register,
    one instruction takes a code and puts the exponent next to it. Returns float32."""
    if BITS == 4:
        PLACE: tl.constexpr = 4 * s + 8 if s < 2 else (4 * s if s < 5 else 4 * s - 12)
        moved = word << 8 if s < 2 else (word if s < 5 else word >> 12)
    elif BITS == 2:
        PLACE: tl.constexpr = 2 * s % 16
        moved = word if s < 8 else word >> 16
    else:
        PLACE: tl.constexpr = 8
        moved = word << 8 if s == 0 else (word if s == 1 else word >> (8 * s - 8))
    BITS_OF_E: tl.constexpr = ((150 - PLACE) << 23) | (FLIP << PLACE)
    E: tl.constexpr = 1 << (23 - PLACE)
    return ((moved & (mask << PLACE)) ^ BITS_OF_E).to(tl.float32, bitcast=True), E


@triton.jit
def _values(
    word, mask, scale, s: tl.constexpr, CODE: tl.constexpr, ZERO: tl.constexpr, BITS: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """float32: the s-th numbers of words times their scale; EXACT: a fused product of an integer and the scale is
    exact, because the bits of both fit into those of float32. Floating-point quants: by their bits, whose exponent has
    another bias in float32; half of that is in the scale and half left to the sum, where neither overflows. The code of
    NaN in e4m3 is 480 here; prompts, which are computed from decoded matrices, have the NaN."""
    if CODE == E4M3:
        value = (((word << (24 - 8 * s)) >> 4) & -0x78100000).to(tl.float32, bitcast=True) * scale
    elif CODE == E2M1:
        value = (((word << (28 - 4 * s)) >> 6) & -0x7E400000).to(tl.float32, bitcast=True) * scale
    else:
        POINT: tl.constexpr = 128 if CODE == INT8 else ZERO
        number, e = _integer(word, mask, s, BITS, 128 if CODE == INT8 else 0)
        value = tl.fma(number, scale, scale * (-e - POINT)) if EXACT else (number - (e + POINT)) * scale
    return value


@triton.jit
def _decoded(
    even, odd, mask, scale, s: tl.constexpr,
    CODE: tl.constexpr, ZERO: tl.constexpr, BITS: tl.constexpr, EXACT: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """The s-th numbers of words of even and odd numbers of K, rounded to bf16, as float32."""
    even_value = _values(even, mask, scale, s, CODE, ZERO, BITS, EXACT)
    odd_value = _values(odd, mask, scale, s, CODE, ZERO, BITS, EXACT)
    if PACK:  # one instruction rounds two numbers
        word = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even_value, odd_value], dtype=tl.int32, is_pure=True, pack=1
        )
        values = _halves(word)
    else:
        values = even_value.to(tl.bfloat16).to(tl.float32), odd_value.to(tl.bfloat16).to(tl.float32)
    return values


@triton.jit
def _raw_scales(
    scales, base, spans_at, n, k, inside,
    SCALE: tl.constexpr, SPAN: tl.constexpr, SCALE_BYTES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Scales as they are stored, of outputs n and numbers k of K, with what Triton must know to load two of a thread in
    one instruction."""
    span = k // SPAN if SPAN > 0 else k * 0
    if SCALE == NESTED:
        at = scales + tl.multiple_of(base + spans_at, 4) + (span * 32 + (k % SPAN) // 16 * 16 + n)
    elif SCALE_BYTES == 1:  # divided by one, the hint would be lost
        at = scales + tl.multiple_of(base + spans_at, 4) + (span * ENTRIES + n)
    else:
        at = scales + tl.multiple_of((base + spans_at) // SCALE_BYTES, 2) + (span * ENTRIES + n)
    return tl.load(at, mask=inside, other=0)


@triton.jit
def _scales(raw, factors, base, SCALE: tl.constexpr, FACTOR: tl.constexpr):
    """float32, times FACTOR."""
    if SCALE == NESTED:
        scale = from_e4m3(raw.to(tl.int32)) * tl.load(factors + base // 4)
    elif SCALE == E8M0:
        scale = from_e8m0(raw)
    else:
        scale = raw.to(tl.float32)
    return FACTOR * scale


@triton.jit
def _words(words, row, inside, PLAIN: tl.constexpr):
    """Rows of words; a tile of 16 rows of bf16 is followed by that of the other half of the block. Each is read once:
    L1 is left to x."""
    at = words + (row // 16 * 512 + row % 16 * 16 if PLAIN else row * 32)
    return tl.load(at, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def block_products(
    x,  # tuple: rows of x, int32, pairs of bf16
    words,  # packed experts as int32
    scales,  # in the type of the scales
    factors,  # as float32
    base,  # first byte of the block
    columns,
    half_bytes,
    codes_at,
    spans_at,
    mask,  # of a code
    FORM: tl.constexpr,  # the values of a `Form`
):
    """Of the block's low and of its high half: float32 [16] for each row of x."""
    PLAIN: tl.constexpr = FORM[0]
    CODE: tl.constexpr = FORM[1]
    ZERO: tl.constexpr = FORM[2]
    SCALE: tl.constexpr = FORM[3]
    BITS: tl.constexpr = FORM[4]
    SPAN: tl.constexpr = FORM[5]
    ENTRIES: tl.constexpr = FORM[6]
    SCALE_BYTES: tl.constexpr = FORM[7]
    STEP: tl.constexpr = FORM[8]
    PACK: tl.constexpr = FORM[9]
    EXACT: tl.constexpr = BITS == 4 and SCALE_BYTES == 2
    FACTOR: tl.constexpr = 1.0 if PLAIN else (2.0**60 if CODE == E4M3 else (2.0**63 if CODE == E2M1 else 1.0))
    PER_WORD: tl.constexpr = 1 if PLAIN else 32 // BITS  # pairs of K of a row of words
    LANES: tl.constexpr = 16 if PLAIN else 32
    row, lane = tl.arange(0, STEP)[:, None], tl.arange(0, LANES)[None, :]
    high_base, pairs = base + half_bytes, columns // 2
    low_at = words + tl.multiple_of((base + codes_at) // 4, 16) + lane
    high_at = words + tl.multiple_of((high_base + codes_at) // 4, 16) + lane
    n = tl.arange(0, 16)[None, :] if ENTRIES == 16 else tl.zeros((1, 1), tl.int32)
    low_sums, high_sums = _zeros(x, STEP), _zeros(x, STEP)
    inside = row * PER_WORD < pairs
    next_low, next_high = _words(low_at, row, inside, PLAIN), _words(high_at, row, inside, PLAIN)
    if not PLAIN:
        k = row * (2 * PER_WORD)
        if SPAN == 0:
            k, inside = tl.zeros((1, 1), tl.int32), tl.full((1, 1), 1, tl.int1)
        next_low_scale = _raw_scales(scales, base, spans_at, n, k, inside, SCALE, SPAN, SCALE_BYTES, ENTRIES)
        next_high_scale = _raw_scales(scales, high_base, spans_at, n, k, inside, SCALE, SPAN, SCALE_BYTES, ENTRIES)
        low_scale = _scales(next_low_scale, factors, base, SCALE, FACTOR)
        high_scale = _scales(next_high_scale, factors, high_base, SCALE, FACTOR)
    for start in range(0, tl.cdiv(pairs, PER_WORD), STEP):
        low, high = next_low, next_high
        here, row_after = start + row, start + STEP + row
        after = row_after * PER_WORD < pairs
        next_low, next_high = _words(low_at, row_after, after, PLAIN), _words(high_at, row_after, after, PLAIN)
        if PLAIN:
            low_even, low_odd = _halves(low)
            high_even, high_odd = _halves(high)
        else:
            low_words, low_words_odd = tl.split(tl.reshape(low, (STEP, 16, 2)))
            high_words, high_words_odd = tl.split(tl.reshape(high, (STEP, 16, 2)))
            if SPAN > 0:
                low_scale = _scales(next_low_scale, factors, base, SCALE, FACTOR)
                high_scale = _scales(next_high_scale, factors, high_base, SCALE, FACTOR)
                k = row_after * (2 * PER_WORD)
                next_low_scale = _raw_scales(scales, base, spans_at, n, k, after, SCALE, SPAN, SCALE_BYTES, ENTRIES)
                next_high_scale = _raw_scales(
                    scales, high_base, spans_at, n, k, after, SCALE, SPAN, SCALE_BYTES, ENTRIES
                )
        for s in tl.static_range(PER_WORD):
            if not PLAIN:
                low_even, low_odd = _decoded(
                    low_words, low_words_odd, mask, low_scale, s, CODE, ZERO, BITS, EXACT, PACK
                )
                high_even, high_odd = _decoded(
                    high_words, high_words_odd, mask, high_scale, s, CODE, ZERO, BITS, EXACT, PACK
                )
            numbers = _loaded(x, here * PER_WORD + s, here * PER_WORD < pairs)
            low_sums = _multiply_add(low_sums, numbers, low_even, low_odd)
            high_sums = _multiply_add(high_sums, numbers, high_even, high_odd)
    return _sums(low_sums, FACTOR), _sums(high_sums, FACTOR)


def supports(matrix: PackedMatrix) -> bool:
    """Whether both halves have one format: bf16, or quants of 2, 4 or 8 bits in one plane; and K has whole rows of
    words, since x is not masked within one."""
    form = matrix.formats[0]
    if matrix.plain:
        return matrix.columns % 2 == 0
    kind = dequantize_triton.kind_of(form)
    if form != matrix.formats[1] or kind is None or form.span % TILE_K:
        return False
    bits = (4,) if kind[1] == dequantize_triton.NESTED else (2, 4, 8)
    return form.bits in bits and matrix.columns % (64 // form.bits) == 0


def arguments(
    packed: Tensor, matrix: PackedMatrix, tile: Tile
) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """Of `block_products`: words, scales and factors; columns to mask; constants."""
    flat, stored, strip = packed.view(-1), matrix.formats[0], matrix.strip(0)
    words, floats = flat.view(torch.int32), flat.view(torch.float32)
    if matrix.plain:
        form = Form(True, step=tile.rows * tile.warps, pack=packed.is_cuda)
        places = (TILE_BYTES, 0, 0, 0)
        views = (words, words, floats)
    else:
        kind, field = dequantize_triton.kind_of(stored), (stored.fields or stored.row)[0]
        assert kind is not None
        spans_at = strip.row_bytes if stored.span else 0
        places = (matrix.strip_at(1), strip.codes_at, spans_at, (1 << stored.bits) - 1)
        scales = flat.view(dequantize_triton.SCALES[field.kind])
        form = Form(
            False,
            kind[0],
            stored.zero_point,
            kind[1],
            stored.bits,
            stored.span,
            entries=1 if field.shared else 16,
            scale_bytes=scales.element_size(),
            step=4 * tile.warps,
            pack=packed.is_cuda,
        )
        views = (words, scales, floats)
    return views, (matrix.columns, *places), {"FORM": tuple(form), "num_warps": tile.warps}
