"""Values of GGUF's K types and of quants in two planes, in Triton: a product, or a product and a sum or difference, of
small numbers in the headers. Kernels that call these functions are compiled without fused multiply-adds, which would
round once less than the definitions of the formats do.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

import triton
import triton.language as tl

from ktransformers.quantized.gpu.layout import StripFormat

# Kinds of scales (csrc/kernels/format.h).
FLOAT, SCALE_AND_MIN, Q2_K, Q3_K, Q4_K, Q6_K = (tl.constexpr(number) for number in range(6))
SCALE_KINDS = {"floats": FLOAT, "scale_and_min": SCALE_AND_MIN, "q2_k": Q2_K, "q3_k": Q3_K, "q4_k": Q4_K, "q6_k": Q6_K}


@triton.jit
def unsigned_number(code, ZERO: tl.constexpr):
    """code - ZERO for quants of at most 23 bits, by the bits of 2^23 + code: GPUs convert integers at a quarter of the
    rate of other instructions."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def _plane(words, base, n, k, inside, BITS: tl.constexpr):
    """A plane's quants; `base` is the word at which its part of the tile begins."""
    step, lane = (k % 32) // 2, n * 2 + k % 2
    if BITS == 1:  # 16 bits for each lane
        word = tl.load(words + base + lane // 2, mask=inside, other=0)
        return (word >> ((lane % 2) * 16 + step)) & 1
    bit = step * BITS
    word = tl.load(words + base + (bit // 32) * 32 + lane, mask=inside, other=0)
    return (word >> (bit % 32)) & ((1 << BITS) - 1)


@triton.jit
def _byte(bytes_, at, inside):
    """Of a buffer of bytes, or of words of 32 bits."""
    if bytes_.dtype.element_ty == tl.int32:
        byte = (tl.load(bytes_ + at // 4, mask=inside, other=0) >> ((at & 3) * 8).to(tl.int32)) & 255
    else:
        byte = tl.load(bytes_ + at, mask=inside, other=0).to(tl.int32)
    return byte


@triton.jit
def _half(halves, at, inside):
    """Of a buffer of float16, or of words of 32 bits."""
    if halves.dtype.element_ty == tl.int32:
        word = tl.load(halves + at // 4, mask=inside, other=0) >> ((at & 2) * 8).to(tl.int32)
        half = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        half = tl.load(halves + at // 2, mask=inside, other=0).to(tl.float32)
    return half


@triton.jit
def gguf_scales(bytes_, halves, base, n, k, inside, span_bytes, KIND: tl.constexpr, SPAN: tl.constexpr):
    """float32: what the numbers of outputs n at numbers k of K are multiplied with, and what `gguf_value` adds or
    subtracts.
    `base` is the first byte of the strip."""
    header = base + (k // SPAN) * span_bytes
    sub = k % SPAN
    slope = _half(halves, header + 2 * n, inside) if KIND <= SCALE_AND_MIN else 0.0
    offset = slope
    if KIND == SCALE_AND_MIN:
        offset = _half(halves, header + 32 + 2 * n, inside)
    elif KIND == Q6_K:
        scale = _byte(bytes_, header + (sub // 16) * 16 + n, inside)
        scale = tl.where(scale > 127, scale - 256, scale).to(tl.float32)
        slope = _half(halves, header + 256 + 2 * n, inside) * scale
        offset = slope
    elif KIND == Q2_K:
        both = _byte(bytes_, header + (sub // 16) * 16 + n, inside)
        slope = _half(halves, header + 256 + 2 * n, inside) * (both & 15).to(tl.float32)
        offset = _half(halves, header + 288 + 2 * n, inside) * (both >> 4).to(tl.float32)
    elif KIND == Q3_K:
        at = sub // 16
        nibble = (_byte(bytes_, header + (at % 8) * 16 + n, inside) >> (4 * (at // 8))) & 15
        pair = (_byte(bytes_, header + (8 + at % 4) * 16 + n, inside) >> (2 * (at // 4))) & 3
        slope = _half(halves, header + 192 + 2 * n, inside) * ((nibble | (pair << 4)) - 32).to(tl.float32)
        offset = slope
    elif KIND == Q4_K:
        at, scales = sub // 32, header + 64
        four = at % 4
        d = _byte(bytes_, scales + four * 16 + n, inside)
        m = _byte(bytes_, scales + (4 + four) * 16 + n, inside)
        top = _byte(bytes_, scales + (8 + four) * 16 + n, inside)
        scale = tl.where(at < 4, d & 63, (top & 15) | ((d >> 2) & 48)).to(tl.float32)
        least = tl.where(at < 4, m & 63, (top >> 4) | ((m >> 2) & 48)).to(tl.float32)
        slope = _half(halves, header + 2 * n, inside) * scale
        offset = _half(halves, header + 32 + 2 * n, inside) * least
    return slope, offset


@triton.jit
def gguf_value(number, slope, offset, KIND: tl.constexpr):
    """float32, rounded after the product and after the sum: for kernels that are compiled without fused products."""
    value = number * slope
    if KIND == SCALE_AND_MIN:
        value = value + offset
    elif KIND == Q2_K or KIND == Q4_K:  # noqa: SIM109
        value = value - offset  # a negated sum would lose the sign of a zero
    return value


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
    ZERO: tl.constexpr,  # point of the quants
    LOW: tl.constexpr,  # bits of the first plane
    HIGH: tl.constexpr,  # and of the second, or 0
    SPAN: tl.constexpr,
):
    """float32: those of outputs n at numbers k of K."""
    tile = (base + codes_at) // 4 + (k // 32) * (16 * (LOW + HIGH))
    code = _plane(words, tile, n, k, inside, LOW)
    if HIGH > 0:
        code = code | (_plane(words, tile + 16 * LOW, n, k, inside, HIGH) << LOW)
    slope, offset = gguf_scales(bytes_, halves, base, n, k, inside, span_bytes, KIND, SPAN)
    return gguf_value(unsigned_number(code, ZERO), slope, offset, KIND)


def supports(form: StripFormat) -> bool:
    halves = form.scales != "floats" or [field.kind for field in form.fields] == ["f16"]
    return form.element == "uint" and form.scales in SCALE_KINDS and halves
