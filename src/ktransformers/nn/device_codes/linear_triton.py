"""out = x W^T for a few rows of bf16 x, with W `[N, K]` in packed codes: no decoded matrix is written to memory.

A word of 32 bits holds codes of one output and of every second number of K (docs/formats.md, layout 2), so a word is
loaded once and shifted. The s-th codes of the words of a step are a matrix `[words, outputs]` that tensor cores
multiply with the s-th columns of x: K is summed in the order of the words instead of its own. Values are rounded to
bf16 before the product, so they are those of the decoded matrix.

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

from ktransformers.nn.device_codes import dequantize_gguf_triton, dequantize_triton
from ktransformers.nn.device_codes.dequantize_gguf_triton import gguf_scales, gguf_value, unsigned_number
from ktransformers.nn.device_codes.dequantize_triton import E2M1, E4M3, INT8, from_e4m3, from_e8m0
from ktransformers.nn.device_codes.layout import TILE_K, PackedMatrix

F32, F16, BF16, E8M0, NESTED = (tl.constexpr(number) for number in range(5))  # how scales are stored
SCALES = {"f32": F32, "f16": F16, "bf16": BF16}
# Numbers of floating-point codes, by their bits: the bias of float32 is larger, so they come out too small by 2^120 or
# 2^126. Half of that is made up for in the scales and half in the sum, where neither overflows.
FACTORS = {"e4m3": (2.0**60, 2.0**60), "e2m1": (2.0**63, 2.0**63)}


# Rows of 16 integers in front of the counters. Triton keeps what it derives from loads in the registers in which tensor
# cores take it; what it derives from positions, or from arguments of the kernel, it would move through shared memory.
# And a mask in a register takes one instruction with the exponent that is put beside it, a constant one two.
HALF_SHIFTS, BYTE_SHIFTS, NIBBLES, BYTES = (tl.constexpr(row) for row in (0, 1, 2, 5))
TABLE_SIZE = tl.constexpr(6 * 16)


def _table() -> list[int]:
    lanes = range(16)
    masks = [0xF << 8, 0xF << 12, 0xF << 16, 0xFF << 8]
    rows = [[lane % 2 * 16 for lane in lanes], [lane % 4 * 8 for lane in lanes], *([mask] * 16 for mask in masks)]
    return [value for row in rows for value in row]


def workspace(matrix: PackedMatrix, device: torch.device) -> Tensor:
    """int32: constants of the kernel, and a counter for each 16 outputs. Of one matrix alone."""
    return torch.tensor(_table() + [0] * (2 * matrix.blocks), dtype=torch.int32, device=device)


@triton.jit
def _table_row(table, row):
    return tl.load(table + row * 16 + tl.arange(0, 16)[None, None, None, :])


@triton.jit
def _scales(words, table, base, spans_at, n, k, inside, KIND: tl.constexpr, SPAN: tl.constexpr, ENTRIES: tl.constexpr):
    """float32, of outputs n and numbers k of K. Read as words of 32 bits, which can be copied to shared memory ahead of
    their use; smaller ones cannot. Every array of a strip begins at a multiple of 4 bytes."""
    span = k // SPAN if SPAN > 0 else k * 0
    entry = span * ENTRIES + (n if ENTRIES == 16 else n * 0)
    if KIND == F32:
        scale = tl.load(words + (base + spans_at) // 4 + entry, mask=inside, other=0).to(tl.float32, bitcast=True)
    elif KIND == E8M0:
        word = tl.load(words + (base + spans_at + entry) // 4, mask=inside, other=0)
        scale = from_e8m0((word >> _table_row(table, BYTE_SHIFTS)) & 255)
    elif KIND == NESTED:
        at = base + spans_at + span * 32 + ((k % SPAN) // 16) * 16 + n
        word = tl.load(words + at // 4, mask=inside, other=0)
        tensor_scale = tl.load(words + base // 4).to(tl.float32, bitcast=True)
        scale = from_e4m3((word >> _table_row(table, BYTE_SHIFTS)) & 255) * tensor_scale
    else:
        word = tl.load(words + (base + spans_at + 2 * entry) // 4, mask=inside, other=0)
        bits = word >> _table_row(table, HALF_SHIFTS)
        if KIND == BF16:
            scale = (bits << 16).to(tl.float32, bitcast=True)
        else:
            scale = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale


@triton.jit
def _integer(word, table, s: tl.constexpr, BITS: tl.constexpr, FLIP: tl.constexpr):
    """2^e + code for the s-th code of a word, FLIP an exclusive or with its bits; and 2^e. The code is left where its
    bits are part of the mantissa. Returns float32."""
    if BITS == 4:
        PLACE: tl.constexpr = 4 * s + 8 if s < 2 else (4 * s if s < 5 else 4 * s - 12)
        moved = word << 8 if s < 2 else (word if s < 5 else word >> 12)
        mask = _table_row(table, NIBBLES + PLACE // 4 - 2)
    elif BITS == 8:
        PLACE: tl.constexpr = 8
        moved = word << 8 if s == 0 else (word if s == 1 else word >> (8 * s - 8))
        mask = _table_row(table, BYTES)
    else:
        PLACE: tl.constexpr = 2 * s % 16
        moved = word if s < 8 else word >> 16
        mask = 3 << PLACE
    BITS_OF_E: tl.constexpr = ((150 - PLACE) << 23) | (FLIP << PLACE)
    E: tl.constexpr = 1 << (23 - PLACE)
    return ((moved & mask) ^ BITS_OF_E).to(tl.float32, bitcast=True), E


@triton.jit
def _values(
    word, scale, table, s: tl.constexpr, CODE: tl.constexpr, ZERO: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr
):
    """float32: the s-th numbers of words times their scale. A fused product of an integer and a scale of 16 bits is
    exact, because their bits fit into those of float32."""
    if CODE == E4M3:
        value = (((word << (24 - 8 * s)) >> 4) & -0x78100000).to(tl.float32, bitcast=True) * scale
    elif CODE == E2M1:
        value = (((word << (28 - 4 * s)) >> 6) & -0x7E400000).to(tl.float32, bitcast=True) * scale
    else:
        POINT: tl.constexpr = 128 if CODE == INT8 else ZERO
        number, e = _integer(word, table, s, BITS, 128 if CODE == INT8 else 0)
        if BITS == 4 and (KIND == F16 or KIND == BF16):  # noqa: SIM109
            value = tl.fma(number, scale, scale * (-e - POINT))
        else:
            value = (number - (e + POINT)) * scale
    return value


@triton.jit
def _store_or_add(
    total, out, partials, counters, m, n, rows, outputs, splits, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Stores the sums of one range of K; the last of the ranges adds them and stores the result."""
    block, split = tl.program_id(0), tl.program_id(1)
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


