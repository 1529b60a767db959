"""Residents times few tokens in Triton, told by ids in device memory who computes what: nothing here asks the host.

Weights are read as they lie, bf16 in tiles of 16 outputs by 32 of K (`layout.py`): 16 pairs along K, each with its two
numbers for 16 outputs side by side, so `[pairs, 32]` of a tile is a kilobyte in one piece. What was released in fewer
bits is decoded first, a plain matrix for each (token, slot). The first kernel has a program for each (token, slot) and
block of gate and up, or of up alone; the second one for each token and half block of down, which adds up the token's
residents in the order of its slots: no atomic operation, the same bits every time. A program whose expert is no
resident (`place[expert]` is -1) ends at once. The surprising decision: tokens that share an expert each read it; there
are so few that the second reading comes from L2, or is far cheaper than the CPU beside it.

LoRA is a table of addresses (`several.py`, `Terms`): one more kernel has a program for each (token, slot) and 16 ranks
of A, and the two above add B's product where a token wants an adapter.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktransformers.place.gpu import dequantize_triton
from ktransformers.place.gpu.layout import PackedMatrix

PAIRS = 128  # along K that a program takes at a time; of a plain matrix as many single numbers

Lora = tuple[Tensor, Tensor, int]  # of one matrix: adapters int32 [T], the table int64 [adapters, 3], the largest rank


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
def _dense(matrix, x, row, inside, columns, K: tl.constexpr):
    """16 rows of a plain matrix."""
    total = tl.zeros((16, K), tl.float32)
    for start in range(0, columns, K):
        k = start + tl.arange(0, K)
        value = tl.load(x + k, mask=k < columns, other=0.0).to(tl.bfloat16).to(tl.float32)
        at = row[:, None] * columns + k[None, :]
        weight = tl.load(matrix + at, mask=inside[:, None] & (k < columns)[None, :], other=0.0)
        total += weight.to(tl.float32) * value[None, :]
    return tl.sum(total, axis=1)


@triton.jit
def _ranks(
    x,  # [T, columns], or [T * k, columns] where EACH
    ids,  # [T, k]
    place,  # int32 [E]
    adapters,  # int32 [T]
    factors,  # int64 [adapters, 3]: where A and B lie, and their rank
    inner,  # bf16 [T * k, RANKS]
    experts,
    top_k,
    columns,
    EACH: tl.constexpr,
    RANKS: tl.constexpr,
    Q: tl.constexpr,
):
    route, block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + route).to(tl.int64)
    slot = tl.load(place + expert, mask=(expert >= 0) & (expert < experts), other=-1)
    adapter = tl.load(adapters + route // top_k).to(tl.int64)
    if (slot >= 0) & (adapter >= 0):
        rank = tl.load(factors + 3 * adapter + 2).to(tl.int32)
        r = block * 16 + tl.arange(0, 16)
        if block * 16 < rank:
            a = tl.load(factors + 3 * adapter).to(tl.pointer_type(tl.bfloat16)) + expert * rank * columns
            row = (route if EACH else route // top_k).to(tl.int64)
            found = _dense(a, x + row * columns, r, r < rank, columns, Q)
            tl.store(inner + route * RANKS + r, found.to(tl.bfloat16))


@triton.jit
def _added(route, expert, top_k, adapters, factors, inner, row, inside, outputs, RANKS: tl.constexpr):
    """What B makes of a row's ranks, for 16 outputs; zeros where the token has no adapter."""
    adapter = tl.load(adapters + route // top_k).to(tl.int64)
    rank = tl.load(factors + 3 * adapter + 2, mask=adapter >= 0, other=0).to(tl.int32)
    found = tl.zeros((16,), tl.float32)
    if rank > 0:
        b = tl.load(factors + 3 * adapter + 1).to(tl.pointer_type(tl.bfloat16)) + expert * outputs * rank
        found = _dense(b, inner + route * RANKS, row, inside, rank, RANKS)
    return found


@triton.jit
def _first(
    hidden,  # [T, columns]
    ids,  # [T, k]
    place,  # int32 [E]
    words,  # bf16: the slots; where DENSE a matrix for each (token, slot)
    bias,  # float32 [E, outputs], or anything
    adapters,  # int32 [T], or anything
    factors,  # as above, or anything
    inner,  # bf16 [T * k, RANKS], or anything
    out,  # bf16 [T * k, rows] where SILU, else float32 [T * k, outputs]
    experts,
    top_k,
    rows,
    columns,
    pairs,
    expert_words,
    block_words,
    DENSE: tl.constexpr,
    PAIRED: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    RANKS: tl.constexpr,  # 0: no LoRA
    Q: tl.constexpr,
):
    route, block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + route).to(tl.int64)
    slot = tl.load(place + expert, mask=(expert >= 0) & (expert < experts), other=-1).to(tl.int64)
    if slot >= 0:
        x = hidden + (route // top_k).to(tl.int64) * columns
        n = tl.arange(0, 16)
        if PAIRED:
            low, inside, outputs = block * 16 + n, block * 16 + n < rows, 2 * rows
            high, inside_too = low + rows, inside
        else:
            low, inside, outputs = block * 32 + n, block * 32 + n < rows, rows
            high, inside_too = low + 16, low + 16 < rows
        if DENSE:
            matrix = words + route.to(tl.int64) * outputs * columns
            one = _dense(matrix, x, low, inside, columns, Q)
            two = _dense(matrix, x, high, inside_too, columns, Q)
        else:
            one, two = _block(words + slot * expert_words + block.to(tl.int64) * block_words, x, columns, pairs, Q)
        if BIAS:
            one += tl.load(bias + expert * outputs + low, mask=inside, other=0.0)
            two += tl.load(bias + expert * outputs + high, mask=inside_too, other=0.0)
        if RANKS:
            one += _added(route, expert, top_k, adapters, factors, inner, low, inside, outputs, RANKS)
            two += _added(route, expert, top_k, adapters, factors, inner, high, inside_too, outputs, RANKS)
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
    adapters,
    factors,
    inner,
    out,  # float32 [T, rows]
    experts,
    top_k,
    rows,
    columns,
    pairs,
    expert_words,
    block_words,
    DENSE: tl.constexpr,
    BIAS: tl.constexpr,
    RANKS: tl.constexpr,
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
            x = h + route.to(tl.int64) * columns
            if DENSE:
                y = _dense(words + route.to(tl.int64) * rows * columns, x, row, row < rows, columns, Q)
            else:
                y = _half(words + slot * expert_words + at, x, columns, pairs, Q)
            if BIAS:
                y += tl.load(bias + expert * rows + row, mask=row < rows, other=0.0)
            if RANKS:
                y += _added(route, expert, top_k, adapters, factors, inner, row, row < rows, rows, RANKS)
            total += y * tl.load(weights + route).to(tl.float32)
    tl.store(out + token * rows + row, total, mask=row < rows)


@triton.jit
def _count(ids, counts, routes, experts, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    expert = tl.load(ids + at, mask=at < routes, other=-1)
    tl.atomic_add(counts + expert, tl.full((BLOCK,), 1, tl.int32), mask=(expert >= 0) & (expert < experts))


def _weights(
    packed: Tensor, ids: Tensor, place: Tensor, bias: Tensor | None, matrix: PackedMatrix
) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """The weights and biases as both kernels take them: tensors, sizes, and what is known when they are compiled."""
    words = packed.view(torch.bfloat16) if matrix.plain else _decoded(packed, ids, place, matrix)
    pairs = -(-matrix.columns // 2)
    sizes = (matrix.rows, matrix.columns, pairs, matrix.expert_bytes // 2, matrix.block_bytes // 2)
    known = {"DENSE": not matrix.plain, "BIAS": bias is not None, "Q": PAIRS}
    return (words, place if bias is None else bias), (place.shape[0], ids.shape[1], *sizes), known


def _decoded(packed: Tensor, ids: Tensor, place: Tensor, matrix: PackedMatrix) -> Tensor:
    """bf16 `[T * k, out_rows, columns]`, filled where the expert is here."""
    experts = place.shape[0]
    flat = ids.reshape(-1)
    slots = place[flat.clamp(0, experts - 1)].masked_fill((flat < 0) | (flat >= experts), -1)
    out = torch.empty(flat.shape[0], matrix.out_rows, matrix.columns, dtype=torch.bfloat16, device=packed.device)
    dequantize_triton.decode(packed, slots, matrix, out)
    return out


def _lora(
    x: Tensor, ids: Tensor, place: Tensor, matrix: PackedMatrix, lora: Lora | None
) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """What A makes of the rows, as both kernels take it beside the table, and the ranks that it has room for."""
    if lora is None:
        return (place, place, place), 0
    adapters, factors, rank = lora
    ranks = max(16, triton.next_power_of_2(rank))
    inner = torch.empty(ids.numel(), ranks, dtype=torch.bfloat16, device=x.device)
    launch: Any = _ranks[(ids.numel(), ranks // 16)]
    sizes = (place.shape[0], ids.shape[1], matrix.columns)
    each = x.shape[0] == ids.numel()  # with one slot a token they are the same
    launch(x, ids, place, adapters, factors, inner, *sizes, EACH=each, RANKS=ranks, Q=PAIRS)
    return (adapters, factors, inner), ranks


def first(
    hidden: Tensor,
    ids: Tensor,
    place: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    matrix: PackedMatrix,
    silu: bool,
    lora: Lora | None = None,
) -> Tensor:
    """bf16 `[T * k, rows]` behind the gate where it is silu; else float32 `[T * k, out_rows]`, as the products are.
    Rows of experts that are not here are left as they were."""
    routes = ids.numel()
    shape, dtype = ((routes, matrix.rows), torch.bfloat16) if silu else ((routes, matrix.out_rows), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=hidden.device)
    tensors, sizes, known = _weights(packed, ids, place, bias, matrix)
    told, ranks = _lora(hidden, ids, place, matrix, lora)
    launch: Any = _first[(routes, matrix.blocks)]
    launch(hidden, ids, place, *tensors, *told, out, *sizes, PAIRED=matrix.paired, SILU=silu, RANKS=ranks, **known)
    return out


def down(
    h: Tensor,
    ids: Tensor,
    weights: Tensor,
    place: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    matrix: PackedMatrix,
    lora: Lora | None = None,
) -> Tensor:
    """float32 `[T, rows]`: the weighted sum over the experts that are here."""
    out = torch.empty(ids.shape[0], matrix.rows, dtype=torch.float32, device=h.device)
    tensors, sizes, known = _weights(packed, ids, place, bias, matrix)
    told, ranks = _lora(h, ids, place, matrix, lora)
    launch: Any = _down[(ids.shape[0], 2 * matrix.blocks)]
    launch(h, ids, weights, place, *tensors, *told, out, *sizes, RANKS=ranks, **known)
    return out


def count(ids: Tensor, counts: Tensor) -> None:
    """Adds the rows of each expert to int32 `[E]`."""
    routes = ids.numel()
    launch: Any = _count[(1,)]
    launch(ids, counts, routes, counts.shape[0], BLOCK=max(32, 1 << (routes - 1).bit_length()))
