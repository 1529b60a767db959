"""Triton kernels for the resident experts of a few tokens; expert ids are read in device memory, so the host does not
synchronise.

Three kernels compute a layer, with one before them if there are several tokens. That one groups the (token, slot) pairs
of an expert by two or four (`_group_routes`), so that an expert that tokens share is decoded once for them; a pair
whose expert is not resident (`slot_of[expert]` is -1) is in no group. The others have a program for every pair and
block of 32 outputs, of which those without a group end at once: gate and up with the activation, then down, which
writes the weighted output of every pair (`block_products_triton.py`); a third kernel sums those of a token in one
order: no atomics, the same bits every time. Programs of the same block of all pairs follow each other, so that several
groups of an expert read a block at the same time, and memory once.

GGUF's K types, and gate and up of different formats, which are dequantised first, have two other kernels, on tensor
cores (`resident_tiles_triton.py`).

LoRA factors are found through a table of addresses (`LoraPointers` of `place/gpu/multi_lora.py`): one more kernel has a
program per (token, slot) and 16 ranks of A, and the kernels above add B's product to rows with an adapter.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,assignment,no-redef"
# ruff: noqa: RUF005 - Triton has no unpacking inside of a tuple
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktransformers.experts.gate import Gate
from ktransformers.place.gpu import block_products_triton, code_products_triton
from ktransformers.place.gpu.block_products_triton import block_products
from ktransformers.place.gpu.resident_pairs_triton import activate, dense_rows, pairs_of_expert
from ktransformers.place.gpu.resident_tiles_triton import down_tiles, first_tiles
from ktransformers.quantized.gpu import dequantize_triton
from ktransformers.quantized.gpu.layout import PackedMatrix

SUM_COLUMNS = 256  # of a program that sums outputs
FEW_ROWS = tl.constexpr(2)  # of one expert in a program whose loop is the short one
PARTS, FEW_ROUTES = 4, 16  # half blocks of down in a program, of batches with more (token, slot) pairs than these
RANKS_PER_STEP = 128  # numbers of a row of A or B that a step of LoRA's products takes

# Of one matrix: adapters int32 [T], the table of LoraPointers int64 [adapters, 3], and the largest rank.
Lora = tuple[Tensor, Tensor, int]


@triton.jit
def _lora_a(
    x,  # [T, columns], or [T * k, columns] if BY_ROUTE
    ids,  # [T, k]
    slot_of,  # int32 [E]
    adapters,  # int32 [T]
    factors,  # int64 [adapters, 3]: addresses of A and B, and their rank
    inner,  # bf16 [T * k, RANKS]
    experts,
    top_k,
    columns,
    BY_ROUTE: tl.constexpr,
    RANKS: tl.constexpr,
    Q: tl.constexpr,
):
    route, block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + route).to(tl.int64)
    slot = tl.load(slot_of + expert, mask=(expert >= 0) & (expert < experts), other=-1)
    adapter = tl.load(adapters + route // top_k).to(tl.int64)
    if (slot >= 0) & (adapter >= 0):
        rank = tl.load(factors + 3 * adapter + 2).to(tl.int32)
        r = block * 16 + tl.arange(0, 16)
        if block * 16 < rank:
            a = tl.load(factors + 3 * adapter).to(tl.pointer_type(tl.bfloat16)) + expert * rank * columns
            row = (route if BY_ROUTE else route // top_k).to(tl.int64)
            value = dense_rows(a, x + row * columns, r, r < rank, columns, 16, Q)
            tl.store(inner + route * RANKS + r, value.to(tl.bfloat16))


@triton.jit
def _group_routes(
    ids,  # [T, k]
    slot_of,  # int32 [E]
    counts,  # int32 [E]: rows of each expert, added to; or unused
    slots,  # int32 [T * k]: the slot of a pair that computes, or -1
    pairs,  # int32 [T * k, ROWS]: pairs that it computes for, or -1
    routes,
    experts,
    ROUTES: tl.constexpr,
    ROWS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """One program per (token, slot) pair: of every ROWS pairs with the same expert the first computes for all."""
    route, m = tl.program_id(0), tl.arange(0, ROWS)
    expert = tl.load(ids + route).to(tl.int64)
    known = (expert >= 0) & (expert < experts)
    if COUNT:
        tl.atomic_add(counts + expert, 1, mask=known, sem="relaxed")
    slot = tl.load(slot_of + expert, mask=known, other=-1)
    computes, members, present = pairs_of_expert(ids, route, expert, routes, ROUTES, ROWS)
    tl.store(slots + route, tl.where(computes, slot, -1))
    tl.store(pairs + route * ROWS + m, tl.where(present, members, -1))


@triton.jit
def _slot_of_route(ids, slot_of, counts, slots, route, block, experts, COUNT: tl.constexpr, ROWS: tl.constexpr):
    """The slot that a program reads, or -1."""
    if ROWS > 1:
        slot = tl.load(slots + route)
    else:
        expert = tl.load(ids + route)
        known = (expert >= 0) & (expert < experts)
        if COUNT:
            tl.atomic_add(counts + expert, 1, mask=known & (block == 0), sem="relaxed")
        slot = tl.load(slot_of + expert, mask=known, other=-1)
    return slot.to(tl.int64)


@triton.jit
def _pairs(pairs, route, ROWS: tl.constexpr):
    """The (token, slot) pairs of a program, -1 behind the last."""
    if ROWS == 1:
        members = (route,)
    else:
        members = ()
        for m in tl.static_range(ROWS):
            members = members + (tl.load(pairs + route * ROWS + m),)
    return members


@triton.jit
def _rows(x, pairs, per_row, length):
    """Their rows of x; row 0 for -1."""
    rows = ()
    for m in tl.static_range(len(pairs)):
        rows = rows + (x + tl.maximum(pairs[m], 0) // per_row * length,)
    return rows


@triton.jit
def _lora_b(sums, pair, expert, top_k, adapters, factors, inner, row, valid, outputs, RANKS: tl.constexpr):
    """`sums` [16] of one pair plus B times its ranks if it has an adapter."""
    adapter = tl.load(adapters + pair // top_k).to(tl.int64)
    rank = tl.load(factors + 3 * adapter + 2, mask=adapter >= 0, other=0).to(tl.int32)
    if rank > 0:
        b = tl.load(factors + 3 * adapter + 1).to(tl.pointer_type(tl.bfloat16)) + expert * outputs * rank
        sums += dense_rows(b, inner + pair.to(tl.int64) * RANKS, row, valid, rank, 16, RANKS)
    return sums


@triton.jit
def _store_pair(
    pair, low_sum, high_sum, expert, weights, bias, adapters, factors, inner, out, low, high, low_valid, high_valid,
    outputs, rows, top_k, BIAS: tl.constexpr, GATE: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    ADDED: tl.constexpr, RANKS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Both halves of a block of one pair, after bias and LoRA; activated if GATE, times the pair's weight if
    WEIGHTED."""
    if pair >= 0:
        if BIAS:
            low_sum += tl.load(bias + expert * outputs + low, mask=low_valid, other=0.0)
            high_sum += tl.load(bias + expert * outputs + high, mask=high_valid, other=0.0)
        if RANKS:
            low_sum = _lora_b(low_sum, pair, expert, top_k, adapters, factors, inner, low, low_valid, outputs, RANKS)
            high_sum = _lora_b(
                high_sum, pair, expert, top_k, adapters, factors, inner, high, high_valid, outputs, RANKS
            )
        if GATE:
            h = activate(low_sum, high_sum, LIMIT, ALPHA, ADDED)
            tl.store(out + pair.to(tl.int64) * rows + low, h, mask=low_valid)
        else:
            if WEIGHTED:
                weight = tl.load(weights + pair).to(tl.float32)
                low_sum, high_sum = low_sum * weight, high_sum * weight
            tl.store(out + pair.to(tl.int64) * outputs + low, low_sum, mask=low_valid)
            tl.store(out + pair.to(tl.int64) * outputs + high, high_sum, mask=high_valid)


