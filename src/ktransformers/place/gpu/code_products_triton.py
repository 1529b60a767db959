"""Products of 16 outputs of a packed expert with up to 16 rows of activations, read from packed bytes: no decoded
matrix is written.

Values are rounded to bf16 before the product, so they are those of the decoded matrix. A strip of 16 outputs lies in
tiles of 32 numbers of K (`nn/device_codes/layout.py`), in which two numbers of K of one output are neighbours. Codes of
one plane are read as 32-bit words, each of which holds codes of one output and every second number of K: a word is
loaded once and shifted, and dimensions are permuted in registers. bf16 is read in the same order. GGUF's K types and
codes in two planes take the values of their decoder (`nn/device_codes/dequantize_gguf_triton.py`).
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

PLAIN, DENSE, CODES, GGUF = (tl.constexpr(number) for number in range(4))  # what is read: packed bf16, a matrix, codes
# Numbers of K of one step and warps of a program, as measured. All warps of a program multiply the same 16 by 16
# outputs; whether fewer are faster has not been measured.
PLAIN_TILE = {"STEP": 256, "num_warps": 4}
CODES_TILE = {"STEP": 128, "num_warps": 4}
FEW_TILE = {"STEP": 256, "num_warps": 4}  # of codes, for at most FEW_ROUTES (token, slot) pairs
SLOW_TILE = {"STEP": 128, "num_warps": 4}  # of values that take many instructions or loads
FEW_ROUTES = 16
NO_CODES = dict.fromkeys(("CODE", "ZERO", "SCALE", "LOW", "HIGH", "SPAN", "ENTRIES", "SCALE_BYTES"), 0)


@triton.jit
def _plain_values(words, base, start, columns, STEP: tl.constexpr, EVEN: tl.constexpr):
    """bf16 [STEP, 16] of packed bf16; a tile of 32 numbers of K is followed by that of the other half of the block."""
    pair, lane = start // 2 + tl.arange(0, STEP // 2)[:, None], tl.arange(0, 32)[None, :]
    at = words + base // 2 + (pair // 16 * 1024 + pair % 16 * 32) + lane
    values = tl.load(at) if EVEN else tl.load(at, mask=2 * pair + lane * 0 < columns, other=0.0)
    values = tl.permute(tl.reshape(values, (STEP // 2, 16, 2)), (0, 2, 1))
    return tl.reshape(values, (STEP, 16))


@triton.jit
def _code_values(
    words, scales, factors, base, start, columns, codes_at, spans_at,
    CODE: tl.constexpr, ZERO: tl.constexpr, SCALE: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr,
    ENTRIES: tl.constexpr, SCALE_BYTES: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """bf16 [STEP, 16] of codes in one plane."""
    PER_WORD: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = STEP // (2 * PER_WORD)
    word_index, lane = start // (2 * PER_WORD) + tl.arange(0, WORDS)[:, None], tl.arange(0, 32)[None, :]
    # The first number of K of a word; scales of 16 numbers belong to codes of 4 bits, of which a word has 16 of K.
    k = word_index * (2 * PER_WORD) + lane * 0
    inside = k < columns
    at = words + (base + codes_at) // 4 + word_index * 32 + lane
    word = tl.load(at) if EVEN else tl.load(at, mask=inside, other=0)
    scale = scale_of(scales, factors, base, spans_at, lane // 2, k, inside, SCALE, SPAN, ENTRIES, SCALE_BYTES)
    shift = (tl.arange(0, PER_WORD) * BITS)[None, :, None]
    code = (word[:, None, :] >> shift) & ((1 << BITS) - 1)
    values = (number_of(code, CODE, ZERO) * scale[:, None, :]).to(tl.bfloat16)
    values = tl.permute(tl.reshape(values, (WORDS, PER_WORD, 16, 2)), (0, 1, 3, 2))
    return tl.reshape(values, (STEP, 16))


@triton.jit
def strip_values(
    words,  # the packed experts as bf16 or, of codes, as int32; a dense matrix
    scales,  # in the type of the scales; of GGUF's types bytes
    factors,  # as float32; of GGUF's types as float16
    base,  # first byte of the strip
    matrix,  # of a dense matrix: its first number,
    row,  # and the outputs [16]
    valid,
    start,  # first number of K
    columns,
    codes_at,  # within the strip
    spans_at,  # of GGUF's types bytes of a span
    SOURCE: tl.constexpr,
    CODE: tl.constexpr,  # of GGUF's types the kind of scales
    ZERO: tl.constexpr,
    SCALE: tl.constexpr,
    LOW: tl.constexpr,  # bits of the first plane
    HIGH: tl.constexpr,  # and of the second, or 0
    SPAN: tl.constexpr,
    ENTRIES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    STEP: tl.constexpr,  # numbers of K
    EVEN: tl.constexpr,  # K is a multiple of STEP
):
    """bf16 [STEP, 16]: the weights of 16 outputs."""
    if SOURCE == PLAIN:
        values = _plain_values(words, base, start, columns, STEP, EVEN)
    elif SOURCE == DENSE:
        k = start + tl.arange(0, STEP)
        at = words + matrix + row[None, :] * columns + k[:, None]
        values = tl.load(at, mask=valid[None, :] & (k < columns)[:, None], other=0.0)
    elif SOURCE == CODES:
        values = _code_values(
            words, scales, factors, base, start, columns, codes_at, spans_at,
            CODE, ZERO, SCALE, LOW, SPAN, ENTRIES, SCALE_BYTES, STEP, EVEN,
        )  # fmt: skip
    else:
        n, k = tl.arange(0, 16)[None, :], start + tl.arange(0, STEP)[:, None]
        inside = (k < columns) & (n < 16)
        values = gguf_values(
            words, scales, factors, base, n, k, inside, codes_at, spans_at, CODE, ZERO, LOW, HIGH, SPAN
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
    """Whether both halves have one format whose codes can be multiplied."""
    form = matrix.formats[0]
    if matrix.plain or form != matrix.formats[1]:
        return False
    kind = dequantize_triton.kind_of(form)
    if kind is None:
        return dequantize_gguf_triton.supports(form)
    whole_tiles = form.span % TILE_K == 0
    return whole_tiles and form.bits in ((4,) if kind[1] == NESTED else (2, 4, 8))


def dense_arguments(matrices: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int], dict[str, Any]]:
    """Of `strip_values` for dequantised matrices."""
    return (matrices, matrices, matrices), (0, 0), NO_CODES | {"SOURCE": DENSE} | SLOW_TILE


def arguments(
    packed: Tensor, matrix: PackedMatrix, routes: int
) -> tuple[tuple[Tensor, ...], tuple[int, int], dict[str, Any]]:
    """Of `strip_values`: words, scales and factors; codes_at and spans_at; constants. `routes`: (token, slot) pairs."""
    flat, form, strip = packed.view(-1), matrix.formats[0], matrix.strip(0)
    if matrix.plain:
        words = flat.view(torch.bfloat16)
        return (words, words, words), (0, 0), NO_CODES | {"SOURCE": PLAIN} | PLAIN_TILE
    kind = dequantize_triton.kind_of(form)
    planes = {"LOW": form.planes[0], "HIGH": form.planes[1] if len(form.planes) > 1 else 0}
    shared = {"ZERO": form.zero_point, "SPAN": form.span, **planes}
    if kind is None:
        constants = {"SOURCE": GGUF, "CODE": dequantize_gguf_triton.SCALE_KINDS[form.scales], "SCALE": 0}
        constants |= {"ENTRIES": 16, "SCALE_BYTES": 1} | SLOW_TILE
        # A fused multiply-add would round values of GGUF's types once less than their decoder does.
        constants["enable_fp_fusion"] = False
        views = flat.view(torch.int32), flat, flat.view(torch.float16)
        return views, (strip.codes_at, strip.span_bytes), shared | constants
    field = (form.fields or form.row)[0]
    scales = flat.view(dequantize_triton.SCALES[field.kind])
    constants = {"SOURCE": CODES, "CODE": kind[0], "SCALE": kind[1], "ENTRIES": 1 if field.shared else 16}
    constants |= {"SCALE_BYTES": scales.element_size()} | (FEW_TILE if routes <= FEW_ROUTES else CODES_TILE)
    views = flat.view(torch.int32), scales, flat.view(torch.float32)
    return views, (strip.codes_at, strip.row_bytes if form.span else 0), shared | constants