@triton.jit(do_not_specialize=["rows", "last_strip", "splits"])
def _product(
    words,  # the packed matrix as int32
    x,  # bf16 [rows, columns]
    out,  # bf16 [rows, outputs]
    partials,  # float32 [blocks of outputs, splits, BLOCK_M, BLOCK_N]
    table,  # int32: rows of constants, then counters [blocks of outputs], zeros
    rows,
    outputs,
    columns,
    last_strip,
    split_words,  # rows of words of one range of K, a multiple of STEP
    block_bytes,
    half_bytes,
    codes_at,  # within the strip
    spans_at,  # of GGUF's types bytes of a span
    splits,
    GGUF: tl.constexpr,
    CODE: tl.constexpr,  # of GGUF's types the kind of scales
    ZERO: tl.constexpr,
    SCALE: tl.constexpr,  # how scales are stored
    LOW: tl.constexpr,  # bits of the first plane
    HIGH: tl.constexpr,  # and of the second, or 0
    SPAN: tl.constexpr,
    ENTRIES: tl.constexpr,
    FACTOR: tl.constexpr,  # of scales
    SUM_FACTOR: tl.constexpr,  # of sums
    EVEN: tl.constexpr,  # K has whole steps alone
    SPLIT: tl.constexpr,  # several ranges of K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,  # rows of words; a row is the words of all lanes with the same numbers of K
    STAGES: tl.constexpr,
):
    PER_ROW: tl.constexpr = 64 // LOW  # numbers of K of a row of words
    STRIPS: tl.constexpr = BLOCK_N // 16
    strips = tl.minimum(tl.program_id(0) * STRIPS + tl.arange(0, STRIPS), last_strip).to(tl.int64)
    strip_at = (strips // 2) * block_bytes + (strips % 2) * half_bytes  # [STRIPS]
    first = tl.program_id(1) * split_words
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    q, lane = tl.arange(0, STEP), tl.arange(0, 32)
    p = tl.arange(0, 2 * STEP)
    word_at = words + (strip_at // 4)[None, :, None] + codes_at // 4 + lane[None, None, :]
    x_at = x + m.to(tl.int64)[:, None] * columns + (p // 2 * PER_ROW + p % 2)[None, :]
    base, output = tl.reshape(strip_at, (1, 1, STRIPS, 1)), tl.arange(0, 16)[None, None, None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    end = tl.minimum(first + split_words, tl.cdiv(columns, PER_ROW))
    for start in tl.range(first, end, STEP, num_stages=STAGES):
        row = start + q
        k = tl.reshape(row * PER_ROW, (STEP, 1, 1, 1))
        inside = k < columns
        # Of two planes, those of a tile follow each other.
        at = row * 32 if HIGH == 0 else (row // (LOW // 2)) * (16 * (LOW + HIGH)) + row % (LOW // 2) * 32
        if EVEN:
            low = tl.load(word_at + at[:, None, None])
        else:
            low = tl.load(word_at + at[:, None, None], mask=(row * PER_ROW < columns)[:, None, None], other=0)
        low = tl.permute(tl.reshape(low, (STEP, STRIPS, 16, 2)), (0, 3, 1, 2))  # [STEP, 2, STRIPS, 16]
        if HIGH > 0:
            high_at = (base + codes_at) // 4 + (k // 32) * (16 * (LOW + HIGH)) + 16 * LOW + output * HIGH
            high_bit = k % 32 // 2 * HIGH  # of the first code of the row
            parity = tl.arange(0, 2)[None, :, None, None]
            if HIGH == 1:  # a word has both parities of an output
                high = tl.load(words + high_at + parity * 0, mask=inside, other=0) >> (parity * 16)
            else:
                high = tl.load(words + high_at + parity, mask=inside, other=0)
        for s in tl.static_range(32 // LOW):
            if GGUF:
                if s % 8 == 0:  # no scale is of fewer than 16 numbers
                    slope, offset = gguf_scales(words, words, base, output, k + 2 * s, inside, spans_at, CODE, SPAN)
                if HIGH > 0:
                    code = (low >> (s * LOW)) & ((1 << LOW) - 1)
                    code = code | (((high >> (high_bit + s * HIGH)) & ((1 << HIGH) - 1)) << LOW)
                    number = unsigned_number(code, ZERO)
                else:
                    number, e = _integer(low, table, s, LOW, 0)
                    number = number - (e + ZERO)
                value = gguf_value(number, slope, offset, CODE)
            else:
                if s == 0:
                    scale = FACTOR * _scales(words, table, base, spans_at, output, k, inside, SCALE, SPAN, ENTRIES)
                value = _values(low, scale, table, s, CODE, ZERO, SCALE, LOW)
            weight = tl.reshape(value.to(tl.bfloat16), (2 * STEP, BLOCK_N))
            if EVEN:
                inputs = tl.load(x_at + start * PER_ROW + 2 * s, mask=(m < rows)[:, None], other=0.0)
            else:
                column = start * PER_ROW + p // 2 * PER_ROW + p % 2 + 2 * s
                mask = (m < rows)[:, None] & (column < columns)[None, :]
                inputs = tl.load(x_at + start * PER_ROW + 2 * s, mask=mask, other=0.0)
            total = tl.dot(inputs, weight, total)
    total = total * SUM_FACTOR
    if SPLIT:
        _store_or_add(total, out, partials, table + TABLE_SIZE, m, n, rows, outputs, splits, BLOCK_M, BLOCK_N)
    else:
        mask = (m < rows)[:, None] & (n < outputs)[None, :]
        tl.store(out + m.to(tl.int64)[:, None] * outputs + n[None, :], total.to(tl.bfloat16), mask=mask)


@dataclass(frozen=True)
class Configuration:
    block_m: int
    block_n: int
    step: int  # rows of words
    splits: int  # ranges of K
    warps: int = 4
    stages: int = 3


def configuration(rows: int, matrix: PackedMatrix, processors: int) -> Configuration:
    """For x of `rows` rows on a GPU with so many multiprocessors. For 64 rows a program has at most 88 KiB of shared
    memory; cards of capability 8.6, 8.9 and 12.0 have 99."""
    form = matrix.formats[0]
    block_m, block_n = max(16, triton.next_power_of_2(rows)), 64
    step = 8 if form.planes[0] == 2 else 16
    stages = 3 if dequantize_triton.kind_of(form) is not None else 2  # headers of GGUF's types are copied too
    per_step = step * (64 // form.planes[0])
    programs = -(-matrix.rows // block_n)
    splits = max(1, min(4 * processors // programs, matrix.columns // (4 * per_step), 16))
    return Configuration(block_m, block_n, step, splits, stages=stages)


def supports(matrix: PackedMatrix) -> bool:
    """Whether W has a format whose codes can be multiplied."""
    form = matrix.formats[0]
    if matrix.plain or matrix.paired or form != matrix.formats[1]:
        return False
    kind = dequantize_triton.kind_of(form)
    if kind is None:
        return dequantize_gguf_triton.supports(form)
    whole_tiles = form.span % TILE_K == 0
    return whole_tiles and form.bits in ((4,) if form.scales == "e4m3" else (4, 8))


def constants_of(matrix: PackedMatrix) -> dict[str, Any]:
    """What `_product` is compiled for."""
    form = matrix.formats[0]
    planes = {"LOW": form.planes[0], "HIGH": form.planes[1] if len(form.planes) > 1 else 0}
    shared = {"ZERO": form.zero_point, "SPAN": form.span, **planes}
    kind = dequantize_triton.kind_of(form)
    if kind is None:
        scales = dequantize_gguf_triton.SCALE_KINDS[form.scales]
        return shared | {"GGUF": True, "CODE": scales, "SCALE": 0, "ENTRIES": 16, "FACTOR": 1.0, "SUM_FACTOR": 1.0}
    field = (form.fields or form.row)[0]
    stored = {"e8m0": E8M0, "e4m3": NESTED}.get(form.scales) or SCALES[field.kind]
    factor, sum_factor = FACTORS.get(form.element, (1.0, 1.0))
    constants = {"GGUF": False, "CODE": kind[0], "SCALE": stored, "ENTRIES": 1 if field.shared else 16}
    return shared | constants | {"FACTOR": factor, "SUM_FACTOR": sum_factor}


def product(x: Tensor, packed: Tensor, matrix: PackedMatrix, space: Tensor, config: Configuration) -> Tensor:
    """`x` bf16 `[rows, K]`, contiguous; `packed` uint8 `[expert_bytes]`; `space` is the
    matrix's `workspace`. Returns bf16 `[rows, N]`."""
    constants, strip = constants_of(matrix), matrix.strip(0)
    spans_at = strip.span_bytes if constants["GGUF"] else strip.row_bytes if matrix.formats[0].span else 0
    per_row = 64 // constants["LOW"]
    out = torch.empty(x.shape[0], matrix.rows, dtype=torch.bfloat16, device=x.device)
    steps = -(-matrix.columns // (per_row * config.step))
    split_steps = -(-steps // config.splits)
    splits, blocks = -(-steps // split_steps), -(-matrix.rows // config.block_n)
    partials = out
    if splits > 1:
        size = blocks * splits * config.block_m * config.block_n
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    launch: Any = _product[(blocks, splits)]
    launch(
        packed.view(-1).view(torch.int32),
        x,
        out,
        partials,
        space,
        x.shape[0],
        matrix.rows,
        matrix.columns,
        2 * matrix.blocks - 1,
        split_steps * config.step,
        matrix.block_bytes,
        matrix.strip_at(1),
        strip.codes_at,
        spans_at,
        splits,
        EVEN=matrix.columns % (per_row * config.step) == 0,
        SPLIT=splits > 1,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STEP=config.step,
        STAGES=config.stages,
        num_warps=config.warps,
        enable_fp_fusion=not constants["GGUF"],
        **constants,
    )
    return out
