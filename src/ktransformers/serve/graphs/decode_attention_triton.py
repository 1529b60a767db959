"""Decode attention in Triton over the slots that a table on the device gives (`decode_attention.py`).

A program of the first kernel handles one row, one key head and one split of that slot's keys: all query heads of the
group against a block of keys at a time. The second kernel combines the splits. Their number is part of the grid and
depends on the model only; their length is computed from the position, read on the device. So the result of a sequence
does not depend on its batch, and one graph serves slots of any length. The new key is not read back from the slot: the
program of the first split has it in registers, starts its sums with it and stores it, and the other splits read older
keys only, so that no program waits for another. FP8 slots: scales multiply scores and weights instead of the
decoded blocks, which is the same, as they are powers of two; the new key is used as it is stored.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktransformers.serve.attention.attention import AttentionSpec
from ktransformers.serve.graphs import step_table
from ktransformers.serve.graphs.cache_codes_triton import (
    decode_block,
    decode_codes,
    encode_numbers,
    magnitude_bits,
    scale_code,
    scale_number,
)
from ktransformers.serve.graphs.step_table import CacheLines

PROGRAMS_PER_ROW = 128  # about as many as a GPU has multiprocessors
BLOCK_BYTES = 16384  # of keys that a program loads at a time
MIN_TILE = 16  # rows and columns of tl.dot, at least
POSITION, CAPACITY, ACTIVE = (
    tl.constexpr(line) for line in (step_table.POSITION, step_table.CAPACITY, step_table.ACTIVE)
)


@triton.jit
def _key_split(position, window, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The first key within the window, and the number of keys of each split."""
    start = tl.where(window > 0, tl.maximum(position + 1 - window, 0), 0)
    length = tl.cdiv(position - start, SPLITS * BLOCK) * BLOCK
    return start, tl.maximum(length, BLOCK)


@triton.jit
def _softcap(scores, softcap, CAPPED: tl.constexpr):
    if CAPPED:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores


@triton.jit
def _store_code(quantized, scale, number, column, SIZE: tl.constexpr):
    """Stores a row of SIZE values at `quantized` and its scale; returns the row as it is stored."""
    code_scale = scale_code(tl.max(magnitude_bits(number)))
    code = encode_numbers(number, code_scale)
    tl.store(quantized + column, code, mask=column < SIZE)
    tl.store(scale, code_scale.to(tl.uint8))
    return decode_codes(code, tl.float32) * scale_number(code_scale)


@triton.jit
def _attend_split(
    query,  # [heads, R, D]
    key,  # [kv, R, D]
    value,  # [kv, R, DV]
    table,  # int64 [lines, R]
    sums,  # float32 [R, heads, SPLITS, DV]
    states,  # float32 [R, heads, SPLITS, 2]: maximum of the scores, sum of their exponentials
    keys_line,
    values_line,
    key_scales_line,  # not read unless FP8
    value_scales_line,
    rows,
    heads,
    scale,
    softcap,
    window,  # 0: none
    query_head,  # strides
    query_row,
    key_head,
    key_row,
    value_head,
    value_row,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,  # padded
    WIDE: tl.constexpr,
    WIDE_V: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
):
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    active = tl.load(table + ACTIVE * rows + row)
    position = tl.load(table + POSITION * rows + row)
    capacity = tl.load(table + CAPACITY * rows + row)
    start, length = _key_split(position, window, SPLITS, BLOCK)
    first = start + split * length
    last = tl.minimum(first + length, position)
    if (active != 0) & ((split == 0) | (first < last)):
        g, d, dv = tl.arange(0, GROUPS), tl.arange(0, WIDE), tl.arange(0, WIDE_V)
        dtype = key.dtype.element_ty
        stored: tl.constexpr = tl.uint8 if FP8 else dtype
        keys = tl.load(table + keys_line * rows + row).to(tl.pointer_type(stored))
        values = tl.load(table + values_line * rows + row).to(tl.pointer_type(stored))
        keys = tl.multiple_of(keys, 16) + head * capacity * D
        values = tl.multiple_of(values, 16) + head * capacity * DV
        if FP8:
            key_scales = tl.load(table + key_scales_line * rows + row).to(tl.pointer_type(tl.uint8)) + head * capacity
            value_scales = tl.load(table + value_scales_line * rows + row).to(tl.pointer_type(tl.uint8))
            value_scales += head * capacity
        inside = (g < GROUP)[:, None]
        q_at = (head * GROUP + g)[:, None] * query_head + row * query_row + d[None, :]
        q = tl.load(query + q_at, mask=inside & (d < D)[None, :], other=0.0)
        max_score = tl.full((GROUPS,), float("-inf"), tl.float32)
        exp_sum = tl.zeros((GROUPS,), tl.float32)
        weighted_sum = tl.zeros((GROUPS, WIDE_V), tl.float32)
        if split == 0:
            new_key = tl.load(key + head * key_head + row * key_row + d, mask=d < D, other=0.0)
            new_value = tl.load(value + head * value_head + row * value_row + dv, mask=dv < DV, other=0.0)
            key_number, value_number = new_key.to(tl.float32), new_value.to(tl.float32)
            if FP8:
                key_number = _store_code(keys + position * D, key_scales + position, key_number, d, D)
                value_number = _store_code(values + position * DV, value_scales + position, value_number, dv, DV)
            else:
                tl.store(keys + position * D + d, new_key, mask=d < D)
                tl.store(values + position * DV + dv, new_value, mask=dv < DV)
            score = tl.sum(q.to(tl.float32) * key_number[None, :], axis=1) * scale
            max_score = _softcap(score, softcap, CAPPED)
            exp_sum += 1.0
            weighted_sum += value_number[None, :]
        for block_start in range(first, last, BLOCK):
            n = block_start + tl.arange(0, BLOCK)
            in_split = n < last
            k = tl.load(keys + n[:, None] * D + d[None, :], mask=in_split[:, None] & (d < D)[None, :], other=0)
            v = tl.load(values + n[:, None] * DV + dv[None, :], mask=in_split[:, None] & (dv < DV)[None, :], other=0)
            if FP8:
                key_scale = scale_number(tl.load(key_scales + n, mask=in_split, other=127))
                value_scale = scale_number(tl.load(value_scales + n, mask=in_split, other=127))
                k, key_scale = decode_block(k, key_scale, dtype)
                v, value_scale = decode_block(v, value_scale, dtype)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            if FP8:
                scores *= key_scale[None, :]
            scores = _softcap(scores, softcap, CAPPED)
            scores = tl.where(in_split[None, :], scores, float("-inf"))
            new_max = tl.maximum(max_score, tl.max(scores, axis=1))
            weights, rescale = tl.exp(scores - new_max[:, None]), tl.exp(max_score - new_max)
            exp_sum = exp_sum * rescale + tl.sum(weights, axis=1)
            if FP8:
                weights *= value_scale[None, :]
            weighted_sum = weighted_sum * rescale[:, None] + tl.dot(weights.to(dtype), v, input_precision=PRECISION)
            max_score = new_max
        index = (row * heads + head * GROUP + g) * SPLITS + split
        tl.store(states + 2 * index, max_score, mask=g < GROUP)
        tl.store(states + 2 * index + 1, exp_sum, mask=g < GROUP)
        tl.store(sums + index.to(tl.int64)[:, None] * DV + dv[None, :], weighted_sum, mask=inside & (dv < DV)[None, :])


