"""out = x W^T for up to 128 rows of bf16 x, with W `[N, K]` in packed words (`words.py`), and W in bf16 again.

The s-th quants of the words of a step are a matrix `[outputs, rows]` that tensor cores multiply with as many columns of
x, which are neighbours; a word is loaded once and shifted. W is the first operand of the product, which tensor cores
read from registers. Values are rounded to bf16 before the product, so they are those of the dequantized matrix. Triton
copies words, scales and x ahead of their use and keeps everything computed from them in the registers from which tensor
cores read, as long as it is computed from loads in the loop and constants alone: hence a scale of a whole row is loaded
in every step (`row_stride` is 0), and where a step is too large for x of many rows, a turn of the loop takes half of
the rows of its words and not half of the quants of every word.

Values are made two at a time where one rounding suffices (`code_pairs_triton.py`). Elsewhere quants of integers are
left where they are in their word: masked, they are the lowest bits of a float32 number with an exponent of zero, code *
2^(place - 149). One fused operation with a scale that is larger by 2^(84 - place) gives the value, smaller by 2^65,
with one rounding; the sum is multiplied with 2^65. Likewise the bits of floating-point quants become those of a float32
number that is too small by the difference of the biases.

A program has BLOCK_N outputs and one of `splits` ranges of K. The last program of an output's ranges adds their float32
sums in the order of K, so results do not depend on which program ends first; it resets the counter for the next call,
so a captured graph can be replayed. Sizes are a function of the shape (`configuration`).
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,no-redef,assignment"
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktransformers.quantized.gpu import words
from ktransformers.quantized.gpu.code_pairs_triton import (
    PAIR_EXPONENTS,
    e2m1_pairs,
    e2m1_scale_pairs,
    e4m3_pairs,
    int4_pairs,
    int4_scale_pairs,
)
from ktransformers.quantized.gpu.dequantize_gguf_triton import unsigned_number
from ktransformers.quantized.gpu.dequantize_triton import from_e2m1, from_e4m3, from_e8m0
from ktransformers.quantized.gpu.words import WordFormat, WordLayout

UINT, E4M3, E2M1 = (tl.constexpr(number) for number in range(3))
ROW, STRIP, F32, F16, BF16, E8M0, NESTED, MINS, Q4K, Q2K, BYTES, F16_ZERO, BF16_ZERO = (
    tl.constexpr(number) for number in range(13)
)
ROW_BLOCKS = 4
LARGE_MATRIX, MANY_ROWS_MATRIX = 1 << 26, 1 << 24  # weights; the latter for more than 64 rows
SHARED_BYTES = 104 << 10  # that copies in flight take at most for up to 64 rows, so that two programs fit
FIXED_BYTES = 4 << 10  # of shared memory, besides the copies in flight
SUM_EXPONENT = 65  # of two, with which sums of integers' products are multiplied
# Of scales, and of sums: together the difference between float32's bias and the code's.
FLOAT_EXPONENTS = {words.E4M3: (60, 60), words.E2M1: (63, 63)}


@triton.jit
def _half(word, UPPER: tl.constexpr):
    bits = word >> 16 if UPPER else word
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _slope(
    word, head, g: tl.constexpr, SCALES: tl.constexpr, EXACT: tl.constexpr, UP: tl.constexpr, DOWN: tl.constexpr
):
    """float32: UP times what numbers of the g-th group of a step are multiplied with, and DOWN times what is added to
    or subtracted from the product. A factor of a head is one of all of its groups."""
    offset = 0.0
    if SCALES <= F32:
        slope = _times(word.to(tl.float32, bitcast=True), UP)
    elif SCALES == F16:
        slope = _times(_half(word, g % 2), UP)
    elif SCALES == BF16:
        slope = _times((word & -65536 if g % 2 else word << 16).to(tl.float32, bitcast=True), UP)
    elif SCALES >= F16_ZERO:
        scale = _half(word, 0) if SCALES == F16_ZERO else (word << 16).to(tl.float32, bitcast=True)
        slope = _times(scale, UP)
        offset = unsigned_number(word >> 16, 0) * _times(scale, DOWN)
    elif SCALES == MINS:
        slope = _times(_half(word, 0), UP)
        offset = _times(_half(word, 1), DOWN)
    elif SCALES == Q4K:
        slope = unsigned_number((word >> (g % 2 * 16)) & 255, 0) * _times(_half(head, 0), UP)
        offset = unsigned_number((word >> (g % 2 * 16 + 8)) & 255, 0) * _times(_half(head, 1), DOWN)
    else:
        byte = (word >> (g % 4 * 8)) & 255
        if SCALES == Q2K:
            slope = unsigned_number(byte & 15, 0) * _times(_half(head, 0), UP)
            offset = unsigned_number(byte >> 4, 0) * _times(_half(head, 1), DOWN)
        elif SCALES == BYTES:
            slope = unsigned_number(byte, 128) * _times(head.to(tl.float32, bitcast=True), UP)
        elif SCALES == NESTED:
            slope = _times(from_e4m3(byte) * head.to(tl.float32, bitcast=True), UP)
        else:  # E8M0
            slope = _times(from_e8m0(byte) if EXACT else (byte << 23).to(tl.float32, bitcast=True), UP)
    return slope, offset


@triton.jit
def _times(value, FACTOR: tl.constexpr):
    return value if FACTOR == 1.0 else value * FACTOR


@triton.jit
def _words(pointer, inside, EVEN: tl.constexpr):
    return tl.load(pointer) if EVEN else tl.load(pointer, mask=inside, other=0)


@triton.jit
def _scale_at(
    scales, first, n, stride, row_stride, k: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Pointers to the words with the scale of number k of the STEP numbers of K from `first`."""
    if GROUP >= 1 << 30:
        at = first * row_stride
    elif GROUP > STEP:
        at = first // GROUP * stride
    else:
        at = (first // (GROUP * PER) + k // GROUP // PER) * stride
    return scales + at + (n // 16 if SCALES == STRIP else n)


@triton.jit
def _small_number(
    low, high, s: tl.constexpr, ELEMENT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, HIGH_AT: tl.constexpr
):
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
            SHIFT: tl.constexpr = ((HIGH_AT >> (5 * s)) & 31) - LOW - PLACE
            top = high if SHIFT == 0 else (high >> SHIFT if SHIFT > 0 else high << -SHIFT)
            bits = bits | (top & (((1 << HIGH) - 1) << (LOW + PLACE)))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _small_value(
    low, high, word, head, g: tl.constexpr, s: tl.constexpr, ELEMENT: tl.constexpr, ZERO: tl.constexpr,
    SCALES: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, HIGH_AT: tl.constexpr, FACTOR: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """float32, too small by the factor of sums."""
    number = _small_number(low, high, s, ELEMENT, LOW, HIGH, HIGH_AT)
    if ELEMENT == UINT:
        i: tl.constexpr = s % (32 // LOW)
        PLACE: tl.constexpr = i * LOW - (0 if i * LOW <= (8 if LOW == 8 else 16) else (16 if LOW == 8 else 12))
        slope, offset = _slope(word, head, g, SCALES, False, 2.0 ** (84 - PLACE), ADDS * 2.0**-65)
        value = tl.fma(number, slope, offset if ADDS != 0 else slope * (-ZERO * 2.0 ** (PLACE - 149)))
    else:
        slope, offset = _slope(word, head, g, SCALES, False, FACTOR, 1.0)
        value = number * slope
    return value


@triton.jit
def _exact_value(
    low, high, slope, offset, s: tl.constexpr, ELEMENT: tl.constexpr, ZERO: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, HIGH_AT: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """float32, with the sign of zeros, which a fused operation would lose."""
    code = (low >> (s % (32 // LOW) * LOW)) & ((1 << LOW) - 1)
    if HIGH > 0:
        code = code | (((high >> ((HIGH_AT >> (5 * s)) & 31)) & ((1 << HIGH) - 1)) << LOW)
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
    at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    mine = partials + block.to(tl.int64) * splits * (BLOCK_M * BLOCK_N)
    tl.store(mine + split * (BLOCK_M * BLOCK_N) + at, total)
    tl.debug_barrier()  # all threads of the program have stored before one counts
    if tl.atomic_add(counters + block, 1, sem="acq_rel") == splits - 1:
        tl.debug_barrier()
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for other in range(splits):
            total += tl.load(mine + other * (BLOCK_M * BLOCK_N) + at, cache_modifier=".cg")
        mask = (n < outputs)[:, None] & (m < rows)[None, :]
        tl.store(out + m.to(tl.int64)[None, :] * outputs + n[:, None], total.to(tl.bfloat16), mask=mask)
        tl.store(counters + block, 0)


@triton.jit(do_not_specialize=["rows", "steps", "split_steps", "splits", "row_stride"])
def _product(
    low_words,
    high_words,
    heads,
    scales,
    x,  # bf16 [rows, columns]
    out,  # bf16 [rows, outputs]
    partials,  # float32 [blocks of rows and outputs, splits, BLOCK_N, BLOCK_M]
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
    HIGH_AT: tl.constexpr,  # the bits at which the second plane's quants begin, 5 bits each
    ROWS: tl.constexpr,  # words of an output in a step
    GROUP: tl.constexpr,
    PER: tl.constexpr,  # scales in a word
    FACTOR: tl.constexpr,  # of scales
    SUM_FACTOR: tl.constexpr,  # of sums
    HEADS: tl.constexpr,
    ADDS: tl.constexpr,  # 1: offsets are added, -1: subtracted, 0: there are none
    PAIRS: tl.constexpr,  # two values at a time
    TURNS: tl.constexpr,  # of the loop for a step, each of which takes as many rows of words
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
    TAKEN: tl.constexpr = ROWS // TURNS
    q = tl.arange(0, TAKEN)
    inside, lane = (n < width)[:, None], n[:, None]
    stride, scale_stride = width.to(tl.int64), scale_width.to(tl.int64)
    low_at, high_at = low_words + q[None, :] * width + lane, high_words + q[None, :] * width + lane
    x_at = x + m[None, :] * columns + q[:, None]
    head = tl.zeros((BLOCK_N, 1), tl.int32)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = tl.program_id(1) * split_steps
    last = tl.minimum(first + split_steps, steps)
    for turn in tl.range(first * TURNS, last * TURNS, num_stages=STAGES):
        step = turn // TURNS
        k = step * STEP
        skipped = turn % TURNS * TAKEN  # rows of words of a step that another turn takes
        high = 0
        if HIGH > 0:
            high = _words(high_at + (step * ROWS + skipped) * stride, inside, EVEN_N)
        for s in tl.static_range(PARTS):
            if s % (32 // LOW) == 0:
                low_row = step * (PARTS * LOW // 32) + s // (32 // LOW)
                low = _words(low_at + (low_row * ROWS + skipped) * stride, inside, EVEN_N)
            if HEADS and s * ROWS % 256 == 0:
                head_at = step * row_stride if SCALES == NESTED else ((k + s * ROWS) // 256) * stride
                head = _words(heads + head_at + lane, inside, EVEN_N)
            if s * ROWS % GROUP == 0 and s * ROWS // GROUP % PER == 0:
                at = _scale_at(scales, k, lane, scale_stride, row_stride, s * ROWS, STEP, GROUP, SCALES, PER)
                word = _words(at, inside, EVEN_N)
            if PAIRS == 0:
                value = _small_value(
                    low, high, word, head, s * ROWS // GROUP, s, ELEMENT, ZERO, SCALES, LOW, HIGH, HIGH_AT, FACTOR, ADDS
                )
                weight = value.to(tl.bfloat16)
            elif ELEMENT == UINT:
                slope, offset = int4_scale_pairs(word, s * ROWS // GROUP, s)
                wide, wide_offset = tl.broadcast_to(slope, (BLOCK_N, TAKEN)), tl.broadcast_to(offset, (BLOCK_N, TAKEN))
                weight = int4_pairs(low, wide, wide_offset, s)
            elif ELEMENT == E4M3:
                slope, offset = _slope(word, head, s * ROWS // GROUP, SCALES, False, 1.0, 1.0)
                weight = e4m3_pairs(low, tl.broadcast_to(slope, (BLOCK_N, TAKEN)), s)
            else:
                power = e2m1_scale_pairs(word, s * ROWS // GROUP)
                weight = e2m1_pairs(low, tl.broadcast_to(power, (BLOCK_N, TAKEN)), s)
            mask = (m < rows)[None, :]
            if not EVEN_K:
                mask = mask & (k + s * ROWS + skipped + q < columns)[:, None]
            inputs = tl.load(x_at + k + s * ROWS + skipped, mask=mask, other=0.0)
            total = tl.dot(weight, inputs, total)
    total = total * SUM_FACTOR
    if SPLIT:
        _store_or_add(total, out, partials, counters, m, n, rows, outputs, splits, BLOCK_M, BLOCK_N)
    else:
        mask = (n < outputs)[:, None] & (m < rows)[None, :]
        tl.store(out + m.to(tl.int64)[None, :] * outputs + n[:, None], total.to(tl.bfloat16), mask=mask)


@triton.jit
def _exact_part(
    low, high, head, scale_row, stride, k, inside, s: tl.constexpr, more: tl.constexpr, ELEMENT: tl.constexpr,
    ZERO: tl.constexpr, SCALES: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, HIGH_AT: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, PER: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """bf16 [outputs, words]: part s + more of a step, `more` parts behind number k of K."""
    at = 0 if GROUP >= 1 << 30 else (k + more * ROWS) // (GROUP * PER) * stride
    word = tl.load(scale_row + at, mask=inside, other=0)
    slope, offset = _slope(word, head, (s + more) * ROWS // GROUP, SCALES, True, 1.0, 1.0)
    return _exact_value(low, high, slope, offset, s + more, ELEMENT, ZERO, LOW, HIGH, HIGH_AT, ADDS).to(tl.bfloat16)


@triton.jit(do_not_specialize=["count", "group_rows", "group_step"])
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
    ELEMENT: tl.constexpr,
    ZERO: tl.constexpr,
    SCALES: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HIGH_AT: tl.constexpr,  # the bits at which the second plane's quants begin, 5 bits each
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
    inside, lane = ((row < count) & (n < width))[:, None], n[:, None]
    stride, scale_stride = width.to(tl.int64), scale_width.to(tl.int64)
    scale_row = scales + (lane // 16 if SCALES == STRIP else lane)
    head = tl.zeros((BLOCK_N, 1), tl.int32)
    high = 0
    if HIGH > 0:
        high = tl.load(high_words + (step * ROWS + q)[None, :] * stride + lane, mask=inside, other=0)
    for s in tl.static_range(0, PARTS, 4):
        k = step * STEP + s * ROWS
        if s % (32 // LOW) == 0:
            low_row = (step * (PARTS * LOW // 32) + s // (32 // LOW)) * ROWS + q
            low = tl.load(low_words + low_row[None, :] * stride + lane, mask=inside, other=0)
        if HEADS and s * ROWS % 256 == 0:
            head = tl.load(heads + (0 if SCALES == NESTED else k // 256 * stride) + lane, mask=inside, other=0)
        parts = ()
        for more in tl.static_range(4):
            part = _exact_part(
                low, high, head, scale_row, scale_stride, k, inside, s, more, ELEMENT, ZERO, SCALES, LOW, HIGH,
                HIGH_AT, ROWS, GROUP, PER, ADDS,
            )  # fmt: skip
            parts = parts + (part,)  # noqa: RUF005 - Triton has no unpacking inside of a tuple
        joined = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))  # [outputs, words, 2, 2]
        values = tl.reshape(tl.permute(joined, (0, 2, 3, 1)), (BLOCK_N, 4 * ROWS))
        column = k + tl.arange(0, 4 * ROWS)
        target = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(target, values, mask=(row < count)[:, None] & (column < columns)[None, :])


@dataclass(frozen=True)
class Configuration:
    block_m: int
    block_n: int
    splits: int  # ranges of K
    warps: int = 4
    stages: int = 3
    pairs: bool = False
    turns: int = 1


@dataclass(frozen=True)
class Card:
    """What tiles depend on."""

    processors: int
    capability: tuple[int, int]
    shared_bytes: int  # of one program


@functools.cache
def card_of(device: torch.device) -> Card:
    if device.type != "cuda":  # Triton's interpreter
        return Card(132, (0, 0), 99 << 10)
    properties: Any = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    return Card(properties.multi_processor_count, capability, properties.shared_memory_per_block_optin)


def configuration(rows: int, layout: WordLayout, card: Card) -> Configuration | None:
    """For x of `rows` rows, as measured on an H200 (docs/log.md); None: decoding W first is faster. On capability 9
    tensor cores get x from registers in programs of two warps, which is faster for small tiles, and from shared memory
    in larger ones. A step of many rows is divided so that several programs fit into a multiprocessor."""
    form, matrix = layout.format, layout.matrix
    size = matrix.rows * matrix.columns
    large = size >= LARGE_MATRIX
    halves = 2 if form.rows == 32 else 1
    if rows <= 16:
        wide = large and (rows <= 8 or form.low == 8 or form.high > 0)
        block_m, turns, stages = 8 if rows <= 8 and halves == 2 else 16, 1, 2 if wide and form.high else 3
        block_n, warps = (128, 4) if wide else (64, 4 if form.high else 2)
        programs = (3 if wide else 4 if large else 2) * card.processors
    elif rows <= 64:
        block_m, block_n, warps, turns = triton.next_power_of_2(rows), 128 if halves == 2 else 64, 4, halves
        stages, programs = 4, (2 if large else 1) * card.processors
    elif rows <= 128 and halves == 2 and size >= MANY_ROWS_MATRIX and card.capability[0] == 9:
        block_m, block_n, warps, stages, turns, programs = 128, 256, 8, 3, halves, card.processors
    else:
        return None
    if rows > 16 and form.low == 8 and block_m <= 64:
        turns, stages = 1, 3
    blocks = -(-matrix.rows // block_n)
    splits = max(1, min(programs // blocks, layout.steps // 2))
    stage = (4 * block_n * layout.words // (layout.width * layout.steps) + 2 * block_m * form.step) // turns
    copies = min(card.shared_bytes - FIXED_BYTES, card.shared_bytes if rows > 64 else SHARED_BYTES)
    stages = max(2, min(stages, copies // stage))
    return Configuration(block_m, block_n, splits, warps, stages, makes_pairs(form, card.capability), turns)


def constants_of(form: WordFormat) -> dict[str, Any]:
    """What the kernels are compiled for."""
    return {
        "ELEMENT": form.element,
        "ZERO": form.zero,
        "SCALES": form.scales,
        "LOW": form.low,
        "HIGH": form.high,
        "HIGH_AT": sum(place << (5 * part) for part, place in enumerate(form.high_places)),
        "ROWS": form.rows,
        "GROUP": form.group,
        "PER": words.PER_WORD.get(form.scales, 1),
        "HEADS": form.has_heads,
        "ADDS": {words.MINS: 1, words.Q4K: -1, words.Q2K: -1, words.F16_ZERO: -1, words.BF16_ZERO: -1}.get(
            form.scales, 0
        ),
    }


def _factors(form: WordFormat, pairs: bool = False) -> dict[str, float]:
    scale, total = FLOAT_EXPONENTS.get(form.element, (0, SUM_EXPONENT))
    if pairs:
        scale, total = 0, PAIR_EXPONENTS[form.element]
    return {"FACTOR": 2.0**scale, "SUM_FACTOR": 2.0**total, "PAIRS": int(pairs)}


def makes_pairs(form: WordFormat, capability: tuple[int, int]) -> bool:
    """Whether values of two quants are made at a time, by instructions that the interpreter does not know."""
    if capability < (8, 0):
        return False
    if form.element == words.UINT:
        return form.low == 4 and not form.high and form.scales == words.BF16 and form.zero == 8
    return capability >= (8, 9) if form.element == words.E4M3 else form.scales == words.E8M0


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
        TURNS=config.turns,
        EVEN_N=layout.width % config.block_n == 0,
        EVEN_K=columns % layout.format.step == 0,
        SPLIT=splits > 1,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        num_warps=config.warps,
        **constants_of(layout.format),
        **_factors(layout.format, config.pairs),
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
    count = out.shape[0]
    block_n = 64 if count >= 64 else 32
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
        GATHERED=numbers is not None,
        GROUPED=groups is not None,
        BLOCK_N=block_n,
        enable_fp_fusion=False,
        **constants_of(layout.format),
    )
