"""out = x W^T for a few rows of bf16 x, with W `[N, K]` in words of codes (`words.py`), and W in bf16 again.

The s-th codes of the words of a step are a matrix `[rows, outputs]` that tensor cores multiply with as many columns of
x, which are neighbours; a word is loaded once and shifted. Values are rounded to bf16 before the product, so they are
those of the decoded matrix. Triton copies words, scales and x ahead of their use and keeps everything computed from
them in the registers from which tensor cores read, as long as it is computed from loads in the loop and constants
alone: hence a scale of a whole row is loaded in every step (`row_stride` is 0).

Codes of integers are left where they are in their word: masked, they are the lowest bits of a float32 number with an
exponent of zero, code * 2^(place - 149). One fused operation with a scale that is larger by 2^(84 - place) gives the
value, smaller by 2^65, with one rounding; the sum is multiplied with 2^65. Likewise the bits of floating-point codes
become those of a float32 number that is too small by the difference of the biases.

A program has BLOCK_N outputs and one of `splits` ranges of K. The last program of an output's ranges adds their float32
sums in the order of K, so results do not depend on which program ends first; it resets the counter for the next call,
so a captured graph can be replayed. Sizes are a function of the shape (`configuration`).
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,no-redef"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktransformers.nn.device_codes import words
from ktransformers.nn.device_codes.dequantize_gguf_triton import unsigned_number
from ktransformers.nn.device_codes.dequantize_triton import from_e2m1, from_e4m3, from_e8m0
from ktransformers.nn.device_codes.words import WordFormat, WordLayout

UINT, E4M3, E2M1 = (tl.constexpr(number) for number in range(3))
ROW, STRIP, F32, F16, BF16, E8M0, NESTED, MINS, Q4K, Q2K, BYTES = (tl.constexpr(number) for number in range(11))
ROW_BLOCKS = 4
LARGE_MATRIX = 1 << 26
MIN_STEPS = 4
SHARED_BYTES = 96 << 10
SUM_EXPONENT = 65  # of two, with which sums of integers' products are multiplied
# Of scales, and of sums: together the difference between float32's bias and the code's.
FLOAT_EXPONENTS = {words.E4M3: (60, 60), words.E2M1: (63, 63)}


@triton.jit
def _half(word, UPPER: tl.constexpr):
    bits = word >> 16 if UPPER else word
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _slope(word, head, g: tl.constexpr, SCALES: tl.constexpr, EXACT: tl.constexpr):
    """float32: what numbers of the g-th group of a step are multiplied with, and what is added to or subtracted from
    the product."""
    offset = 0.0
    if SCALES <= F32:
        slope = word.to(tl.float32, bitcast=True)
    elif SCALES == F16:
        slope = _half(word, g % 2)
    elif SCALES == BF16:
        slope = (word & -65536 if g % 2 else word << 16).to(tl.float32, bitcast=True)
    elif SCALES == MINS:
        slope = _half(word, 0)
        offset = _half(word, 1)
    elif SCALES == Q4K:
        slope = unsigned_number((word >> (g % 2 * 16)) & 255, 0) * _half(head, 0)
        offset = unsigned_number((word >> (g % 2 * 16 + 8)) & 255, 0) * _half(head, 1)
    else:
        byte = (word >> (g % 4 * 8)) & 255
        if SCALES == Q2K:
            slope = unsigned_number(byte & 15, 0) * _half(head, 0)
            offset = unsigned_number(byte >> 4, 0) * _half(head, 1)
        elif SCALES == BYTES:
            slope = unsigned_number(byte, 128) * head.to(tl.float32, bitcast=True)
        elif SCALES == NESTED:
            slope = from_e4m3(byte) * head.to(tl.float32, bitcast=True)
        else:  # E8M0
            slope = from_e8m0(byte) if EXACT else (byte << 23).to(tl.float32, bitcast=True)
    return slope, offset


@triton.jit
def _words(pointer, inside, EVEN: tl.constexpr):
    return tl.load(pointer) if EVEN else tl.load(pointer, mask=inside, other=0)


@triton.jit
def _scale_at(
    scales, step, n, stride, row_stride, k: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
    PER: tl.constexpr,
):  # fmt: skip
    """Pointers to the words with the scale of number k of a step."""
    if SCALES == ROW:
        at = step * row_stride
    elif GROUP > STEP:
        at = (step * STEP // GROUP) * stride
    else:
        at = (step * (STEP // GROUP // PER) + k // GROUP // PER) * stride
    return scales + at + (n // 16 if SCALES == STRIP else n)


@triton.jit
def _small_number(low, high, s: tl.constexpr, ELEMENT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """float32: the numbers of part s, too small by a power of two that depends on s."""
    i: tl.constexpr = s % (32 // LOW)
    if ELEMENT == E4M3:
        bits = ((low << (24 - 8 * i)) >> 4) & -0x78100000
    elif ELEMENT == E2M1:
        bits = ((low << (28 - 4 * i)) >> 6) & -0x7E400000
    else:
        MOVE: tl.constexpr = 0 if i * LOW <= (8 if LOW == 8 else 16) else (16 if LOW == 8 else 12)
        PLACE: tl.constexpr = i * LOW - MOVE
        bits = (low if MOVE == 0 else low >> MOVE) & (((1 << LOW) - 1) << PLACE)
        if HIGH > 0:
            SHIFT: tl.constexpr = HIGH * s - LOW - PLACE
            top = high if SHIFT == 0 else (high >> SHIFT if SHIFT > 0 else high << -SHIFT)
            bits = bits | (top & (((1 << HIGH) - 1) << (LOW + PLACE)))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _small_value(
    low, high, slope, offset, s: tl.constexpr, ELEMENT: tl.constexpr, ZERO: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    number = _small_number(low, high, s, ELEMENT, LOW, HIGH)
    if ELEMENT == UINT:
        i: tl.constexpr = s % (32 // LOW)
        PLACE: tl.constexpr = i * LOW - (0 if i * LOW <= (8 if LOW == 8 else 16) else (16 if LOW == 8 else 12))
        added = offset * (ADDS * 2.0**-65) if ADDS != 0 else slope * (-ZERO * 2.0**-65)
        value = tl.fma(number, slope * 2.0 ** (84 - PLACE), added)
    else:
        value = number * slope
    return value


@triton.jit
def _exact_value(
    low, high, slope, offset, s: tl.constexpr, ELEMENT: tl.constexpr, ZERO: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """float32, with the sign of zeros, which a fused operation would lose."""
    code = (low >> (s % (32 // LOW) * LOW)) & ((1 << LOW) - 1)
    if HIGH > 0:
        code = code | (((high >> (s * HIGH)) & ((1 << HIGH) - 1)) << LOW)
    if ELEMENT == E4M3:
        value = from_e4m3(code) * slope
    elif ELEMENT == E2M1:
        value = from_e2m1(code) * slope
    else:
        value = unsigned_number(code, ZERO) * slope
        if ADDS > 0:
            value = value + offset
        elif ADDS < 0:  # Triton negates a zero to a zero without a sign
            value = value - offset
    return value


@triton.jit
def _store_or_add(
    total, out, partials, counters, m, n, rows, outputs, splits, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Stores the sums of one range of K; the last of the ranges adds them and stores the result."""
    block, split = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mine = partials + block.to(tl.int64) * splits * (BLOCK_M * BLOCK_N)
    tl.store(mine + split * (BLOCK_M * BLOCK_N) + at, total)
    tl.debug_barrier()  # all threads of the program have stored before one counts
    if tl.atomic_add(counters + block, 1, sem="acq_rel") == splits - 1:
        tl.debug_barrier()
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for other in range(splits):
            total += tl.load(mine + other * (BLOCK_M * BLOCK_N) + at, cache_modifier=".cg")
        mask = (m < rows)[:, None] & (n < outputs)[None, :]
        tl.store(out + m.to(tl.int64)[:, None] * outputs + n[None, :], total.to(tl.bfloat16), mask=mask)
        tl.store(counters + block, 0)