@triton.jit
def _combine_splits(
    sums,
    states,
    table,
    sinks,  # [heads]; not read unless SINKS
    out,  # [R, heads, DV]
    rows,
    heads,
    window,
    DV: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE_V: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    active = tl.load(table + ACTIVE * rows + row)
    position = tl.load(table + POSITION * rows + row)
    start, length = _key_split(position, window, SPLITS, BLOCK)
    split, dv = tl.arange(0, SPLITS), tl.arange(0, WIDE_V)
    in_use = (split == 0) | (start + split * length < position)
    index = (row * heads + head) * SPLITS + split
    max_score = tl.load(states + 2 * index, mask=in_use, other=float("-inf"))
    exp_sum = tl.load(states + 2 * index + 1, mask=in_use, other=0.0)
    global_max = tl.max(max_score, axis=0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        global_max = tl.maximum(global_max, sink)
    weight = tl.exp(max_score - global_max)
    denominator = tl.sum(weight * exp_sum, axis=0)
    if SINKS:
        denominator += tl.exp(sink - global_max)
    mask = in_use[:, None] & (dv < DV)[None, :]
    split_sums = tl.load(sums + index.to(tl.int64)[:, None] * DV + dv[None, :], mask=mask, other=0.0)
    output = tl.where(active != 0, tl.sum(split_sums * weight[:, None], axis=0) / denominator, 0.0)
    tl.store(out + (row * heads + head) * DV + dv, output.to(out.dtype.element_ty), mask=dv < DV)


def attend(table: Tensor, lines: CacheLines, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    (heads, rows, size), (groups, _, size_v) = query.shape, value.shape
    query, key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key, value))
    splits = max(2, min(32, triton.next_power_of_2(PROGRAMS_PER_ROW // groups)))
    wide, wide_v = (max(MIN_TILE, triton.next_power_of_2(width)) for width in (size, size_v))
    block = max(MIN_TILE, min(64, BLOCK_BYTES // (wide * key.element_size())))
    sums = torch.empty(rows, heads, splits, size_v, dtype=torch.float32, device=query.device)
    states = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=query.device)
    out = torch.empty(rows, heads, size_v, dtype=query.dtype, device=query.device)
    window = spec.window or 0
    constants = {"DV": size_v, "SPLITS": splits, "BLOCK": block, "WIDE_V": wide_v}
    attend_split: Any = _attend_split[(rows, groups, splits)]
    attend_split(
        query,
        key,
        value,
        table,
        sums,
        states,
        lines.keys,
        lines.values,
        lines.key_scales or 0,
        lines.value_scales or 0,
        rows,
        heads,
        spec.scale,
        spec.softcap or 0.0,
        window,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        GROUP=heads // groups,
        D=size,
        CAPPED=bool(spec.softcap),
        GROUPS=max(MIN_TILE, triton.next_power_of_2(heads // groups)),
        WIDE=wide,
        PRECISION="ieee" if key.dtype == torch.float32 else "tf32",
        FP8=lines.fp8,
        **constants,
    )
    combine_splits: Any = _combine_splits[(rows, heads)]
    sinks = out if spec.sinks is None else spec.sinks
    combine_splits(sums, states, table, sinks, out, rows, heads, window, SINKS=spec.sinks is not None, **constants)
    return out
