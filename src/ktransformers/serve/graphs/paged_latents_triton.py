"""Attention of new tokens over latents in Triton, for blocks that a table on the device gives (`paged_attention.py`).

All query heads attend to the same latents, so a program of the first kernel handles one sequence, a tile of heads and
one split of its latents: a block of latents is read once, multiplied with the queries and then, without its rotary
part, with the weights. The second kernel combines the splits. As for other attention, splits depend on the position
alone, so that the result of a sequence does not depend on its batch, and only the programs of the first split use the
new latent.

FP8: a block is dequantized without its scales, which multiply scores and weights instead. They are powers
of two, so that is the same. The new latent is encoded, and attended to as it is stored.

A split's sums are `heads * rank` numbers in float32, as many bytes as some hundred latents. Splits are therefore short
where the context is, for latency, and grow with it up to MAX_LENGTH before their number grows further.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktransformers.serve.attention.spec import AttentionSpec
from ktransformers.serve.graphs.cache_codes_triton import (
    decode_block,
    decode_codes,
    encode_numbers,
    magnitude_bits,
    scale_code,
    scale_number,
)
from ktransformers.serve.graphs.paged_attention_triton import COUNT, FIRST_ROW, MIN_TILE, POSITION, cache_row
from ktransformers.serve.graphs.shared_memory import shared_memory

COMBINED_COLUMNS = 128  # of a program that combines splits
SPLITS = 64  # at most
SHORT_SPLITS = tl.constexpr(32)  # at most, as long as they are shorter than MAX_LENGTH
MIN_LENGTH, MAX_LENGTH = tl.constexpr(64), tl.constexpr(1024)  # latents of a split


class Tiling(NamedTuple):
    heads: int  # of a program
    block: int  # latents that it reads at a time
    warps: int
    stages: int


SMALL = Tiling(16, 32, 4, 2)  # 90 KB of shared memory for latents of 576 numbers in 16 bits: any GPU from 8.0 on
LARGE = Tiling(32, 64, 4, 2)  # 184 KB: on an H200 faster than 64 or 128 heads (docs/log.md)
LARGE_BYTES = 190 << 10


@triton.jit
def _split_length(position, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    length = tl.minimum(tl.maximum(tl.cdiv(position, SHORT_SPLITS), MIN_LENGTH), MAX_LENGTH)
    return tl.cdiv(tl.maximum(length, tl.cdiv(position, SPLITS)), BLOCK) * BLOCK


@triton.jit
def _attend_split(
    query,  # [heads, R, RANK + ROPE]
    key,  # [1, R, RANK + ROPE]
    latents,  # [tokens of the cache, RANK + ROPE]
    scales,  # [tokens of the cache], not read unless FP8
    table,  # int64 [lines, S]
    sums,  # float32 [S, heads, SPLITS, RANK]
    states,  # float32 [S, heads, SPLITS, 2]: maximum of the scores, sum of their exponentials
    columns,
    heads,
    scale,
    query_head,  # strides
    query_row,
    key_row,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    WIDE: tl.constexpr,  # RANK and ROPE, padded
    WIDE_ROPE: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
):
    column, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(table + COUNT * columns + column)
    row = tl.load(table + FIRST_ROW * columns + column)
    position = tl.load(table + POSITION * columns + column)
    length = _split_length(position, SPLITS, BLOCK)
    first = split * length
    last = tl.minimum(first + length, position)
    if (count == 1) & ((split == 0) | (first < last)):
        h, c, e = tile * HEADS + tl.arange(0, HEADS), tl.arange(0, WIDE), tl.arange(0, WIDE_ROPE)
        in_rank, in_rope = c < RANK, e < ROPE
        dtype = key.dtype.element_ty
        inside = (h < heads)[:, None]
        of_query = query + h[:, None] * query_head + row * query_row
        q = tl.load(of_query + c[None, :], mask=inside & in_rank[None, :], other=0.0)
        q_rope = tl.load(of_query + RANK + e[None, :], mask=inside & in_rope[None, :], other=0.0)
        max_score = tl.full((HEADS,), float("-inf"), tl.float32)
        exp_sum = tl.zeros((HEADS,), tl.float32)
        weighted_sum = tl.zeros((HEADS, WIDE), tl.float32)
        if split == 0:
            new = tl.load(key + row * key_row + c, mask=in_rank, other=0.0)
            new_rope = tl.load(key + row * key_row + RANK + e, mask=in_rope, other=0.0)
            number, number_rope = new.to(tl.float32), new_rope.to(tl.float32)
            new_row = cache_row(table, columns, column, position)
            at = latents + new_row * (RANK + ROPE)
            if FP8:
                largest = tl.maximum(tl.max(magnitude_bits(number)), tl.max(magnitude_bits(number_rope)))
                code_scale = scale_code(largest)
                code, code_rope = encode_numbers(number, code_scale), encode_numbers(number_rope, code_scale)
                number = decode_codes(code, tl.float32) * scale_number(code_scale)
                number_rope = decode_codes(code_rope, tl.float32) * scale_number(code_scale)
                if tile == 0:
                    tl.store(at + c, code, mask=in_rank)
                    tl.store(at + RANK + e, code_rope, mask=in_rope)
                    tl.store(scales + new_row, code_scale.to(tl.uint8))
            elif tile == 0:
                tl.store(at + c, new, mask=in_rank)
                tl.store(at + RANK + e, new_rope, mask=in_rope)
            score = tl.sum(q.to(tl.float32) * number[None, :], axis=1)
            score += tl.sum(q_rope.to(tl.float32) * number_rope[None, :], axis=1)
            max_score = score * scale
            exp_sum += 1.0
            weighted_sum += number[None, :]
        for block_start in range(first, last, BLOCK):
            n = block_start + tl.arange(0, BLOCK)
            in_split = n < last
            cached = cache_row(table, columns, column, block_start) + tl.arange(0, BLOCK)
            of_block = latents + cached[:, None] * (RANK + ROPE)
            k = tl.load(of_block + c[None, :], mask=in_split[:, None] & in_rank[None, :], other=0)
            k_rope = tl.load(of_block + RANK + e[None, :], mask=in_split[:, None] & in_rope[None, :], other=0)
            if FP8:
                stored_scale = scale_number(tl.load(scales + cached, mask=in_split, other=127))
                k, block_scale = decode_block(k, stored_scale, dtype)
                k_rope, block_scale = decode_block(k_rope, stored_scale, dtype)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision=PRECISION) * scale
            if FP8:
                scores *= block_scale[None, :]
            scores = tl.where(in_split[None, :], scores, float("-inf"))
            new_max = tl.maximum(max_score, tl.max(scores, axis=1))
            weights, rescale = tl.exp(scores - new_max[:, None]), tl.exp(max_score - new_max)
            exp_sum = exp_sum * rescale + tl.sum(weights, axis=1)
            if FP8:
                weights *= block_scale[None, :]
            weighted_sum = tl.dot(weights.to(dtype), k, weighted_sum * rescale[:, None], input_precision=PRECISION)
            max_score = new_max
        index = (column * heads + h) * SPLITS + split
        tl.store(states + 2 * index, max_score, mask=h < heads)
        tl.store(states + 2 * index + 1, exp_sum, mask=h < heads)
        at = sums + index.to(tl.int64)[:, None] * RANK + c[None, :]
        tl.store(at, weighted_sum, mask=inside & in_rank[None, :])


@triton.jit
def _combine_splits(
    sums,
    states,
    table,
    out,  # [R, heads, RANK]
    columns,
    heads,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column, head = tl.program_id(0), tl.program_id(1)
    count = tl.load(table + COUNT * columns + column)
    if count <= 1:  # rows of no sequence become zero
        c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        row = tl.load(table + FIRST_ROW * columns + column)
        position = tl.load(table + POSITION * columns + column)
        split = tl.arange(0, SPLITS)
        in_use = (split == 0) | (split * _split_length(position, SPLITS, BLOCK) < position)
        index = (column * heads + head) * SPLITS + split
        max_score = tl.load(states + 2 * index, mask=in_use, other=float("-inf"))
        exp_sum = tl.load(states + 2 * index + 1, mask=in_use, other=0.0)
        weight = tl.exp(max_score - tl.max(max_score, axis=0))
        mask = in_use[:, None] & (c < RANK)[None, :]
        split_sums = tl.load(sums + index.to(tl.int64)[:, None] * RANK + c[None, :], mask=mask, other=0.0)
        output = tl.sum(split_sums * weight[:, None], axis=0) / tl.sum(weight * exp_sum, axis=0)
        output = tl.where(count == 1, output, 0.0)
        tl.store(out + (row * heads + head) * RANK + c, output.to(out.dtype.element_ty), mask=(c < RANK) & (row >= 0))


def tiling(heads: int, width: int, element: int, shared_memory: int) -> Tiling:
    """For latents of `width` numbers of `element` bytes on a GPU whose blocks may have `shared_memory` bytes."""
    if heads > SMALL.heads and width * element <= 2 * 576 and shared_memory >= LARGE_BYTES:
        return LARGE
    bytes_of_latent = triton.next_power_of_2(width) * element
    stages, block = SMALL.stages, SMALL.block
    while stages > 1 and (SMALL.heads + stages * block) * bytes_of_latent > shared_memory:
        stages -= 1
    return Tiling(SMALL.heads, block, SMALL.warps, stages)


def attend(table: Tensor, cache: Sequence[Tensor], spec: AttentionSpec, query: Tensor, key: Tensor) -> Tensor:
    """`paged_attention.attend_latents` on a GPU."""
    assert spec.latent is not None
    (heads, rows, width), rank, columns = query.shape, spec.latent.rank, table.shape[1]
    query, key = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key))
    tile = tiling(heads, width, query.element_size(), shared_memory(query.device))
    sums = torch.empty(columns, heads, SPLITS, rank, dtype=torch.float32, device=query.device)
    states = torch.empty(columns, heads, SPLITS, 2, dtype=torch.float32, device=query.device)
    out = torch.empty(rows, heads, rank, dtype=query.dtype, device=query.device)
    attend_split: Any = _attend_split[(columns, triton.cdiv(heads, tile.heads), SPLITS)]
    attend_split(
        query,
        key,
        cache[0],
        cache[-1],
        table,
        sums,
        states,
        columns,
        heads,
        spec.scale,
        *query.stride()[:2],
        key.stride(1),
        RANK=rank,
        ROPE=width - rank,
        SPLITS=SPLITS,
        BLOCK=tile.block,
        HEADS=tile.heads,
        WIDE=max(MIN_TILE, triton.next_power_of_2(rank)),
        WIDE_ROPE=max(MIN_TILE, triton.next_power_of_2(width - rank)),
        PRECISION="ieee" if key.dtype == torch.float32 else "tf32",
        FP8=len(cache) > 2,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    combined = min(COMBINED_COLUMNS, max(MIN_TILE, triton.next_power_of_2(rank)))
    combine_splits: Any = _combine_splits[(columns, heads, triton.cdiv(rank, combined))]
    words = {"RANK": rank, "SPLITS": SPLITS, "BLOCK": tile.block, "COLUMNS": combined}
    combine_splits(sums, states, table, out, columns, heads, **words)
    return out
