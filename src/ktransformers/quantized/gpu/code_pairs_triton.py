"""Two quants at a time into two bf16 values in one register, the form in which tensor cores read them, by PTX.

The quants are the s-th ones of two words that follow each other along K (`words.py`). A value is what decoding gives:
it is computed with one rounding, or exactly.

4-bit integers with bf16 scales: masked, the quants are the lowest bits of two bf16 numbers. Up to bit 7 these are
code * 2^(place - 133), because bf16 numbers whose exponent is 0 or 1 are as far apart as subnormal ones. One fused
operation, (code * 2^(place - 133)) * (scale * 2^(113 - place)) - 8 * scale * 2^-20, gives the value times 2^-20.

E2M1 with a power of two: sign, exponent and mantissa are moved to those of bf16, whose bias is larger by 126; half of
that is made up for by the scale and half by the sum.

E4M3: the instruction of capability 8.9 gives two float16 numbers, which are multiplied with the float32 scale.

Scales are the same for both quants of a pair, because neighbours in a register of tensor cores' operands are neighbours
along K; `GpuLinearWeight.check` compares products with those of dequantized weights on the device that computes them.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

import triton
import triton.language as tl

from ktransformers.quantized.gpu import words

# Of two, with which sums are multiplied.
PAIR_EXPONENTS = {words.UINT: 20, words.E4M3: 0, words.E2M1: 63}


@triton.jit
def int4_scale_pairs(word, g: tl.constexpr, s: tl.constexpr):
    """int32, the same bf16 number in both halves: what the bits of the s-th quants are multiplied with, and what is
    added. `word` has the scales of groups g and g + 1, g even."""
    SELECT: tl.constexpr = 0x3232 if g % 2 else 0x1010
    FACTOR: tl.constexpr = 0x76007600 if s % 2 else 0x78007800  # 2^109 or 2^113
    return tl.inline_asm_elementwise(
        f"{{.reg .b32 d, u, v, z; mov.b32 u, {FACTOR}; mov.b32 v, 0xB700B700; mov.b32 z, 0x80008000; "
        f"prmt.b32 d, $2, $2, {SELECT}; fma.rn.bf16x2 $0, d, u, z; fma.rn.bf16x2 $1, d, v, z;}}",
        "=r,=r,r",
        [word],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def int4_pairs(low, slope, offset, s: tl.constexpr):
    """bf16: the s-th quants of words as values."""
    SELECT: tl.constexpr = 0x7632 if s // 4 % 2 else 0x5410
    MASK: tl.constexpr = 0x00F000F0 if s % 2 else 0x000F000F
    SHIFT: tl.constexpr = s // 2 % 2 * 8
    return tl.inline_asm_elementwise(
        f"{{.reg .b32 t; prmt.b32 t, $1, $2, {SELECT}; shr.u32 t, t, {SHIFT}; and.b32 t, t, {MASK}; "
        f"fma.rn.bf16x2 $0, t, $3, $5;}}",
        "=r,r,r,r,r,r,r",
        [low, slope, offset],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def e4m3_pairs(low, slope, s: tl.constexpr):
    """bf16; `slope` float32. From capability 8.9."""
    SELECT: tl.constexpr = (4 + s) * 16 + s
    return tl.inline_asm_elementwise(
        f"{{.reg .b32 t, h; .reg .b16 c, a, b; .reg .f32 x, y; prmt.b32 t, $1, $2, {SELECT}; cvt.u16.u32 c, t; "
        f"cvt.rn.f16x2.e4m3x2 h, c; mov.b32 {{a, b}}, h; cvt.f32.f16 x, a; cvt.f32.f16 y, b; "
        f"mul.f32 x, x, $3; mul.f32 y, y, $4; cvt.rn.bf16x2.f32 $0, y, x;}}",
        "=r,r,r,r,r",
        [low, slope],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def e2m1_scale_pairs(word, g: tl.constexpr):
    """int32: the g-th power of two of a word of E8M0, times 2^63, as bf16 in both halves."""
    return ((((word >> (g % 4 * 8)) & 255) + 63) << 7) * 65537


@triton.jit
def e2m1_pairs(low, slope, s: tl.constexpr):
    """bf16; `slope` of `e2m1_scale_pairs`."""
    SELECT: tl.constexpr = 0x7632 if s // 4 % 2 else 0x5410
    SIGN: tl.constexpr = 12 - s % 4 * 4
    MOVE: tl.constexpr = f"shr.u32 e, t, {s % 4 * 4 - 6};" if s % 4 > 1 else f"shl.b32 e, t, {6 - s % 4 * 4};"
    return tl.inline_asm_elementwise(
        f"{{.reg .b32 t, e, z; mov.b32 z, 0x80008000; prmt.b32 t, $1, $2, {SELECT}; {MOVE} "
        f"and.b32 e, e, 0x01C001C0; shl.b32 t, t, {SIGN}; and.b32 t, t, 0x80008000; or.b32 t, t, e; "
        f"fma.rn.bf16x2 $0, t, $3, z;}}",
        "=r,r,r,r,r",
        [low, slope],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )
