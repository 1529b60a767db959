"""Residents times few tokens in Triton, told by ids in device memory who computes what: nothing here asks the host.

Weights are read as they lie, bf16 in tiles of 16 outputs by 32 of K (`layout.py`): 16 pairs along K, each with its two
numbers for 16 outputs side by side, so `[pairs, 32]` of a tile is a kilobyte in one piece. The first kernel has a
program for each (token, slot) and block of gate and up, or of up alone; the second one for each token and half block of
down, which adds up the token's residents in the order of its slots: no atomic operation, the same bits every time. A
program whose expert is no resident (`place[expert]` is -1) ends at once. The surprising decision: tokens that share an
expert each read it; there are so few that the second reading comes from L2, or is far cheaper than the CPU beside it.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktransformers.place.gpu.layout import Matrix

PAIRS = 128  # along K that a program takes at a time


@triton.jit
def _inputs(x, q, columns, j):
    """[Q, 32]: what the numbers of a pair are multiplied with, for each output the same; rounded as everywhere."""
    even = tl.load(x + 2 * q, mask=2 * q < columns, other=0.0).to(tl.bfloat16).to(tl.float32)
    odd = tl.load(x + 2 * q + 1, mask=2 * q + 1 < columns, other=0.0).to(tl.bfloat16).to(tl.float32)
    return tl.where(j % 2 == 0, even[:, None], odd[:, None])


@triton.jit
def _outputs(total):
    """[Q, 32] -> [16]."""
    return tl.sum(tl.reshape(tl.sum(total, axis=0), (16, 2)), axis=1)


@triton.jit
def _block(words, x, columns, pairs, Q: tl.constexpr):
    """The two halves of a block, 16 outputs each."""
    j = tl.arange(0, 32)[None, :]
    one = tl.zeros((Q, 32), tl.float32)
    two = tl.zeros((Q, 32), tl.float32)
    for start in range(0, pairs, Q):
        q = start + tl.arange(0, Q)
        value = _inputs(x, q, columns, j)
        at = (q // 16 * 1024 + q % 16 * 32)[:, None] + j
        inside = (q < pairs)[:, None]
        one += tl.load(words + at, mask=inside, other=0.0).to(tl.float32) * value
        two += tl.load(words + at + 512, mask=inside, other=0.0).to(tl.float32) * value
    return _outputs(one), _outputs(two)


@triton.jit
def _half(words, x, columns, pairs, Q: tl.constexpr):
    """One half of a block."""
    j = tl.arange(0, 32)[None, :]
    total = tl.zeros((Q, 32), tl.float32)
    for start in range(0, pairs, Q):
        q = start + tl.arange(0, Q)
        at = (q // 16 * 1024 + q % 16 * 32)[:, None] + j
        weight = tl.load(words + at, mask=(q < pairs)[:, None], other=0.0).to(tl.float32)
        total += weight * _inputs(x, q, columns, j)
    return _outputs(total)


@triton.jit
def _first(
    hidden,  # [T, columns]
    ids,  # [T, k]
    place,  # int32 [E]
    words,  # the slots as bf16
    bias,  # float32 [E, outputs], or anything
    out,  # bf16 [T * k, rows] where SILU, else float32 [T * k, outputs]
    experts,
    top_k,
    rows,
    columns,
    pairs,
    expert_words,
    block_words,
    PAIRED: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    Q: tl.constexpr,
):
    route, block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + route).to(tl.int64)
    slot = tl.load(place + expert, mask=(expert >= 0) & (expert < experts), other=-1).to(tl.int64)
    if slot >= 0:
        x = hidden + (route // top_k).to(tl.int64) * columns
        one, two = _block(words + slot * expert_words + block.to(tl.int64) * block_words, x, columns, pairs, Q)
        n = tl.arange(0, 16)
        if PAIRED:
            low, inside, outputs = block * 16 + n, block * 16 + n < rows, 2 * rows
            high, inside_too = low + rows, inside
        else:
            low, inside, outputs = block * 32 + n, block * 32 + n < rows, rows
            high, inside_too = low + 16, low + 16 < rows
        if BIAS:
            one += tl.load(bias + expert * outputs + low, mask=inside, other=0.0)
            two += tl.load(bias + expert * outputs + high, mask=inside_too, other=0.0)
        if SILU:
            tl.store(out + route * rows + low, (one * tl.sigmoid(one) * two).to(tl.bfloat16), mask=inside)
        else:
            tl.store(out + route * outputs + low, one, mask=inside)
            tl.store(out + route * outputs + high, two, mask=inside_too)


@triton.jit
def _down(
    h,  # bf16 [T * k, columns]
    ids,
    weights,  # [T, k]
    place,
    words,
    bias,
    out,  # float32 [T, rows]
    experts,
    top_k,
    rows,
    columns,
    pairs,
    expert_words,
    block_words,
    BIAS: tl.constexpr,
    Q: tl.constexpr,
):
    token, strip = tl.program_id(0), tl.program_id(1)
    at = (strip // 2).to(tl.int64) * block_words + strip % 2 * 512
    row = strip * 16 + tl.arange(0, 16)
    total = tl.zeros((16,), tl.float32)
    for choice in range(top_k):
        route = token * top_k + choice
        expert = tl.load(ids + route).to(tl.int64)
        slot = tl.load(place + expert, mask=(expert >= 0) & (expert < experts), other=-1).to(tl.int64)
        if slot >= 0:
            y = _half(words + slot * expert_words + at, h + route.to(tl.int64) * columns, columns, pairs, Q)
            if BIAS:
                y += tl.load(bias + expert * rows + row, mask=row < rows, other=0.0)
            total += y * tl.load(weights + route).to(tl.float32)
    tl.store(out + token * rows + row, total, mask=row < rows)


@triton.jit
def _count(ids, counts, routes, experts, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    expert = tl.load(ids + at, mask=at < routes, other=-1)
    tl.atomic_add(counts + expert, tl.full((BLOCK,), 1, tl.int32), mask=(expert >= 0) & (expert < experts))


def _sizes(matrix: Matrix, experts: int, top_k: int) -> tuple[int, ...]:
    pairs = -(-matrix.columns // 2)
    return experts, top_k, matrix.rows, matrix.columns, pairs, matrix.expert_bytes // 2, matrix.block_bytes // 2


def first(
    hidden: Tensor, ids: Tensor, place: Tensor, packed: Tensor, bias: Tensor | None, matrix: Matrix, silu: bool
) -> Tensor:
    """bf16 `[T * k, rows]` behind the gate where it is silu; else float32 `[T * k, out_rows]`, as the products are.
    Rows of experts that are not here are left as they were."""
    routes = ids.numel()
    shape, dtype = ((routes, matrix.rows), torch.bfloat16) if silu else ((routes, matrix.out_rows), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=hidden.device)
    launch: Any = _first[(routes, matrix.blocks)]
    launch(
        hidden,
        ids,
        place,
        packed.view(torch.bfloat16),
        place if bias is None else bias,
        out,
        *_sizes(matrix, place.shape[0], ids.shape[1]),
        PAIRED=matrix.paired,
        BIAS=bias is not None,
        SILU=silu,
        Q=PAIRS,
    )
    return out


def down(
    h: Tensor, ids: Tensor, weights: Tensor, place: Tensor, packed: Tensor, bias: Tensor | None, matrix: Matrix
) -> Tensor:
    """float32 `[T, rows]`: the weighted sum over the experts that are here."""
    out = torch.empty(ids.shape[0], matrix.rows, dtype=torch.float32, device=h.device)
    launch: Any = _down[(ids.shape[0], 2 * matrix.blocks)]
    launch(
        h,
        ids,
        weights,
        place,
        packed.view(torch.bfloat16),
        place if bias is None else bias,
        out,
        *_sizes(matrix, place.shape[0], ids.shape[1]),
        BIAS=bias is not None,
        Q=PAIRS,
    )
    return out


def count(ids: Tensor, counts: Tensor) -> None:
    """Adds the rows of each expert to int32 `[E]`."""
    routes = ids.numel()
    launch: Any = _count[(1,)]
    launch(ids, counts, routes, counts.shape[0], BLOCK=1 << (routes - 1).bit_length())