@triton.jit
def _multiply_pairs(
    members, x, ids, weights, matrix, lora, bias, out, route, block, base, rows, columns, places, top_k,
    FORM: tl.constexpr, PAIRED: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, ADDED: tl.constexpr, RANKS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """A block of the matrix for a tuple of pairs."""
    x_rows = _rows(x, members, 1 if WEIGHTED else top_k, columns // 2)
    low_sums, high_sums = block_products(x_rows, *matrix, base, columns, *places, FORM)
    expert, n = tl.load(ids + route).to(tl.int64), tl.arange(0, 16)
    if PAIRED:
        low, outputs = block * 16 + n, 2 * rows
        high, low_valid, high_valid = low + rows, low < rows, low < rows
    else:
        low, outputs = block * 32 + n, rows
        high, low_valid, high_valid = low + 16, low < rows, low + 16 < rows
    for m in tl.static_range(len(members)):
        _store_pair(
            members[m], low_sums[m], high_sums[m], expert, weights, bias, *lora, out, low, high, low_valid, high_valid,
            outputs, rows, top_k, BIAS, GATE, LIMIT, ALPHA, ADDED, RANKS, WEIGHTED,
        )  # fmt: skip


@triton.jit
def _multiply_rows(
    x,  # int32: pairs of bf16, [T, columns / 2]; of down, whose rows are WEIGHTED, [T * k, columns / 2]
    ids,
    weights,  # [T, k], or unused
    slot_of,
    counts,
    slots,  # of `_group_routes`, or unused
    pairs,
    words,
    scales,
    scale_factors,
    bias,
    adapters,
    factors,
    inner,
    out,  # as that of `first_tiles`; of down float32 [T * k, rows]
    experts,
    top_k,
    rows,
    expert_bytes,
    block_bytes,
    columns,
    half_bytes,
    codes_at,
    spans_at,
    mask,
    FORM: tl.constexpr,  # of the numbers of K: `block_products`
    ROWS: tl.constexpr,
    COUNT: tl.constexpr,
    PAIRED: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,  # the activation is applied
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    ADDED: tl.constexpr,
    RANKS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    route, block = tl.program_id(0), tl.program_id(1)
    slot = _slot_of_route(ids, slot_of, counts, slots, route, block, experts, COUNT, ROWS)
    if slot >= 0:
        members = _pairs(pairs, route, ROWS)
        base = slot * expert_bytes + block.to(tl.int64) * block_bytes
        matrix, lora = (words, scales, scale_factors), (adapters, factors, inner)
        places = (half_bytes, codes_at, spans_at, mask)
        if ROWS > FEW_ROWS:
            many = members[FEW_ROWS] >= 0
        else:
            many: tl.constexpr = False
        if many:
            _multiply_pairs(
                members, x, ids, weights, matrix, lora, bias, out, route, block, base, rows, columns, places, top_k,
                FORM, PAIRED, BIAS, GATE, LIMIT, ALPHA, ADDED, RANKS, WEIGHTED,
            )  # fmt: skip
        else:
            _multiply_pairs(
                members[:FEW_ROWS], x, ids, weights, matrix, lora, bias, out, route, block, base, rows, columns, places,
                top_k, FORM, PAIRED, BIAS, GATE, LIMIT, ALPHA, ADDED, RANKS, WEIGHTED,
            )  # fmt: skip


@triton.jit
def _sum_slots(
    outputs, ids, slot_of, out, experts, top_k, columns, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The outputs [T * k, columns] of each token's resident experts, added in one order for any number of tokens."""
    token, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.arange(0, SLOTS)
    route = token * top_k + choice
    expert = tl.load(ids + route, mask=choice < top_k, other=-1).to(tl.int64)
    slot = tl.load(slot_of + expert, mask=(expert >= 0) & (expert < experts), other=-1)
    at = outputs + route.to(tl.int64)[:, None] * columns + c[None, :]
    total = tl.sum(tl.load(at, mask=(slot >= 0)[:, None] & (c < columns)[None, :], other=0.0), axis=0)
    tl.store(out + token.to(tl.int64) * columns + c, total.to(out.dtype.element_ty), mask=c < columns)


@triton.jit
def _count(ids, counts, routes, experts, BLOCK: tl.constexpr):
    offset = tl.arange(0, BLOCK)
    expert = tl.load(ids + offset, mask=offset < routes, other=-1)
    tl.atomic_add(counts + expert, tl.full((BLOCK,), 1, tl.int32), mask=(expert >= 0) & (expert < experts))


def _weight_arguments(
    packed: Tensor, ids: Tensor, slot_of: Tensor, bias: Tensor | None, matrix: PackedMatrix
) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """Weights and biases as arguments of both kernels: tensors, sizes and constexpr values."""
    if reads_packed(matrix):
        words, places, constants = code_products_triton.arguments(packed, matrix)
    else:
        dense = _dequantised(packed, ids, slot_of, matrix)
        words, places, constants = code_products_triton.dense_arguments(dense)
    sizes = (matrix.rows, matrix.columns, matrix.expert_bytes, matrix.block_bytes, matrix.strip_at(1))
    routes = ids.numel()
    constants = {**constants, "BIAS": bias is not None, "ROUTES": max(16, triton.next_power_of_2(routes))}
    constants["WIDEN"] = not packed.is_cuda
    tensors = (*words, slot_of if bias is None else bias)
    return tensors, (routes, slot_of.shape[0], ids.shape[1], *sizes, *places), constants


def reads_packed(matrix: PackedMatrix) -> bool:
    """Whether the weights are multiplied as they are packed."""
    return block_products_triton.supports(matrix) or code_products_triton.supports(matrix)


def _dequantised(packed: Tensor, ids: Tensor, slot_of: Tensor, matrix: PackedMatrix) -> Tensor:
    """bf16 `[T * k, out_rows, columns]`, written for resident experts only."""
    experts = slot_of.shape[0]
    flat = ids.reshape(-1)
    slots = slot_of[flat.clamp(0, experts - 1)].masked_fill((flat < 0) | (flat >= experts), -1)
    out = torch.empty(flat.shape[0], matrix.out_rows, matrix.columns, dtype=torch.bfloat16, device=packed.device)
    dequantize_triton.decode(packed, slots, matrix, out)
    return out


def _lora_arguments(
    x: Tensor, ids: Tensor, slot_of: Tensor, matrix: PackedMatrix, lora: Lora | None
) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """Adapters, table and A's products as arguments of both kernels, and the padded rank."""
    if lora is None:
        return (slot_of, slot_of, slot_of), 0
    adapters, factors, rank = lora
    ranks = max(16, triton.next_power_of_2(rank))
    inner = torch.empty(ids.numel(), ranks, dtype=torch.bfloat16, device=x.device)
    launch: Any = _lora_a[(ids.numel(), ranks // 16)]
    sizes = (slot_of.shape[0], ids.shape[1], matrix.columns)
    by_route = x.shape[0] == ids.numel()  # equal if k is 1, where both index the same row
    launch(x, ids, slot_of, adapters, factors, inner, *sizes, BY_ROUTE=by_route, RANKS=ranks, Q=RANKS_PER_STEP)
    return (adapters, factors, inner), ranks


@dataclass(frozen=True)
class Groups:
    """(token, slot) pairs by expert."""

    slots: Tensor  # int32 [T * k]: the slot of a pair that computes for itself and others, or -1
    pairs: Tensor  # int32 [T * k, rows]: the pairs that it computes for, or -1

    @property
    def rows(self) -> int:
        return self.pairs.shape[1]


def group_rows(tokens: int, top_k: int, experts: int, matrices: tuple[PackedMatrix, ...]) -> int:
    """Pairs of an expert that a program computes: four where experts have two or more on average and are decoded, which
    is most of the work then. Longer loops have more registers, so fewer programs run at a time."""
    decoded = not any(matrix.plain for matrix in matrices)
    return 4 if decoded and tokens * top_k >= 2 * experts else 2


def group_routes(
    ids: Tensor, slot_of: Tensor, counts: Tensor | None, first: PackedMatrix, down: PackedMatrix
) -> Groups | None:
    """Groups of pairs for `first` and `down`; the rows of each expert are added to `counts` int32 `[E]`.
    None if no program of theirs would compute several pairs: nothing is counted."""
    if ids.shape[0] == 1 or not any(block_products_triton.supports(matrix) for matrix in (first, down)):
        return None
    (tokens, top_k), routes = ids.shape, ids.numel()
    rows = group_rows(tokens, top_k, slot_of.shape[0], (first, down))
    pairs = torch.empty(routes, rows, dtype=torch.int32, device=ids.device)
    slots = torch.empty(routes, dtype=torch.int32, device=ids.device)
    launch: Any = _group_routes[(routes,)]
    launch(
        ids,
        slot_of,
        slot_of if counts is None else counts,
        slots,
        pairs,
        routes,
        slot_of.shape[0],
        ROUTES=max(16, triton.next_power_of_2(routes)),
        ROWS=rows,
        COUNT=counts is not None,
        num_warps=1,
    )
    return Groups(slots, pairs)


def _row_arguments(
    packed: Tensor, ids: Tensor, slot_of: Tensor, bias: Tensor | None, matrix: PackedMatrix, groups: Groups | None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """Arguments of `_multiply_rows`: groups; weights and biases; sizes; constants."""
    views, places, constants = block_products_triton.arguments(
        packed, matrix, block_products_triton.tile_of(ids.shape[0])
    )
    constants |= {"BIAS": bias is not None, "ROWS": 1 if groups is None else groups.rows}
    sizes = (slot_of.shape[0], ids.shape[1], matrix.rows, matrix.expert_bytes, matrix.block_bytes, *places)
    grouping = (slot_of, slot_of) if groups is None else (groups.slots, groups.pairs)
    return grouping, (*views, slot_of if bias is None else bias), sizes, constants


def fuses(gate: Gate) -> bool:
    """Whether `first` applies the activation."""
    return gate.activation in ("silu", "swiglu_oai")


def _gate_arguments(gate: Gate | None) -> dict[str, Any]:
    if gate is None:
        return {"GATE": False, "LIMIT": 0.0, "ALPHA": 1.0, "ADDED": 0.0}
    alpha, added = (gate.alpha, 1.0) if gate.activation == "swiglu_oai" else (1.0, 0.0)
    return {"GATE": True, "LIMIT": gate.limit, "ALPHA": alpha, "ADDED": added}


def _as_pairs(rows: Tensor) -> Tensor:
    """Rows of bf16 as int32: pairs of neighbours."""
    return rows.to(torch.bfloat16).contiguous().view(torch.int32)


def first(
    hidden: Tensor,
    ids: Tensor,
    slot_of: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    matrix: PackedMatrix,
    gate: Gate | None,
    lora: Lora | None = None,
    counts: Tensor | None = None,
    groups: Groups | None = None,
) -> Tensor:
    """bf16 `[T * k, rows]` after `gate`, or float32 products `[T * k, out_rows]` without it. Rows of experts
    that are not resident are not written. The rows of each expert are added to `counts` int32 `[E]`. With
    `groups` pairs of one expert are computed together."""
    routes = ids.numel()
    shape, dtype = (
        ((routes, matrix.rows), torch.bfloat16) if gate is not None else ((routes, matrix.out_rows), torch.float32)
    )
    out = torch.empty(shape, dtype=dtype, device=hidden.device)
    lora_tensors, ranks = _lora_arguments(hidden, ids, slot_of, matrix, lora)
    counted = slot_of if counts is None else counts
    flags = {"COUNT": counts is not None, "PAIRED": matrix.paired, "RANKS": ranks} | _gate_arguments(gate)
    if block_products_triton.supports(matrix):
        grouping, tensors, sizes, constants = _row_arguments(packed, ids, slot_of, bias, matrix, groups)
        multiply: Any = _multiply_rows[(routes, matrix.blocks)]
        multiply(
            _as_pairs(hidden), ids, slot_of, slot_of, counted, *grouping, *tensors, *lora_tensors, out, *sizes,
            WEIGHTED=False, **constants, **flags,
        )  # fmt: skip
        return out
    tensors, sizes, constants = _weight_arguments(packed, ids, slot_of, bias, matrix)
    launch: Any = first_tiles[(routes, matrix.blocks)]
    launch(hidden, ids, slot_of, counted, *tensors, *lora_tensors, out, *sizes, **constants, **flags)
    return out


def down(
    h: Tensor,
    ids: Tensor,
    weights: Tensor,
    slot_of: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    matrix: PackedMatrix,
    lora: Lora | None = None,
    dtype: torch.dtype = torch.float32,
    groups: Groups | None = None,
) -> Tensor:
    """`[T, rows]`: the weighted sum over the resident experts."""
    outputs = torch.empty(ids.numel(), matrix.rows, dtype=torch.float32, device=h.device)
    lora_tensors, ranks = _lora_arguments(h, ids, slot_of, matrix, lora)
    if block_products_triton.supports(matrix):
        grouping, tensors, sizes, constants = _row_arguments(packed, ids, slot_of, bias, matrix, groups)
        multiply: Any = _multiply_rows[(ids.numel(), matrix.blocks)]
        flags = {"COUNT": False, "PAIRED": False, "RANKS": ranks, "WEIGHTED": True} | _gate_arguments(None)
        multiply(
            _as_pairs(h), ids, weights, slot_of, slot_of, *grouping, *tensors, *lora_tensors, outputs, *sizes,
            **constants, **flags,
        )  # fmt: skip
        return _sum(outputs, ids, slot_of, dtype)
    tensors, sizes, constants = _weight_arguments(packed, ids, slot_of, bias, matrix)
    # Finding the rows of an expert takes as long as a half block; with many programs a few share it.
    parts = next(n for n in (PARTS, 2) if 2 * matrix.blocks % n == 0) if ids.numel() > FEW_ROUTES else 1
    launch: Any = down_tiles[(ids.numel(), 2 * matrix.blocks // parts)]
    launch(h, ids, weights, slot_of, *tensors, *lora_tensors, outputs, *sizes, RANKS=ranks, PARTS=parts, **constants)
    return _sum(outputs, ids, slot_of, dtype)


def _sum(outputs: Tensor, ids: Tensor, slot_of: Tensor, dtype: torch.dtype) -> Tensor:
    tokens, top_k = ids.shape
    columns = outputs.shape[1]
    out = torch.empty(tokens, columns, dtype=dtype, device=outputs.device)
    launch: Any = _sum_slots[(tokens, -(-columns // SUM_COLUMNS))]
    slots = triton.next_power_of_2(top_k)
    launch(outputs, ids, slot_of, out, slot_of.shape[0], top_k, columns, SLOTS=slots, BLOCK=SUM_COLUMNS, num_warps=2)
    return out


def count(ids: Tensor, counts: Tensor) -> None:
    """Add the rows of each expert to `counts` int32 `[E]`."""
    routes = ids.numel()
    launch: Any = _count[(1,)]
    launch(ids, counts, routes, counts.shape[0], BLOCK=max(32, 1 << (routes - 1).bit_length()))
