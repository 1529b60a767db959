"""Attention in Triton over the blocks of the KV cache, of any mixture of new tokens and prompt chunks
(`paged_attention.py`).

*New tokens.* A program of `_attend_split` handles one sequence, one key head and one split of its keys: all query heads
of the group against a block of keys at a time. `_combine_splits` combines the splits. Their number is part of the grid
and depends on the model only; their length is computed from the position, read on the device. So the result of a
sequence does not depend on its batch, and one graph serves sequences of any length. The new key is not read back: the
program of the first split has it in registers, starts its sums with it and stores it, and the other splits read older
keys only, so that no program waits for another.

*Prompt chunks.* `_store_tile` writes the keys and values of a tile of rows into their blocks. Then a program of
`_attend_tile` handles some rows of a tile for all query heads of one key head, and walks the blocks of keys up to its
last row; only blocks that the last rows do not see whole are masked.

FP8: scales multiply scores and weights instead of the decoded blocks, which is the same, as they are powers of two; new
keys are used as they are stored.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktransformers.serve.attention import step as tables
from ktransformers.serve.attention.spec import AttentionSpec
from ktransformers.serve.attention.step import DeviceStep
from ktransformers.serve.cache import kv_cache
from ktransformers.serve.graphs.cache_codes_triton import (
    decode_block,
    decode_codes,
    encode_numbers,
    magnitude_bits,
    scale_code,
    scale_number,
)
from ktransformers.serve.graphs.shared_memory import shared_memory

PROGRAMS_PER_ROW = 128  # about as many as a GPU has multiprocessors
BLOCK_BYTES = 16384  # of keys that a program of new tokens loads at a time
MIN_TILE = 16  # rows and columns of tl.dot, at least
STORED_ROWS = tl.constexpr(16)  # of a program that stores keys
LOG2_E = tl.constexpr(1.4426950408889634)
POSITION, COUNT, FIRST_ROW, FIRST_BLOCK = (
    tl.constexpr(line) for line in (tables.POSITION, tables.COUNT, tables.FIRST_ROW, tables.FIRST_BLOCK)
)
TILE_ROWS, BLOCK_TOKENS = tl.constexpr(tables.TILE_ROWS), tl.constexpr(kv_cache.BLOCK_TOKENS)


@triton.jit
def _first_key(position, window, chunk):
    """That a query attends to; window and chunk 0: none."""
    start = tl.where(window > 0, tl.maximum(position + 1 - window, 0), 0)
    return tl.where(chunk > 0, position // tl.maximum(chunk, 1) * chunk, start)


@triton.jit
def _key_split(position, window, chunk, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The first key that counts, the first of the first split, and the number of keys of each split. Splits begin at
    multiples of BLOCK, so what is loaded at a time lies in one block of the cache."""
    start = _first_key(position, window, chunk)
    first = start // BLOCK * BLOCK
    length = tl.cdiv(position - first, SPLITS * BLOCK) * BLOCK
    return start, first, tl.maximum(length, BLOCK)


