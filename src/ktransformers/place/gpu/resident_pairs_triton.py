"""Functions that all Triton kernels of resident experts call: the (token, slot) pairs of an expert, products of one row
with a dense matrix (LoRA's factors), and the activation of gate and up.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dense_rows(matrix, x, row, valid, columns, N: tl.constexpr, K: tl.constexpr):
    """Products of N rows of a dense matrix with one row of numbers."""
    total = tl.zeros((N, K), tl.float32)
    for start in range(0, columns, K):
        k = start + tl.arange(0, K)
        value = tl.load(x + k, mask=k < columns, other=0.0).to(tl.bfloat16).to(tl.float32)
        offset = row[:, None] * columns + k[None, :]
        weight = tl.load(matrix + offset, mask=valid[:, None] & (k < columns)[None, :], other=0.0)
        total += weight.to(tl.float32) * value[None, :]
    return tl.sum(total, axis=1)


@triton.jit
def pairs_of_expert(ids, route, expert, routes, ROUTES: tl.constexpr, ROWS: tl.constexpr):
    """Whether this (token, slot) computes for others with the same expert; up to ROWS of them, itself first, and which
    of these exist. The pairs of an expert are numbered in their order; every ROWS-th computes."""
    r, m = tl.arange(0, ROUTES), tl.arange(0, ROWS)
    same = (tl.load(ids + r, mask=r < routes, other=-1) == expert) & (r < routes)
    number = tl.sum((same & (r < route)).to(tl.int32), axis=0)
    position = tl.cumsum(same.to(tl.int32), axis=0) - 1
    chosen = same[None, :] & (position[None, :] == number + m[:, None])
    pairs = tl.sum(tl.where(chosen, r[None, :], 0), axis=1)
    return number % ROWS == 0, pairs, tl.sum(chosen.to(tl.int32), axis=1) > 0


@triton.jit
def activate(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr, ADDED: tl.constexpr):
    """bf16: `Gate` of gate and up for silu and for OpenAI's SwiGLU."""
    if LIMIT > 0:
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return (gate * tl.sigmoid(ALPHA * gate) * (up + ADDED)).to(tl.bfloat16)
