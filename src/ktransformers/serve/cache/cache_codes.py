"""Keys and values of the KV cache in 8 bits: e4m3, and a scale for each token and head.

The scale is a power of two (e8m0, one byte), the smallest with which the largest number of a head's key is at most 448,
the largest code. A power of two costs no precision, because e4m3 is a float, and makes dequantizing exact: a code has
four significant bits, so code times scale is a number of bf16. Every attention kernel, in torch, in the core and in
Triton, therefore computes with the same keys, and a key is the same in a slot, in a block of a lower tier and in the
step that wrote it. Without scales, numbers below 2^-6 would lose bits and those above 448 would be cut off. Rows with
infinities or NaNs stay no numbers."""

from __future__ import annotations

import torch
from torch import Tensor

CODE_DTYPE = torch.float8_e4m3fn
SCALE_OF = {"keys": "key_scales", "values": "value_scales"}  # part of an FP8 slot -> the part with its scales
NO_NUMBER = 255  # of e8m0
EXPONENT_BIAS, MANTISSA_BITS, SIGN_AND_NUMBER = 127, 23, 0x7FFFFFFF  # of float32
LARGEST_EXPONENT, LARGEST_MANTISSA = 8, 0x600000  # 448 is 1.75 * 2^8


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`[heads, n, d]` -> e4m3 of the same shape and scales, uint8 `[heads, n, 1]`."""
    numbers = rows.float()
    largest = numbers.abs().amax(-1, keepdim=True).view(torch.int32) & SIGN_AND_NUMBER
    exponent = largest >> MANTISSA_BITS
    above = (largest & ((1 << MANTISSA_BITS) - 1)) > LARGEST_MANTISSA
    scales = (exponent - LARGEST_EXPONENT + above.int()).clamp_(min=1)
    inverse = ((2 * EXPONENT_BIAS - scales) << MANTISSA_BITS).view(torch.float32)
    scales = scales.masked_fill_(exponent == NO_NUMBER, NO_NUMBER)
    return (numbers * inverse).to(CODE_DTYPE), scales.to(torch.uint8)


def decode(quantized: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `encode`, exact in bf16 and float32."""
    return quantized.to(dtype) * (scales.int() << MANTISSA_BITS).view(torch.float32).to(dtype)


def round_trip(rows: Tensor) -> Tensor:
    """What an FP8 slot holds of these rows."""
    return decode(*encode(rows), rows.dtype)
