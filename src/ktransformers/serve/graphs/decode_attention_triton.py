"""Attention of new tokens in Triton, told by a table on the device whose slots to read (`decode.py`).

A program of the first kernel has one row, one head of keys and one stretch of that slot's keys: all heads of queries of
the group meet a block of keys at once. A second kernel puts the stretches together. Their number is part of the grid
and depends on the model alone; their length comes from the position, read on the device. So a sequence's numbers are
the same whoever shares its batch, and a graph serves slots of any length. The surprising decision: the new key is not
read back from the slot. The first stretch's program has it in registers, begins its sums with it and writes it; the
others see older keys only, so nobody waits for anybody.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktransformers.serve.engine.attention import AttentionSpec
from ktransformers.serve.graphs import decode_attention
from ktransformers.serve.graphs.decode_attention import CacheLines

PROGRAMS = 128  # for one row: about as many as a GPU has multiprocessors
BLOCK_BYTES = 16384  # of keys that a program takes at a time
TILE = 16  # rows that a product has at least
POSITION, CAPACITY, ASKED = (
    tl.constexpr(line) for line in (decode_attention.POSITION, decode_attention.CAPACITY, decode_attention.ASKED)
)


@triton.jit
def _stretches(position, window, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The first of the older keys that are seen, and how many each stretch has."""
    start = tl.where(window > 0, tl.maximum(position + 1 - window, 0), 0)
    length = tl.cdiv(position - start, SPLITS * BLOCK) * BLOCK
    return start, tl.maximum(length, BLOCK)


@triton.jit
def _capped(scores, softcap, CAPPED: tl.constexpr):
    if CAPPED:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores


