"""Triton kernels for resident experts on tensor cores, for GGUF's K types and for experts that were dequantised first:
16 or 32 outputs by up to 16 rows of an expert, values moved through shared memory (`code_products_triton.py`). A
program finds the rows itself: the first of the pairs with one expert computes for all of them.
`resident_decode_triton.py` launches them.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

import triton
import triton.language as tl

from ktransformers.place.gpu.code_products_triton import load_rows, multiply_add, strip_values
from ktransformers.place.gpu.resident_pairs_triton import activate, dense_rows, pairs_of_expert

ROWS = tl.constexpr(16)  # of one expert in a program: the smallest tile of a product


@triton.jit
def _add_lora_b(
    sums, pairs, present, expert, top_k, adapters, factors, inner, row, valid, outputs,
    N: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """`sums` [ROWS, N] plus B times the ranks of each row; nothing is added to rows without an adapter."""
    m = tl.arange(0, ROWS)
    for at in range(tl.sum(present.to(tl.int32), axis=0)):
        route = tl.sum(tl.where(m == at, pairs, 0), axis=0)
        adapter = tl.load(adapters + route // top_k).to(tl.int64)
        rank = tl.load(factors + 3 * adapter + 2, mask=adapter >= 0, other=0).to(tl.int32)
        if rank > 0:
            b = tl.load(factors + 3 * adapter + 1).to(tl.pointer_type(tl.bfloat16)) + expert * outputs * rank
            value = dense_rows(b, inner + route * RANKS, row, valid, rank, N, RANKS)
            sums += tl.where((m == at)[:, None], value[None, :], 0.0)
    return sums


@triton.jit
def first_tiles(
    hidden,  # [T, columns]
    ids,  # [T, k]
    slot_of,  # int32 [E]
    counts,  # int32 [E]: rows of each expert, added to; or unused
    words,  # as `strip_values` takes them; if DENSE one matrix per (token, slot)
    scales,
    scale_factors,
    bias,  # float32 [E, outputs], or unused
    adapters,  # int32 [T], or unused
    factors,  # as above, or unused
    inner,  # bf16 [T * k, RANKS], or unused
    out,  # bf16 [T * k, rows] if GATE, else float32 [T * k, outputs]
    routes,
    experts,
    top_k,
    rows,
    columns,
    expert_bytes,
    block_bytes,
    half_bytes,
    codes_at,
    span_bytes,
    SOURCE: tl.constexpr,
    CODE: tl.constexpr,
    ZERO: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SPAN: tl.constexpr,
    STEP: tl.constexpr,
    WIDEN: tl.constexpr,
    ROUTES: tl.constexpr,
    COUNT: tl.constexpr,
    PAIRED: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,  # the activation is applied
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    ADDED: tl.constexpr,
    RANKS: tl.constexpr,  # 0: no LoRA
):
    route, block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + route).to(tl.int64)
    known = (expert >= 0) & (expert < experts)
    if COUNT:
        tl.atomic_add(counts + expert, 1, mask=known & (block == 0), sem="relaxed")
    slot = tl.load(slot_of + expert, mask=known, other=-1).to(tl.int64)
    if slot >= 0:
        computes, pairs, present = pairs_of_expert(ids, route, expert, routes, ROUTES, ROWS)
        if computes:
            n = tl.arange(0, 16)
            if PAIRED:
                low, low_valid, outputs = block * 16 + n, block * 16 + n < rows, 2 * rows
                high, high_valid = low + rows, low_valid
            else:
                low, low_valid, outputs = block * 32 + n, block * 32 + n < rows, rows
                high, high_valid = low + 16, low + 16 < rows
            base = slot * expert_bytes + block.to(tl.int64) * block_bytes
            matrix = route.to(tl.int64) * outputs * columns
            x = hidden + (pairs // top_k).to(tl.int64) * columns
            low_sum, high_sum = tl.zeros((ROWS, 16), tl.float32), tl.zeros((ROWS, 16), tl.float32)
            for start in range(0, columns, STEP):
                tile = load_rows(x, present, start, columns, STEP)
                low_values = strip_values(
                    words, scales, scale_factors, base, matrix, low, low_valid, start, columns,
                    codes_at, span_bytes, SOURCE, CODE, ZERO, LOW, HIGH, SPAN, STEP,
                )  # fmt: skip
                high_values = strip_values(
                    words, scales, scale_factors, base + half_bytes, matrix, high, high_valid, start, columns,
                    codes_at, span_bytes, SOURCE, CODE, ZERO, LOW, HIGH, SPAN, STEP,
                )  # fmt: skip
                low_sum = multiply_add(tile, low_values, low_sum, WIDEN)
                high_sum = multiply_add(tile, high_values, high_sum, WIDEN)
            if BIAS:
                low_sum += tl.load(bias + expert * outputs + low, mask=low_valid, other=0.0)[None, :]
                high_sum += tl.load(bias + expert * outputs + high, mask=high_valid, other=0.0)[None, :]
            if RANKS:
                low_sum = _add_lora_b(
                    low_sum, pairs, present, expert, top_k, adapters, factors, inner, low, low_valid, outputs, 16, RANKS
                )
                high_sum = _add_lora_b(
                    high_sum, pairs, present, expert, top_k, adapters, factors, inner, high, high_valid, outputs,
                    16, RANKS,
                )  # fmt: skip
            if GATE:
                h = activate(low_sum, high_sum, LIMIT, ALPHA, ADDED)
                target = out + pairs[:, None] * rows + low[None, :]
                tl.store(target, h, mask=present[:, None] & low_valid[None, :])
            else:
                target = out + pairs[:, None] * outputs
                tl.store(target + low[None, :], low_sum, mask=present[:, None] & low_valid[None, :])
                tl.store(target + high[None, :], high_sum, mask=present[:, None] & high_valid[None, :])


@triton.jit
def down_tiles(
    h,  # bf16 [T * k, columns]
    ids,
    weights,  # [T, k]
    slot_of,
    words,
    scales,
    scale_factors,
    bias,
    adapters,
    factors,
    inner,
    out,  # float32 [T * k, rows]: weighted
    routes,
    experts,
    top_k,
    rows,
    columns,
    expert_bytes,
    block_bytes,
    half_bytes,
    codes_at,
    span_bytes,
    SOURCE: tl.constexpr,
    CODE: tl.constexpr,
    ZERO: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SPAN: tl.constexpr,
    STEP: tl.constexpr,
    WIDEN: tl.constexpr,
    ROUTES: tl.constexpr,
    BIAS: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,  # half blocks of a program
):
    route, group = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + route).to(tl.int64)
    slot = tl.load(slot_of + expert, mask=(expert >= 0) & (expert < experts), other=-1).to(tl.int64)
    if slot >= 0:
        computes, pairs, present = pairs_of_expert(ids, route, expert, routes, ROUTES, ROWS)
        if computes:
            matrix, x = route.to(tl.int64) * rows * columns, h + pairs.to(tl.int64) * columns
            weight = tl.load(weights + pairs, mask=present, other=0.0).to(tl.float32)
            for part in range(PARTS):
                half_block = group * PARTS + part
                row = half_block * 16 + tl.arange(0, 16)
                base = slot * expert_bytes + (half_block // 2).to(tl.int64) * block_bytes + half_block % 2 * half_bytes
                sums = tl.zeros((ROWS, 16), tl.float32)
                for start in range(0, columns, STEP):
                    values = strip_values(
                        words, scales, scale_factors, base, matrix, row, row < rows, start, columns,
                        codes_at, span_bytes, SOURCE, CODE, ZERO, LOW, HIGH, SPAN, STEP,
                    )  # fmt: skip
                    sums = multiply_add(load_rows(x, present, start, columns, STEP), values, sums, WIDEN)
                if BIAS:
                    sums += tl.load(bias + expert * rows + row, mask=row < rows, other=0.0)[None, :]
                if RANKS:
                    sums = _add_lora_b(
                        sums, pairs, present, expert, top_k, adapters, factors, inner, row, row < rows, rows, 16, RANKS
                    )
                target = out + pairs.to(tl.int64)[:, None] * rows + row[None, :]
                tl.store(target, sums * weight[:, None], mask=present[:, None] & (row < rows)[None, :])
