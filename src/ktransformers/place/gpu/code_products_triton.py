"""Products of 16 outputs of a packed expert with one row of activations, read from codes: no decoded matrix is written.

Values are rounded to bf16 before the product, so they are those of the decoded matrix. Codes of one plane are read as
32-bit words, each of which holds codes of one output and every second number of K: a word is loaded once and shifted.
GGUF's K types and codes in two planes take the values of their decoder (`dequantize_gguf_triton.py`).
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktransformers.nn.device_codes import dequantize_gguf_triton, dequantize_triton
from ktransformers.nn.device_codes.dequantize_gguf_triton import gguf_values
from ktransformers.nn.device_codes.dequantize_triton import NESTED, number_of, scale_of
from ktransformers.nn.device_codes.layout import TILE_K, PackedMatrix

TILES = 16  # of 32 numbers of K, of one step
COLUMNS = 128  # of K of one step, of GGUF's types


@triton.jit
def sum_pairs(total):
    """[Q, 32] -> [16]: lanes are an output and the parity of K."""
    return tl.sum(tl.reshape(tl.sum(total, axis=0), (16, 2)), axis=1)


@triton.jit
def _activations(x, k, inside):
    return tl.load(x + k, mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _words(
    words,
    scales,
    factors,
    base,
    x,
    columns,
    codes_at,
    spans_at,
    CODE: tl.constexpr,
    ZERO: tl.constexpr,
    SCALE: tl.constexpr,
    BITS: tl.constexpr,
    SPAN: tl.constexpr,
    ENTRIES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    TILES: tl.constexpr,
):
    lane = tl.arange(0, 32)[None, :]
    total = tl.zeros((TILES, 32), tl.float32)
    for start in range(0, tl.cdiv(columns, 32), TILES):
        tile = start + tl.arange(0, TILES)[:, None]
        inside = (tile * 32 < columns) & (lane < 32)
        at = (base + codes_at) // 4 + tile * (16 * BITS) + lane
        for w in tl.static_range(BITS // 2):
            word = tl.load(words + at + w * 32, mask=inside, other=0)
            # The first number of K of a word; scales of 16 numbers belong to codes of 4 bits, of which a word has 16.
            k = tile * 32 + w * (64 // BITS)
            scale = scale_of(scales, factors, base, spans_at, lane // 2, k, inside, SCALE, SPAN, ENTRIES, SCALE_BYTES)
            for s in tl.static_range(32 // BITS):
                code = (word >> (s * BITS)) & ((1 << BITS) - 1)
                value = (number_of(code, CODE, ZERO) * scale).to(tl.bfloat16).to(tl.float32)
                at_k = k + 2 * s + lane % 2
                total += value * _activations(x, at_k, inside & (at_k < columns))
    return sum_pairs(total)


@triton.jit
def _gguf(
    words,
    bytes_,
    halves,
    base,
    x,
    columns,
    codes_at,
    span_bytes,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    total = tl.zeros((16, WIDTH), tl.float32)
    n = tl.arange(0, 16)[:, None]
    for start in range(0, columns, WIDTH):
        k = start + tl.arange(0, WIDTH)[None, :]
        inside = (k < columns) & (n < 16)
        value = gguf_values(
            words, bytes_, halves, base, n, k, inside, codes_at, span_bytes, KIND, ZERO, LOW, HIGH, SPAN
        )
        total += value.to(tl.bfloat16).to(tl.float32) * _activations(x, k, inside)
    return tl.sum(total, axis=1)


@triton.jit
def code_products(
    words,  # the packed experts as int32
    scales,  # in the type of the scales; of GGUF's types bytes
    factors,  # as float32; of GGUF's types as float16
    base,  # first byte of the strip
    x,  # [columns]
    columns,
    codes_at,  # within the strip
    spans_at,  # of GGUF's types bytes of a span
    GGUF: tl.constexpr,
    CODE: tl.constexpr,  # of GGUF's types the kind of scales
    ZERO: tl.constexpr,
    SCALE: tl.constexpr,
    LOW: tl.constexpr,  # bits of the first plane
    HIGH: tl.constexpr,  # and of the second, or 0
    SPAN: tl.constexpr,
    ENTRIES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    STEP: tl.constexpr,
):
    """float32 [16]"""
    if GGUF:
        sums = _gguf(words, scales, factors, base, x, columns, codes_at, spans_at, CODE, ZERO, LOW, HIGH, SPAN, STEP)
    else:
        sums = _words(
            words, scales, factors, base, x, columns, codes_at, spans_at,
            CODE, ZERO, SCALE, LOW, SPAN, ENTRIES, SCALE_BYTES, STEP,
        )  # fmt: skip
    return sums


def supports(matrix: PackedMatrix) -> bool:
    """Whether both halves have one format whose codes can be multiplied."""
    form = matrix.formats[0]
    if matrix.plain or form != matrix.formats[1]:
        return False
    kind = dequantize_triton.kind_of(form)
    if kind is None:
        return dequantize_gguf_triton.supports(form)
    whole_tiles = form.span % TILE_K == 0
    return whole_tiles and form.bits in ((4,) if kind[1] == NESTED else (2, 4, 8))


def arguments(packed: Tensor, matrix: PackedMatrix) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int], Any]:
    """Of `code_products`: words, scales and factors; codes_at and spans_at; constants."""
    flat, form, strip = packed.view(-1), matrix.formats[0], matrix.strip(0)
    kind = dequantize_triton.kind_of(form)
    planes = {"LOW": form.planes[0], "HIGH": form.planes[1] if len(form.planes) > 1 else 0}
    shared = {"ZERO": form.zero_point, "SPAN": form.span, **planes}
    if kind is None:
        constants = {"GGUF": True, "CODE": dequantize_gguf_triton.SCALE_KINDS[form.scales], "SCALE": 0}
        constants |= {"ENTRIES": 16, "SCALE_BYTES": 1, "STEP": COLUMNS}
        views = flat.view(torch.int32), flat, flat.view(torch.float16)
        return views, (strip.codes_at, strip.span_bytes), shared | constants
    field = (form.fields or form.row)[0]
    scales = flat.view(dequantize_triton.SCALES[field.kind])
    constants = {"GGUF": False, "CODE": kind[0], "SCALE": kind[1], "ENTRIES": 1 if field.shared else 16}
    constants |= {"SCALE_BYTES": scales.element_size(), "STEP": TILES}
    views = flat.view(torch.int32), scales, flat.view(torch.float32)
    return views, (strip.codes_at, strip.row_bytes if form.span else 0), shared | constants
