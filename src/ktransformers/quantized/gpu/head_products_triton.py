"""Products of x `[heads, T, .]` with the rows of each head in one weight `[N, K]` in packed words (`words.py`).

Latent attention multiplies queries with the keys' part of `kv_b_proj` and sums of latents with its values' part; the
rows of a part are `count` of every `step` rows of the weight. A word is loaded once and shifted, and its values are
rounded to bf16 as `linear_triton.decode` rounds them: they are those of the decoded matrix bit for bit. Products are
summed in float32.

Along columns a program has some outputs of one head and passes through all of K. Along rows it has all rows of a head
and one step of K, so that nothing is summed over programs. Launches depend on shapes alone and nothing is allocated, so
calls can be captured.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,no-redef"
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ktransformers.quantized.gpu.linear_triton import NESTED, _exact_value, _scale_at, _slope, constants_of
from ktransformers.quantized.gpu.words import WordLayout

MIN_BLOCK = 16  # of tensor cores
MAX_COUNT = 256  # rows of a head that a program has in registers


class HeadConfiguration(NamedTuple):
    block_m: int  # rows of x
    block_n: int  # rows of the weight
    warps: int = 4
    stages: int = 3  # of copies ahead of their use


@triton.jit
def _product(
    low_words,
    high_words,
    heads,
    scales,
    x,  # bf16 [heads, T, K], along rows [heads, T, count]
    out,  # bf16 [heads, T, count], along rows [heads, T, K]
    rows,  # T
    count,  # rows of the weight for each head
    first,  # of head 0
    head_step,
    x_head,
    x_row,
    out_head,
    out_row,
    width,
    scale_width,
    columns,
    steps,
    row_stride,
    ELEMENT: tl.constexpr,
    ZERO: tl.constexpr,
    SCALES: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HIGH_AT: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    HEADS: tl.constexpr,
    ADDS: tl.constexpr,
    ALONG_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    PARTS: tl.constexpr = 32 // (HIGH if HIGH > 0 else LOW)
    STEP: tl.constexpr = ROWS * PARTS
    number = tl.program_id(1).to(tl.int64)  # of the head
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, q = tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    x += number * x_head
    out += number * out_head
    if ALONG_ROWS:
        begin = tl.program_id(0)
        end = begin + 1
        x_mask = (m < rows)[:, None] & (n < count)[None, :]
        inputs = tl.load(x + m.to(tl.int64)[:, None] * x_row + n[None, :], mask=x_mask, other=0.0)
    else:
        begin = 0
        end = steps
        n += tl.program_id(0) * BLOCK_N
    inside, lane = (n < count)[None, :], (first + number * head_step + n)[None, :]
    stride, scale_stride = width.to(tl.int64), scale_width.to(tl.int64)
    head = tl.zeros((1, BLOCK_N), tl.int32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        high = 0
        if HIGH > 0:
            high = tl.load(high_words + (step * ROWS + q)[:, None] * stride + lane, mask=inside, other=0)
        for s in tl.static_range(PARTS):
            if s % (32 // LOW) == 0:
                low_row = (step * (PARTS * LOW // 32) + s // (32 // LOW)) * ROWS + q
                low = tl.load(low_words + low_row[:, None] * stride + lane, mask=inside, other=0)
            if HEADS and s * ROWS % 256 == 0:
                head_at = step * row_stride if SCALES == NESTED else ((step * STEP + s * ROWS) // 256) * stride
                head = tl.load(heads + head_at + lane, mask=inside, other=0)
            if s * ROWS % GROUP == 0:
                if s * ROWS // GROUP % PER == 0:
                    at = _scale_at(
                        scales, step * STEP, lane, scale_stride, row_stride, s * ROWS, STEP, GROUP, SCALES, PER
                    )
                    word = tl.load(at, mask=inside, other=0)
                slope, offset = _slope(word, head, s * ROWS // GROUP, SCALES, True, 1.0, 1.0)
            value = _exact_value(low, high, slope, offset, s, ELEMENT, ZERO, LOW, HIGH, HIGH_AT, ADDS).to(tl.bfloat16)
            k = step * STEP + s * ROWS + q
            if ALONG_ROWS:
                product = tl.dot(inputs, tl.trans(value), tl.zeros((BLOCK_M, ROWS), tl.float32))
                target = out + m.to(tl.int64)[:, None] * out_row + k[None, :]
                tl.store(target, product.to(tl.bfloat16), mask=(m < rows)[:, None] & (k < columns)[None, :])
            else:
                mask = (m < rows)[:, None] & (k < columns)[None, :]
                latents = tl.load(x + m.to(tl.int64)[:, None] * x_row + k[None, :], mask=mask, other=0.0)
                total = tl.dot(latents, value, total)
    if not ALONG_ROWS:
        target = out + m.to(tl.int64)[:, None] * out_row + n[None, :]
        tl.store(target, total.to(tl.bfloat16), mask=(m < rows)[:, None] & inside)


def configuration(rows: int, count: int, along_rows: bool) -> HeadConfiguration:
    """For x of `rows` rows and `count` rows of the weight for each head, as measured on an H200 (docs/log.md). Along
    rows a program has one step, and more than 16 rows of x are other programs."""
    whole = max(MIN_BLOCK, triton.next_power_of_2(count))
    if along_rows:
        return HeadConfiguration(MIN_BLOCK, whole)
    return HeadConfiguration(max(MIN_BLOCK, min(64, triton.next_power_of_2(rows))), min(64, whole))


def multiply_heads(
    x: Tensor,
    parts: tuple[Tensor, ...],
    layout: WordLayout,
    span: tuple[int, int, int],
    out: Tensor,
    along_rows: bool,
    config: HeadConfiguration,
) -> None:
    """`x` bf16 `[heads, T, .]` into bf16 `out`, whose last dimensions are contiguous; `parts` of `WordLayout.parts_of`,
    `span` is first row of the weight, rows for each head, and rows from head to head."""
    first, count, step = span
    blocks = layout.steps if along_rows else -(-count // config.block_n)
    launch: Any = _product[(blocks, x.shape[0], -(-x.shape[1] // config.block_m))]
    launch(
        *parts,
        x,
        out,
        x.shape[1],
        count,
        first,
        step,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        layout.width,
        layout.scale_width,
        layout.matrix.columns,
        layout.steps,
        0,
        ALONG_ROWS=along_rows,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        num_warps=config.warps,
        enable_fp_fusion=False,
        **constants_of(layout.format),
    )