@triton.jit
def _attend(
    query,  # [heads, R, D]
    key,  # [kv, R, D]
    value,  # [kv, R, DV]
    table,  # int64 [lines, R]
    sums,  # float32 [R, heads, SPLITS, DV]
    states,  # float32 [R, heads, SPLITS, 2]: the largest score, the sum of shares
    keys_line,
    values_line,
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
):
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    asked = tl.load(table + ASKED * rows + row)
    position = tl.load(table + POSITION * rows + row)
    capacity = tl.load(table + CAPACITY * rows + row)
    start, length = _stretches(position, window, SPLITS, BLOCK)
    first = start + split * length
    last = tl.minimum(first + length, position)
    if (asked != 0) & ((split == 0) | (first < last)):
        g, d, dv = tl.arange(0, GROUPS), tl.arange(0, WIDE), tl.arange(0, WIDE_V)
        kind = key.dtype.element_ty
        keys = tl.load(table + keys_line * rows + row).to(tl.pointer_type(kind))
        values = tl.load(table + values_line * rows + row).to(tl.pointer_type(kind))
        keys = tl.multiple_of(keys, 16) + head * capacity * D
        values = tl.multiple_of(values, 16) + head * capacity * DV
        inside = (g < GROUP)[:, None]
        q_at = (head * GROUP + g)[:, None] * query_head + row * query_row + d[None, :]
        q = tl.load(query + q_at, mask=inside & (d < D)[None, :], other=0.0)
        top = tl.full((GROUPS,), float("-inf"), tl.float32)
        total = tl.zeros((GROUPS,), tl.float32)
        out = tl.zeros((GROUPS, WIDE_V), tl.float32)
        if split == 0:
            new_key = tl.load(key + head * key_head + row * key_row + d, mask=d < D, other=0.0)
            new_value = tl.load(value + head * value_head + row * value_row + dv, mask=dv < DV, other=0.0)
            tl.store(keys + position * D + d, new_key, mask=d < D)
            tl.store(values + position * DV + dv, new_value, mask=dv < DV)
            score = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1) * scale
            top = _capped(score, softcap, CAPPED)
            total += 1.0
            out += new_value.to(tl.float32)[None, :]
        for at in range(first, last, BLOCK):
            n = at + tl.arange(0, BLOCK)
            older = n < last
            k = tl.load(keys + n[:, None] * D + d[None, :], mask=older[:, None] & (d < D)[None, :], other=0.0)
            v = tl.load(values + n[:, None] * DV + dv[None, :], mask=older[:, None] & (dv < DV)[None, :], other=0.0)
            scores = _capped(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, softcap, CAPPED)
            scores = tl.where(older[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            shares, fading = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
            total = total * fading + tl.sum(shares, axis=1)
            out = out * fading[:, None] + tl.dot(shares.to(kind), v, input_precision=PRECISION)
            top = higher
        place = (row * heads + head * GROUP + g) * SPLITS + split
        tl.store(states + 2 * place, top, mask=g < GROUP)
        tl.store(states + 2 * place + 1, total, mask=g < GROUP)
        tl.store(sums + place.to(tl.int64)[:, None] * DV + dv[None, :], out, mask=inside & (dv < DV)[None, :])


@triton.jit
def _together(
    sums,
    states,
    table,
    sinks,  # [heads], or anything
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
    asked = tl.load(table + ASKED * rows + row)
    position = tl.load(table + POSITION * rows + row)
    start, length = _stretches(position, window, SPLITS, BLOCK)
    split, dv = tl.arange(0, SPLITS), tl.arange(0, WIDE_V)
    there = (split == 0) | (start + split * length < position)
    place = (row * heads + head) * SPLITS + split
    top = tl.load(states + 2 * place, mask=there, other=float("-inf"))
    total = tl.load(states + 2 * place + 1, mask=there, other=0.0)
    highest = tl.max(top, axis=0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    share = tl.exp(top - highest)
    whole = tl.sum(share * total, axis=0)
    if SINKS:
        whole += tl.exp(sink - highest)
    inside = there[:, None] & (dv < DV)[None, :]
    part = tl.load(sums + place.to(tl.int64)[:, None] * DV + dv[None, :], mask=inside, other=0.0)
    found = tl.where(asked != 0, tl.sum(part * share[:, None], axis=0) / whole, 0.0)
    tl.store(out + (row * heads + head) * DV + dv, found.to(out.dtype.element_ty), mask=dv < DV)


def attend(table: Tensor, places: CacheLines, kind: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    (heads, rows, size), (groups, _, size_v) = query.shape, value.shape
    query, key, value = (one if one.stride(2) == 1 else one.contiguous() for one in (query, key, value))
    splits = max(2, min(32, triton.next_power_of_2(PROGRAMS // groups)))
    wide, wide_v = (max(TILE, triton.next_power_of_2(one)) for one in (size, size_v))
    block = max(TILE, min(64, BLOCK_BYTES // (wide * key.element_size())))
    sums = torch.empty(rows, heads, splits, size_v, dtype=torch.float32, device=query.device)
    states = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=query.device)
    out = torch.empty(rows, heads, size_v, dtype=query.dtype, device=query.device)
    window = kind.window or 0
    known = {"DV": size_v, "SPLITS": splits, "BLOCK": block, "WIDE_V": wide_v}
    first: Any = _attend[(rows, groups, splits)]
    first(
        query,
        key,
        value,
        table,
        sums,
        states,
        places.keys,
        places.values,
        rows,
        heads,
        kind.scale,
        kind.softcap or 0.0,
        window,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        GROUP=heads // groups,
        D=size,
        CAPPED=bool(kind.softcap),
        GROUPS=max(TILE, triton.next_power_of_2(heads // groups)),
        WIDE=wide,
        PRECISION="ieee" if key.dtype == torch.float32 else "tf32",
        **known,
    )
    second: Any = _together[(rows, heads)]
    sinks = out if kind.sinks is None else kind.sinks
    second(sums, states, table, sinks, out, rows, heads, window, SINKS=kind.sinks is not None, **known)
    return out