@triton.jit
def cache_row(table, columns, column, position):
    """Where a token lies, counted over all tokens of the cache."""
    position = tl.cast(position, tl.int64)
    block = tl.load(table + (FIRST_BLOCK + position // BLOCK_TOKENS) * columns + column)
    return block * BLOCK_TOKENS + position % BLOCK_TOKENS


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
    keys,  # [kv, tokens of the cache, D]
    values,
    key_scales,  # [kv, tokens of the cache], not read unless FP8
    value_scales,
    table,  # int64 [lines, S]
    sums,  # float32 [S, heads, SPLITS, DV]
    states,  # float32 [S, heads, SPLITS, 2]: maximum of the scores, sum of their exponentials
    columns,
    heads,
    cached,  # tokens of the cache
    scale,
    softcap,
    window,
    chunk,
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
    column, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(table + COUNT * columns + column)
    row = tl.load(table + FIRST_ROW * columns + column)
    position = tl.load(table + POSITION * columns + column)
    start, begin, length = _key_split(position, window, chunk, SPLITS, BLOCK)
    first = begin + split * length
    last = tl.minimum(first + length, position)
    if (count == 1) & ((split == 0) | (first < last)):
        g, d, dv = tl.arange(0, GROUPS), tl.arange(0, WIDE), tl.arange(0, WIDE_V)
        dtype = key.dtype.element_ty
        keys += head.to(tl.int64) * cached * D
        values += head.to(tl.int64) * cached * DV
        if FP8:
            key_scales += head.to(tl.int64) * cached
            value_scales += head.to(tl.int64) * cached
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
            at = cache_row(table, columns, column, position)
            if FP8:
                key_number = _store_code(keys + at * D, key_scales + at, key_number, d, D)
                value_number = _store_code(values + at * DV, value_scales + at, value_number, dv, DV)
            else:
                tl.store(keys + at * D + d, new_key, mask=d < D)
                tl.store(values + at * DV + dv, new_value, mask=dv < DV)
            score = tl.sum(q.to(tl.float32) * key_number[None, :], axis=1) * scale
            max_score = _softcap(score, softcap, CAPPED)
            exp_sum += 1.0
            weighted_sum += value_number[None, :]
        for block_start in range(first, last, BLOCK):
            n = block_start + tl.arange(0, BLOCK)
            at = cache_row(table, columns, column, block_start) + tl.arange(0, BLOCK)
            in_split = (n >= start) & (n < last)
            k = tl.load(keys + at[:, None] * D + d[None, :], mask=in_split[:, None] & (d < D)[None, :], other=0)
            v = tl.load(values + at[:, None] * DV + dv[None, :], mask=in_split[:, None] & (dv < DV)[None, :], other=0)
            if FP8:
                key_scale = scale_number(tl.load(key_scales + at, mask=in_split, other=127))
                value_scale = scale_number(tl.load(value_scales + at, mask=in_split, other=127))
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
        index = (column * heads + head * GROUP + g) * SPLITS + split
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
    columns,
    heads,
    window,
    chunk,
    DV: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE_V: tl.constexpr,
):
    column, head = tl.program_id(0), tl.program_id(1)
    count = tl.load(table + COUNT * columns + column)
    if count <= 1:  # rows of no sequence become zero
        row = tl.load(table + FIRST_ROW * columns + column)
        position = tl.load(table + POSITION * columns + column)
        _, begin, length = _key_split(position, window, chunk, SPLITS, BLOCK)
        split, dv = tl.arange(0, SPLITS), tl.arange(0, WIDE_V)
        in_use = (split == 0) | (begin + split * length < position)
        index = (column * heads + head) * SPLITS + split
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
        output = tl.where(count == 1, tl.sum(split_sums * weight[:, None], axis=0) / denominator, 0.0)
        tl.store(out + (row * heads + head) * DV + dv, output.to(out.dtype.element_ty), mask=(dv < DV) & (row >= 0))


@triton.jit
def _store_tile(
    new,  # [kv, R, D]
    held,  # [kv, tokens of the cache, D]
    scales,  # [kv, tokens of the cache], not written unless FP8
    table,
    tiles,  # int32 [2, N]
    columns,
    tile_count,
    cached,
    new_head,  # strides
    new_row,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    FP8: tl.constexpr,
):
    """One program stores STORED_ROWS rows of one head."""
    part, head = tl.program_id(0), tl.program_id(1)
    tile = part // (TILE_ROWS // STORED_ROWS)
    column = tl.load(tiles + tile)
    if column >= 0:
        at = tl.load(tiles + tile_count + tile) + part % (TILE_ROWS // STORED_ROWS) * STORED_ROWS
        at += tl.arange(0, STORED_ROWS)
        inside = at < tl.load(table + COUNT * columns + column)
        row = tl.load(table + FIRST_ROW * columns + column) + at
        position = tl.load(table + POSITION * columns + column) + at
        block = tl.load(table + (FIRST_BLOCK + position // BLOCK_TOKENS) * columns + column, mask=inside, other=0)
        target = head.to(tl.int64) * cached + block * BLOCK_TOKENS + position % BLOCK_TOKENS
        d = tl.arange(0, WIDE)
        mask = inside[:, None] & (d < D)[None, :]
        number = tl.load(new + head * new_head + row[:, None] * new_row + d[None, :], mask=mask, other=0.0)
        if FP8:
            number = number.to(tl.float32)
            scale = scale_code(tl.max(magnitude_bits(number), axis=1))
            tl.store(held + target[:, None] * D + d[None, :], encode_numbers(number, scale[:, None]), mask=mask)
            tl.store(scales + target, scale.to(tl.uint8), mask=inside)
        else:
            tl.store(held + target[:, None] * D + d[None, :], number, mask=mask)


@triton.jit
def _add_block(
    q, max_score, exp_sum, weighted_sum, keys, values, key_scales, value_scales, at, n, last, lowest, position, scale,
    softcap, d, dv,
    D: tl.constexpr, DV: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of rows of queries after one more block of keys, the tokens `at` of the cache."""
    dtype = q.dtype
    in_k, in_v = (d < D)[:, None], (dv < DV)[None, :]
    if MASKED:  # what was never written may be no numbers, and is behind every row
        in_k, in_v = in_k & (n < last)[None, :], in_v & (n < last)[:, None]
    k = tl.load(keys + at[None, :] * D + d[:, None], mask=in_k, other=0)
    v = tl.load(values + at[:, None] * DV + dv[None, :], mask=in_v, other=0)
    if FP8:
        key_scale = scale_number(tl.load(key_scales + at, mask=n < last, other=127))
        value_scale = scale_number(tl.load(value_scales + at, mask=n < last, other=127))
        k, key_scale = decode_block(tl.trans(k), key_scale, dtype)
        v, value_scale = decode_block(v, value_scale, dtype)
        k = tl.trans(k)
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    if FP8:
        scores *= key_scale[None, :]
    scores = _softcap(scores, softcap, CAPPED) * LOG2_E
    if MASKED:
        seen = (n[None, :] <= position[:, None]) & (n[None, :] >= lowest[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(max_score, tl.max(scores, axis=1))
    # A row that is masked may have seen no key yet.
    finite = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights, rescale = tl.exp2(scores - finite[:, None]), tl.exp2(max_score - finite)
    exp_sum = exp_sum * rescale + tl.sum(weights, axis=1)
    if FP8:
        weights *= value_scale[None, :]
    weighted_sum = tl.dot(weights.to(dtype), v, weighted_sum * rescale[:, None], input_precision=PRECISION)
    return new_max, exp_sum, weighted_sum


@triton.jit
def _attend_tile(
    query,  # [heads, R, D]
    keys,
    values,
    key_scales,
    value_scales,
    table,
    tiles,
    sinks,
    out,  # [R, heads, DV]
    columns,
    tile_count,
    heads,
    cached,
    scale,
    softcap,
    window,
    chunk,
    query_head,
    query_row,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    QUERIES: tl.constexpr,  # of a program
    PARTS: tl.constexpr,  # programs of a tile
    ROWS: tl.constexpr,  # QUERIES * GROUP, padded
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_V: tl.constexpr,
    CAPPED: tl.constexpr,
    LIMITED: tl.constexpr,  # there is a window or a chunk
    SINKS: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    part, head = tl.program_id(0), tl.program_id(1)
    tile = part // PARTS
    column = tl.load(tiles + tile)
    first = tl.load(tiles + tile_count + tile) + part % PARTS * QUERIES
    end = tl.minimum(tl.load(tiles + tile_count + tile) + TILE_ROWS, tl.load(table + COUNT * columns + column))
    if (column >= 0) & (first < end):
        m, d, dv = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, WIDE_V)
        at_query = first + m // GROUP
        inside = (m < QUERIES * GROUP) & (at_query < end)
        row = tl.load(table + FIRST_ROW * columns + column) + at_query
        begin = tl.load(table + POSITION * columns + column)
        position = begin + at_query
        lowest = _first_key(position, window, chunk)
        h = head * GROUP + m % GROUP
        q_at = h[:, None] * query_head + row[:, None] * query_row + d[None, :]
        q = tl.load(query + q_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        keys += head.to(tl.int64) * cached * D
        values += head.to(tl.int64) * cached * DV
        if FP8:
            key_scales += head.to(tl.int64) * cached
            value_scales += head.to(tl.int64) * cached
        max_score = tl.full((ROWS,), float("-inf"), tl.float32)
        exp_sum = tl.zeros((ROWS,), tl.float32)
        weighted_sum = tl.zeros((ROWS, WIDE_V), tl.float32)
        last = begin + tl.minimum(first + QUERIES, end)
        start = _first_key(begin + first, window, chunk) // BLOCK * BLOCK
        if LIMITED:
            whole = start
        else:  # blocks that every row sees whole
            whole = (begin + first + 1) // BLOCK * BLOCK
            for n_first in range(start, whole, BLOCK):
                n = n_first + tl.arange(0, BLOCK)
                at = cache_row(table, columns, column, n_first) + tl.arange(0, BLOCK)
                max_score, exp_sum, weighted_sum = _add_block(
                    q, max_score, exp_sum, weighted_sum, keys, values, key_scales, value_scales, at, n, last, lowest,
                    position, scale, softcap, d, dv, D, DV, CAPPED, False, FP8, PRECISION,
                )  # fmt: skip
        for n_first in range(whole, last, BLOCK):
            n = n_first + tl.arange(0, BLOCK)
            at = cache_row(table, columns, column, n_first) + tl.arange(0, BLOCK)
            max_score, exp_sum, weighted_sum = _add_block(
                q, max_score, exp_sum, weighted_sum, keys, values, key_scales, value_scales, at, n, last, lowest,
                position, scale, softcap, d, dv, D, DV, CAPPED, True, FP8, PRECISION,
            )  # fmt: skip
        if SINKS:
            sink = tl.load(sinks + h, mask=inside, other=0.0).to(tl.float32) * LOG2_E
            new_max = tl.maximum(max_score, sink)
            rescale = tl.exp2(max_score - new_max)
            exp_sum = exp_sum * rescale + tl.exp2(sink - new_max)
            weighted_sum *= rescale[:, None]
        output = weighted_sum / exp_sum[:, None]
        target = out + (row[:, None] * heads + h[:, None]) * DV + dv[None, :]
        tl.store(target, output.to(out.dtype.element_ty), mask=inside[:, None] & (dv < DV)[None, :])


class TileShape(NamedTuple):
    rows: int  # of queries, times the heads of their group
    block: int  # keys at a time
    warps: int
    stages: int


def tiling(wide: int, element: int, memory: int) -> TileShape:
    """For keys of `wide` numbers of `element` bytes on a GPU whose blocks may have `memory` bytes of shared memory."""
    rows, block, stages = 128, BLOCK_TOKENS.value, 3
    while (rows + 2 * stages * block) * wide * element > memory and rows > MIN_TILE:
        if stages > 2:
            stages -= 1
        elif block > MIN_TILE * 2:
            block //= 2
        else:
            rows //= 2
    return TileShape(rows, block, 8 if rows >= 128 else 4, stages)


def attend(
    step: DeviceStep, cache: Sequence[Tensor], spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """`paged_attention.attend` on a GPU."""
    query, key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key, value))
    if step.tiles is None:
        out = torch.empty(query.shape[1], query.shape[0], value.shape[2], dtype=query.dtype, device=query.device)
    else:  # rows of padding are in no tile
        out = torch.zeros(query.shape[1], query.shape[0], value.shape[2], dtype=query.dtype, device=query.device)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        if step.decodes:
            _attend_new(step.table, cache, spec, query, key, value, out)
        if step.tiles is not None:
            _attend_chunks(step.table, step.tiles, cache, spec, query, key, value, out)
    return out


def _numbers_of(spec: AttentionSpec, query: Tensor, value: Tensor, cache: Sequence[Tensor]) -> dict[str, Any]:
    """Constants of both kinds of attention."""
    (heads, _, size), (groups, _, size_v) = query.shape, value.shape
    wide, wide_v = (max(MIN_TILE, triton.next_power_of_2(width)) for width in (size, size_v))
    return {
        "GROUP": heads // groups,
        "D": size,
        "DV": size_v,
        "WIDE": wide,
        "WIDE_V": wide_v,
        "CAPPED": bool(spec.softcap),
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "FP8": len(cache) > 2,
    }


def _attend_new(
    table: Tensor, cache: Sequence[Tensor], spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, out: Tensor
) -> None:
    columns, heads, (groups, _, size_v) = table.shape[1], query.shape[0], value.shape
    numbers = _numbers_of(spec, query, value, cache)
    splits = max(2, min(32, triton.next_power_of_2(PROGRAMS_PER_ROW // groups)))
    block = max(MIN_TILE, min(BLOCK_TOKENS.value, BLOCK_BYTES // (numbers["WIDE"] * key.element_size())))
    sums = torch.empty(columns, heads, splits, size_v, dtype=torch.float32, device=query.device)
    states = torch.empty(columns, heads, splits, 2, dtype=torch.float32, device=query.device)
    limits = spec.window or 0, spec.chunk or 0
    attend_split: Any = _attend_split[(columns, groups, splits)]
    attend_split(
        query,
        key,
        value,
        *cache[:2],
        *(cache[2:] or cache[:2]),
        table,
        sums,
        states,
        columns,
        heads,
        cache[0].shape[1] * cache[0].shape[2],
        spec.scale,
        spec.softcap or 0.0,
        *limits,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        SPLITS=splits,
        BLOCK=block,
        GROUPS=max(MIN_TILE, triton.next_power_of_2(heads // groups)),
        **numbers,
    )
    combine_splits: Any = _combine_splits[(columns, heads)]
    sinks = out if spec.sinks is None else spec.sinks
    constants = {"DV": size_v, "SINKS": spec.sinks is not None, "SPLITS": splits, "BLOCK": block}
    combine_splits(sums, states, table, sinks, out, columns, heads, *limits, WIDE_V=numbers["WIDE_V"], **constants)


def _attend_chunks(
    table: Tensor,
    tiles: Tensor,
    cache: Sequence[Tensor],
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
) -> None:
    columns, count, cached = table.shape[1], tiles.shape[1], cache[0].shape[1] * cache[0].shape[2]
    numbers, groups = _numbers_of(spec, query, value, cache), value.shape[0]
    scales = cache[2:] or cache[:2]
    store_tile: Any = _store_tile[(count * (TILE_ROWS.value // STORED_ROWS.value), groups)]
    for new, held, scale, wide in zip((key, value), cache, scales, (numbers["WIDE"], numbers["WIDE_V"]), strict=False):
        options = {"D": new.shape[2], "WIDE": wide, "FP8": numbers["FP8"]}
        store_tile(new, held, scale, table, tiles, columns, count, cached, *new.stride()[:2], **options)
    wide = max(numbers["WIDE"], numbers["WIDE_V"])
    shape = tiling(wide, query.element_size(), shared_memory(query.device))
    rows = max(shape.rows, triton.next_power_of_2(numbers["GROUP"]))
    queries = rows // numbers["GROUP"]
    parts = triton.cdiv(TILE_ROWS.value, queries)
    attend_tile: Any = _attend_tile[(count * parts, groups)]
    attend_tile(
        query,
        *cache[:2],
        *scales,
        table,
        tiles,
        out if spec.sinks is None else spec.sinks,
        out,
        columns,
        count,
        query.shape[0],
        cached,
        spec.scale,
        spec.softcap or 0.0,
        spec.window or 0,
        spec.chunk or 0,
        *query.stride()[:2],
        QUERIES=min(queries, TILE_ROWS.value),
        PARTS=parts,
        ROWS=rows,
        BLOCK=shape.block,
        LIMITED=bool(spec.window or spec.chunk),
        SINKS=spec.sinks is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **numbers,
    )
