"""Codes of e4m3 with scales of e8m0 in Triton kernels (`cache/cache_codes.py`), by integer operations, because GPUs
before compute capability 8.9 have no instructions for them.

A code is shifted to where float16 has exponent and mantissa: that is 2^-8 of the number, subnormals included, and exact
in bf16. Encoding rounds to nearest, ties to even, as torch does.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """Of float32; they are ordered as the numbers are, and NaN is above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_code(largest):
    """The e8m0 byte, as int32, for a row whose largest magnitude has these bits. 448 is 1.75 * 2^8."""
    exponent = largest >> 23
    above = tl.where((largest & 0x7FFFFF) > 0x600000, 1, 0)
    return tl.where(exponent == 255, 255, tl.maximum(exponent - 8 + above, 1))


@triton.jit
def scale_number(scale):
    """float32 of an e8m0 byte; infinite where the row has infinities or NaNs."""
    return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode_numbers(x, scale):
    """float32 -> e4m3 bits, uint8. `scale`: int32, of `scale_code`."""
    scaled = x * ((254 - tl.minimum(scale, 253)) << 23).to(tl.float32, bitcast=True)
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 e4m3 values are multiples of 2^-9, which is the last place of 2^14.
    tiny = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < (121 << 23), tiny, normal)
    return (tl.minimum(code, 0x7E) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_block(quantized, scale, dtype: tl.constexpr):
    """uint8 `[n, size]` and float32 `[n]` -> numbers, and the scale that is left for their products. bf16 and float32
    have exponents enough to leave all of it: a product more for each row of scores instead of each number."""
    if dtype == tl.float16:
        numbers, left = (decode_codes(quantized, tl.float32) * scale[:, None]).to(dtype), scale * 0.0 + 1.0
    else:
        numbers, left = decode_codes(quantized, dtype), scale
    return numbers, left


@triton.jit
def decode_codes(quantized, dtype: tl.constexpr):
    """uint8 -> numbers without their scale."""
    wide = quantized.to(tl.int16)
    half = (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True)
    return (half.to(tl.float32) * 256.0).to(dtype)
