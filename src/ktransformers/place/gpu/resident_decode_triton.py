"""Triton kernels for the resident experts of a few tokens; expert ids are read in device memory, so the host does not
synchronise.

Packed bf16 weights are read in place, in tiles of 16 outputs by 32 of K (`nn/device_codes/layout.py`): 16 pairs along
K, each with its two numbers for 16 outputs next to each other, so `[pairs, 32]` of a tile is one contiguous kilobyte.
Codes of other formats are read in place too (`code_products_triton.py`); where gate and up have different formats they
are dequantised first, one dense matrix per (token, slot). The first kernel has a program per (token, slot) and
block of gate and up, or of up alone; the second one per token and half block of down, which sums the token's residents
in the order of its slots: no atomics, the same bits every time. A program whose expert is not resident
(`slot_of[expert]` is -1) ends at once. Tokens that share an expert each read it, because there are so few that the
second read comes from L2 or is far cheaper than the CPU's share beside it.

LoRA factors are found through a table of addresses (`LoraPointers` of `place/gpu/multi_lora.py`): one more kernel has a
program per (token, slot) and 16 ranks of A, and the two kernels above add B's product for tokens with an adapter.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktransformers.nn.device_codes import dequantize_triton
from ktransformers.nn.device_codes.layout import TILE_BYTES, PackedMatrix
from ktransformers.place.gpu import code_products_triton
from ktransformers.place.gpu.code_products_triton import code_products, sum_pairs

PAIRS_PER_STEP = 128  # along K of one step; of a dense matrix as many single numbers
PLAIN, DENSE, CODES = (tl.constexpr(number) for number in range(3))  # what is read: packed bf16, a matrix, codes
NO_CODES = dict.fromkeys(
    ("GGUF", "CODE", "ZERO", "SCALE", "LOW", "HIGH", "SPAN", "ENTRIES", "SCALE_BYTES", "STEP"), 0
)  # constants of `code_products` for other sources

Lora = tuple[
    Tensor, Tensor, int
]  # of one matrix: adapters int32 [T], LoraPointers' table int64 [adapters, 3], largest rank


@triton.jit
def _input_pairs(x, q, columns, j):
    """[Q, 32]: the inputs that the two numbers of a pair are multiplied with, for each output; rounded to bf16."""
    even = tl.load(x + 2 * q, mask=2 * q < columns, other=0.0).to(tl.bfloat16).to(tl.float32)
    odd = tl.load(x + 2 * q + 1, mask=2 * q + 1 < columns, other=0.0).to(tl.bfloat16).to(tl.float32)
    return tl.where(j % 2 == 0, even[:, None], odd[:, None])


@triton.jit
def _block(words, x, columns, pairs, Q: tl.constexpr):
    """Products of the two halves of a packed block, 16 outputs each."""
    j = tl.arange(0, 32)[None, :]
    low_sum = tl.zeros((Q, 32), tl.float32)
    high_sum = tl.zeros((Q, 32), tl.float32)
    for start in range(0, pairs, Q):
        q = start + tl.arange(0, Q)
        value = _input_pairs(x, q, columns, j)
        offset = (q // 16 * 1024 + q % 16 * 32)[:, None] + j
        valid = (q < pairs)[:, None]
        low_sum += tl.load(words + offset, mask=valid, other=0.0).to(tl.float32) * value
        high_sum += tl.load(words + offset + 512, mask=valid, other=0.0).to(tl.float32) * value
    return sum_pairs(low_sum), sum_pairs(high_sum)


@triton.jit
def _half(words, x, columns, pairs, Q: tl.constexpr):
    """Products of one half of a packed block."""
    j = tl.arange(0, 32)[None, :]
    total = tl.zeros((Q, 32), tl.float32)
    for start in range(0, pairs, Q):
        q = start + tl.arange(0, Q)
        offset = (q // 16 * 1024 + q % 16 * 32)[:, None] + j
        weight = tl.load(words + offset, mask=(q < pairs)[:, None], other=0.0).to(tl.float32)
        total += weight * _input_pairs(x, q, columns, j)
    return sum_pairs(total)


@triton.jit
def _dense_rows(matrix, x, row, valid, columns, K: tl.constexpr):
    """Products of 16 rows of a dense matrix."""
    total = tl.zeros((16, K), tl.float32)
    for start in range(0, columns, K):
        k = start + tl.arange(0, K)
        value = tl.load(x + k, mask=k < columns, other=0.0).to(tl.bfloat16).to(tl.float32)
        offset = row[:, None] * columns + k[None, :]
        weight = tl.load(matrix + offset, mask=valid[:, None] & (k < columns)[None, :], other=0.0)
        total += weight.to(tl.float32) * value[None, :]
    return tl.sum(total, axis=1)


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
            value = _dense_rows(a, x + row * columns, r, r < rank, columns, Q)
            tl.store(inner + route * RANKS + r, value.to(tl.bfloat16))


@triton.jit
def _lora_b(route, expert, top_k, adapters, factors, inner, row, valid, outputs, RANKS: tl.constexpr):
    """B times a row's ranks, for 16 outputs; zeros if the token has no adapter."""
    adapter = tl.load(adapters + route // top_k).to(tl.int64)
    rank = tl.load(factors + 3 * adapter + 2, mask=adapter >= 0, other=0).to(tl.int32)
    value = tl.zeros((16,), tl.float32)
    if rank > 0:
        b = tl.load(factors + 3 * adapter + 1).to(tl.pointer_type(tl.bfloat16)) + expert * outputs * rank
        value = _dense_rows(b, inner + route * RANKS, row, valid, rank, RANKS)
    return value


@triton.jit
def _first(
    hidden,  # [T, columns]
    ids,  # [T, k]
    slot_of,  # int32 [E]
    words,  # the packed slots as bf16 or, of codes, as int32; if DENSE one matrix per (token, slot)
    scales,  # of codes: as `code_products` takes them, otherwise unused
    scale_factors,
    bias,  # float32 [E, outputs], or unused
    adapters,  # int32 [T], or unused
    factors,  # as above, or unused
    inner,  # bf16 [T * k, RANKS], or unused
    out,  # bf16 [T * k, rows] if SILU, else float32 [T * k, outputs]
    experts,
    top_k,
    rows,
    columns,
    pairs,
    expert_bytes,
    block_bytes,
    half_bytes,
    codes_at,
    spans_at,
    SOURCE: tl.constexpr,
    GGUF: tl.constexpr,
    CODE: tl.constexpr,
    ZERO: tl.constexpr,
    SCALE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SPAN: tl.constexpr,
    ENTRIES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    STEP: tl.constexpr,
    PAIRED: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    RANKS: tl.constexpr,  # 0: no LoRA
    Q: tl.constexpr,
):
    route, block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + route).to(tl.int64)
    slot = tl.load(slot_of + expert, mask=(expert >= 0) & (expert < experts), other=-1).to(tl.int64)
    if slot >= 0:
        x = hidden + (route // top_k).to(tl.int64) * columns
        n = tl.arange(0, 16)
        if PAIRED:
            low, low_valid, outputs = block * 16 + n, block * 16 + n < rows, 2 * rows
            high, high_valid = low + rows, low_valid
        else:
            low, low_valid, outputs = block * 32 + n, block * 32 + n < rows, rows
            high, high_valid = low + 16, low + 16 < rows
        base = slot * expert_bytes + block.to(tl.int64) * block_bytes
        if SOURCE == DENSE:
            matrix = words + route.to(tl.int64) * outputs * columns
            low_sum = _dense_rows(matrix, x, low, low_valid, columns, Q)
            high_sum = _dense_rows(matrix, x, high, high_valid, columns, Q)
        elif SOURCE == CODES:
            low_sum = code_products(
                words, scales, scale_factors, base, x, columns, codes_at, spans_at,
                GGUF, CODE, ZERO, SCALE, LOW, HIGH, SPAN, ENTRIES, SCALE_BYTES, STEP,
            )  # fmt: skip
            high_sum = code_products(
                words, scales, scale_factors, base + half_bytes, x, columns, codes_at, spans_at,
                GGUF, CODE, ZERO, SCALE, LOW, HIGH, SPAN, ENTRIES, SCALE_BYTES, STEP,
            )  # fmt: skip
        else:
            low_sum, high_sum = _block(words + base // 2, x, columns, pairs, Q)
        if BIAS:
            low_sum += tl.load(bias + expert * outputs + low, mask=low_valid, other=0.0)
            high_sum += tl.load(bias + expert * outputs + high, mask=high_valid, other=0.0)
        if RANKS:
            low_sum += _lora_b(route, expert, top_k, adapters, factors, inner, low, low_valid, outputs, RANKS)
            high_sum += _lora_b(route, expert, top_k, adapters, factors, inner, high, high_valid, outputs, RANKS)
        if SILU:
            tl.store(
                out + route * rows + low, (low_sum * tl.sigmoid(low_sum) * high_sum).to(tl.bfloat16), mask=low_valid
            )
        else:
            tl.store(out + route * outputs + low, low_sum, mask=low_valid)
            tl.store(out + route * outputs + high, high_sum, mask=high_valid)


@triton.jit
def _down(
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
    out,  # float32 [T, rows]
    experts,
    top_k,
    rows,
    columns,
    pairs,
    expert_bytes,
    block_bytes,
    half_bytes,
    codes_at,
    spans_at,
    SOURCE: tl.constexpr,
    GGUF: tl.constexpr,
    CODE: tl.constexpr,
    ZERO: tl.constexpr,
    SCALE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SPAN: tl.constexpr,
    ENTRIES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    STEP: tl.constexpr,
    BIAS: tl.constexpr,
    RANKS: tl.constexpr,
    Q: tl.constexpr,
):
    token, half_block = tl.program_id(0), tl.program_id(1)
    offset = (half_block // 2).to(tl.int64) * block_bytes + half_block % 2 * half_bytes
    row = half_block * 16 + tl.arange(0, 16)
    total = tl.zeros((16,), tl.float32)
    for choice in range(top_k):
        route = token * top_k + choice
        expert = tl.load(ids + route).to(tl.int64)
        slot = tl.load(slot_of + expert, mask=(expert >= 0) & (expert < experts), other=-1).to(tl.int64)
        if slot >= 0:
            x = h + route.to(tl.int64) * columns
            base = slot * expert_bytes + offset
            if SOURCE == DENSE:
                y = _dense_rows(words + route.to(tl.int64) * rows * columns, x, row, row < rows, columns, Q)
            elif SOURCE == CODES:
                y = code_products(
                    words, scales, scale_factors, base, x, columns, codes_at, spans_at,
                    GGUF, CODE, ZERO, SCALE, LOW, HIGH, SPAN, ENTRIES, SCALE_BYTES, STEP,
                )  # fmt: skip
            else:
                y = _half(words + base // 2, x, columns, pairs, Q)
            if BIAS:
                y += tl.load(bias + expert * rows + row, mask=row < rows, other=0.0)
            if RANKS:
                y += _lora_b(route, expert, top_k, adapters, factors, inner, row, row < rows, rows, RANKS)
            total += y * tl.load(weights + route).to(tl.float32)
    tl.store(out + token * rows + row, total, mask=row < rows)


@triton.jit
def _count(ids, counts, routes, experts, BLOCK: tl.constexpr):
    offset = tl.arange(0, BLOCK)
    expert = tl.load(ids + offset, mask=offset < routes, other=-1)
    tl.atomic_add(counts + expert, tl.full((BLOCK,), 1, tl.int32), mask=(expert >= 0) & (expert < experts))


def _weight_arguments(
    packed: Tensor, ids: Tensor, slot_of: Tensor, bias: Tensor | None, matrix: PackedMatrix
) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """Weights and biases as arguments of both kernels: tensors, sizes and constexpr values."""
    places, constants = (0, 0), NO_CODES
    if matrix.plain:
        source, words = PLAIN, (packed.view(torch.bfloat16), slot_of, slot_of)
    elif code_products_triton.supports(matrix):
        source = CODES
        words, places, constants = code_products_triton.arguments(packed, matrix)
    else:
        source, words = DENSE, (_dequantised(packed, ids, slot_of, matrix), slot_of, slot_of)
    half_bytes = TILE_BYTES if matrix.plain else matrix.strip_at(1)
    sizes = (matrix.rows, matrix.columns, -(-matrix.columns // 2), matrix.expert_bytes, matrix.block_bytes, half_bytes)
    constants = {**constants, "SOURCE": source, "BIAS": bias is not None, "Q": PAIRS_PER_STEP}
    # A fused multiply-add would round values of GGUF's types once less than their decoder does.
    constants["enable_fp_fusion"] = not constants["GGUF"]
    tensors = (*words, slot_of if bias is None else bias)
    return tensors, (slot_of.shape[0], ids.shape[1], *sizes, *places), constants


def reads_codes(matrix: PackedMatrix) -> bool:
    """Whether the weights are multiplied as they are packed."""
    return matrix.plain or code_products_triton.supports(matrix)


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
    launch(x, ids, slot_of, adapters, factors, inner, *sizes, BY_ROUTE=by_route, RANKS=ranks, Q=PAIRS_PER_STEP)
    return (adapters, factors, inner), ranks


def first(
    hidden: Tensor,
    ids: Tensor,
    slot_of: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    matrix: PackedMatrix,
    silu: bool,
    lora: Lora | None = None,
) -> Tensor:
    """bf16 `[T * k, rows]` after the activation if that is silu, else float32 products `[T * k, out_rows]`. Rows of
    experts that are not resident are not written."""
    routes = ids.numel()
    shape, dtype = ((routes, matrix.rows), torch.bfloat16) if silu else ((routes, matrix.out_rows), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=hidden.device)
    tensors, sizes, constants = _weight_arguments(packed, ids, slot_of, bias, matrix)
    lora_tensors, ranks = _lora_arguments(hidden, ids, slot_of, matrix, lora)
    launch: Any = _first[(routes, matrix.blocks)]
    launch(
        hidden,
        ids,
        slot_of,
        *tensors,
        *lora_tensors,
        out,
        *sizes,
        PAIRED=matrix.paired,
        SILU=silu,
        RANKS=ranks,
        **constants,
    )
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
) -> Tensor:
    """float32 `[T, rows]`: the weighted sum over the resident experts."""
    out = torch.empty(ids.shape[0], matrix.rows, dtype=torch.float32, device=h.device)
    tensors, sizes, constants = _weight_arguments(packed, ids, slot_of, bias, matrix)
    lora_tensors, ranks = _lora_arguments(h, ids, slot_of, matrix, lora)
    launch: Any = _down[(ids.shape[0], 2 * matrix.blocks)]
    launch(h, ids, weights, slot_of, *tensors, *lora_tensors, out, *sizes, RANKS=ranks, **constants)
    return out


def count(ids: Tensor, counts: Tensor) -> None:
    """Add the rows of each expert to `counts` int32 `[E]`."""
    routes = ids.numel()
    launch: Any = _count[(1,)]
    launch(ids, counts, routes, counts.shape[0], BLOCK=max(32, 1 << (routes - 1).bit_length()))