@triton.jit(do_not_specialize=["rows", "steps", "split_steps", "splits", "row_stride"])
def _product(
    low_words,
    high_words,
    heads,
    scales,
    x,  # bf16 [rows, columns]
    out,  # bf16 [rows, outputs]
    partials,  # float32 [blocks of rows and outputs, splits, BLOCK_M, BLOCK_N]
    counters,  # int32 [blocks of rows and outputs], zeros
    rows,
    outputs,
    width,  # words in a row
    scale_width,
    columns,
    steps,
    split_steps,  # of one range of K
    splits,
    row_stride,
    ELEMENT: tl.constexpr,
    ZERO: tl.constexpr,
    SCALES: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROWS: tl.constexpr,  # words of an output in a step
    GROUP: tl.constexpr,
    PER: tl.constexpr,  # scales in a word
    FACTOR: tl.constexpr,  # of scales
    SUM_FACTOR: tl.constexpr,  # of sums
    HEADS: tl.constexpr,
    ADDS: tl.constexpr,  # 1: offsets are added, -1: subtracted, 0: there are none
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,  # several ranges of K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    PARTS: tl.constexpr = 32 // (HIGH if HIGH > 0 else LOW)
    STEP: tl.constexpr = ROWS * PARTS
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    q = tl.arange(0, ROWS)
    inside, lane = (n < width)[None, :], n[None, :]
    stride, scale_stride = width.to(tl.int64), scale_width.to(tl.int64)
    low_at, high_at = low_words + q[:, None] * width + lane, high_words + q[:, None] * width + lane
    x_at = x + m[:, None] * columns + q[None, :]
    head = tl.zeros((1, BLOCK_N), tl.int32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    first = tl.program_id(1) * split_steps
    for step in tl.range(first, tl.minimum(first + split_steps, steps), num_stages=STAGES):
        high = 0
        if HIGH > 0:
            high = _words(high_at + step * (ROWS * stride), inside, EVEN_N)
        for s in tl.static_range(PARTS):
            if s % (32 // LOW) == 0:
                low_row = step * (PARTS * LOW // 32) + s // (32 // LOW)
                low = _words(low_at + low_row * (ROWS * stride), inside, EVEN_N)
            if HEADS and s * ROWS % 256 == 0:
                head_at = step * row_stride if SCALES == NESTED else ((step * STEP + s * ROWS) // 256) * stride
                head = _words(heads + head_at + lane, inside, EVEN_N)
            if s * ROWS % GROUP == 0:
                if s * ROWS // GROUP % PER == 0:
                    at = _scale_at(scales, step, lane, scale_stride, row_stride, s * ROWS, STEP, GROUP, SCALES, PER)
                    word = _words(at, inside, EVEN_N)
                slope, offset = _slope(word, head, s * ROWS // GROUP, SCALES, False)
                if FACTOR != 1.0:
                    slope = slope * FACTOR
            weight = _small_value(low, high, slope, offset, s, ELEMENT, ZERO, LOW, HIGH, ADDS).to(tl.bfloat16)
            mask = (m < rows)[:, None]
            if not EVEN_K:
                mask = mask & (step * STEP + s * ROWS + q < columns)[None, :]
            inputs = tl.load(x_at + step * STEP + s * ROWS, mask=mask, other=0.0)
            total = tl.dot(inputs, weight, total)
    total = total * SUM_FACTOR
    if SPLIT:
        _store_or_add(total, out, partials, counters, m, n, rows, outputs, splits, BLOCK_M, BLOCK_N)
    else:
        mask = (m < rows)[:, None] & (n < outputs)[None, :]
        tl.store(out + m.to(tl.int64)[:, None] * outputs + n[None, :], total.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["count", "row_stride", "group_rows", "group_step"])
def _decode(
    low_words,
    high_words,
    heads,
    scales,
    numbers,  # int64 [count]: rows of W; unused if not GATHERED
    out,  # bf16 [count, columns]
    count,
    first,  # row r of the output is row first + r / group_rows * group_step + r % group_rows of W
    group_rows,
    group_step,
    width,
    scale_width,
    columns,
    row_stride,
    ELEMENT: tl.constexpr,
    ZERO: tl.constexpr,
    SCALES: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    HEADS: tl.constexpr,
    ADDS: tl.constexpr,
    GATHERED: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    PARTS: tl.constexpr = 32 // (HIGH if HIGH > 0 else LOW)
    STEP: tl.constexpr = ROWS * PARTS
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATHERED:
        n = tl.load(numbers + row, mask=row < count, other=0).to(tl.int32)
    elif GROUPED:
        n = first + row // group_rows * group_step + row % group_rows
    else:
        n = first + row
    q, step = tl.arange(0, ROWS), tl.program_id(1)
    inside, lane = (row < count)[None, :] & (n < width)[None, :], n[None, :]
    stride, scale_stride = width.to(tl.int64), scale_width.to(tl.int64)
    head = tl.zeros((1, BLOCK_N), tl.int32)
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
                at = _scale_at(scales, step, lane, scale_stride, row_stride, s * ROWS, STEP, GROUP, SCALES, PER)
                word = tl.load(at, mask=inside, other=0)
            slope, offset = _slope(word, head, s * ROWS // GROUP, SCALES, True)
        value = _exact_value(low, high, slope, offset, s, ELEMENT, ZERO, LOW, HIGH, ADDS).to(tl.bfloat16)
        k = step * STEP + s * ROWS + q
        target = out + row.to(tl.int64)[None, :] * columns + k[:, None]
        tl.store(target, value, mask=(k < columns)[:, None] & (row < count)[None, :])


@dataclass(frozen=True)
class Configuration:
    block_m: int
    block_n: int
    splits: int  # ranges of K
    warps: int = 4
    stages: int = 4


def configuration(rows: int, layout: WordLayout, processors: int) -> Configuration:
    """For x of `rows` rows on a GPU with so many multiprocessors, as measured on an H200 (docs/log.md): large matrices
    and those of few steps in wide tiles, others in narrow ones, with at least MIN_STEPS steps a program. Copies in
    flight take at most SHARED_BYTES of shared memory; cards of capability 8.6, 8.9 and 12.0 have 99 KiB."""
    form, matrix = layout.format, layout.matrix
    wide = matrix.rows * matrix.columns >= LARGE_MATRIX or layout.steps <= MIN_STEPS
    block_m, block_n = max(16, min(32 if form.low < 8 else 64, triton.next_power_of_2(rows))), 128 if wide else 64
    programs = -(-matrix.rows // block_n)
    splits = max(1, min((3 if wide else 2) * processors // programs, layout.steps // MIN_STEPS))
    stage = block_n * 4 * layout.words // (layout.width * layout.steps) + 2 * block_m * form.step
    stages = max(2, min(3, 1 + SHARED_BYTES // stage))
    return Configuration(block_m, block_n, splits, stages=stages)


def constants_of(form: WordFormat) -> dict[str, Any]:
    """What the kernels are compiled for."""
    return {
        "ELEMENT": form.element,
        "ZERO": form.zero,
        "SCALES": form.scales,
        "LOW": form.low,
        "HIGH": form.high,
        "ROWS": form.rows,
        "GROUP": form.group,
        "PER": words.PER_WORD.get(form.scales, 1),
        "HEADS": form.has_heads,
        "ADDS": {words.MINS: 1, words.Q4K: -1, words.Q2K: -1}.get(form.scales, 0),
    }


def _factors(form: WordFormat) -> dict[str, float]:
    scale, total = FLOAT_EXPONENTS.get(form.element, (0, SUM_EXPONENT))
    return {"FACTOR": 2.0**scale, "SUM_FACTOR": 2.0**total}


def workspace(layout: WordLayout, device: torch.device) -> Tensor:
    """int32: a counter for each 32 outputs of up to ROW_BLOCKS blocks of rows. Of one matrix alone."""
    return torch.zeros(ROW_BLOCKS * layout.matrix.blocks, dtype=torch.int32, device=device)


def product(x: Tensor, parts: tuple[Tensor, ...], layout: WordLayout, space: Tensor, config: Configuration) -> Tensor:
    """`x` bf16 `[rows, K]`, contiguous; `parts` of `WordLayout.parts_of`; `space` is the matrix's `workspace`. Returns
    bf16 `[rows, N]`."""
    rows, outputs, columns = x.shape[0], layout.matrix.rows, layout.matrix.columns
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x.device)
    split_steps = -(-layout.steps // config.splits)
    splits, blocks = -(-layout.steps // split_steps), -(-outputs // config.block_n)
    row_blocks = -(-rows // config.block_m)
    partials = out
    if splits > 1:
        size = row_blocks * blocks * splits * config.block_m * config.block_n
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    launch: Any = _product[(blocks, splits, row_blocks)]
    launch(
        *parts,
        x,
        out,
        partials,
        space,
        rows,
        outputs,
        layout.width,
        layout.scale_width,
        columns,
        layout.steps,
        split_steps,
        splits,
        0,
        EVEN_N=layout.width % config.block_n == 0,
        EVEN_K=columns % layout.format.step == 0,
        SPLIT=splits > 1,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        num_warps=config.warps,
        **constants_of(layout.format),
        **_factors(layout.format),
    )
    return out


def decode(
    parts: tuple[Tensor, ...],
    layout: WordLayout,
    out: Tensor,
    first: int = 0,
    groups: tuple[int, int] | None = None,
    numbers: Tensor | None = None,
) -> None:
    """Rows of W into bf16 `[count, K]`: those from `first`; of `groups` (rows, step) as many of every `step` rows; or
    those of `numbers`, int64 `[count]`."""
    count, block_n = out.shape[0], 32
    launch: Any = _decode[(-(-count // block_n), layout.steps)]
    launch(
        *parts,
        parts[0] if numbers is None else numbers,
        out,
        count,
        first,
        *(groups or (1, 1)),
        layout.width,
        layout.scale_width,
        layout.matrix.columns,
        0,
        GATHERED=numbers is not None,
        GROUPED=groups is not None,
        BLOCK_N=block_n,
        enable_fp_fusion=False,
        **constants_of(layout.format),
    )
