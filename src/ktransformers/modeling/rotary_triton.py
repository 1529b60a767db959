"""Queries and keys of a few tokens from their projections in one Triton kernel: RMS norm of each head, if there is one,
and rotary embedding of halves, with the roundings of the stock modules. A program takes one head of one token.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_and_rotate(
    query,  # [T, heads * D]
    key,  # [T, kv_heads * D]
    query_weight,  # [D], or unused
    key_weight,
    cos,  # [T, ANGLES]
    sin,
    out_query,  # [T, heads, D]
    out_key,  # [T, kv_heads, D]
    heads,
    kv_heads,
    query_stride,
    key_stride,
    query_epsilon,
    key_epsilon,
    D: tl.constexpr,
    ROTARY: tl.constexpr,  # the first numbers of a head that are rotated
    ANGLES: tl.constexpr,  # as many, or half of it: one for both halves
    NORM: tl.constexpr,
    WIDE: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, WIDE)
    HALF: tl.constexpr = ROTARY // 2
    partner = tl.where(d < HALF, d + HALF, tl.where(d < ROTARY, d - HALF, d))
    dtype = query.dtype.element_ty
    if head < heads:
        x, weight, epsilon = query + row * query_stride + head * D, query_weight, query_epsilon
        out = out_query + (row * heads + head) * D
    else:
        x, weight, epsilon = key + row * key_stride + (head - heads) * D, key_weight, key_epsilon
        out = out_key + (row * kv_heads + head - heads) * D
    inside = d < D
    value = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + partner, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / D + epsilon)
        factor = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
        other_factor = tl.load(weight + partner, mask=inside, other=0.0).to(tl.float32)
        value = ((value * scale).to(dtype).to(tl.float32) * factor).to(dtype).to(tl.float32)
        other = ((other * scale).to(dtype).to(tl.float32) * other_factor).to(dtype).to(tl.float32)
    rotated = d < ROTARY
    c = tl.load(cos + row * ANGLES + d % ANGLES, mask=rotated, other=1.0).to(tl.float32)
    s = tl.load(sin + row * ANGLES + d % ANGLES, mask=rotated, other=0.0).to(tl.float32)
    other = tl.where(d < HALF, -other, other)
    total = (value * c).to(dtype).to(tl.float32) + (other * s).to(dtype).to(tl.float32)
    tl.store(out + d, tl.where(rotated, total, value).to(dtype), mask=inside)


def norm_and_rotate(
    query: Tensor,
    key: Tensor,
    norms: tuple[tuple[Tensor, float], tuple[Tensor, float]] | None,
    cos: Tensor,
    sin: Tensor,
    head_size: int,
    rotary: int,
) -> tuple[Tensor, Tensor]:
    """`[T, heads * d]` and `[T, kv_heads * d]`, contiguous along their columns -> `[T, heads, d]`, `[T, kv_heads, d]`.
    `norms`: weight and epsilon of the queries' and of the keys'. The first `rotary` numbers of a head are rotated; cos
    and sin are contiguous `[T, rotary]`, or `[T, rotary / 2]` if both halves have the same angles."""
    rows, heads, kv_heads = query.shape[0], query.shape[1] // head_size, key.shape[1] // head_size
    out_query = torch.empty(rows, heads, head_size, dtype=query.dtype, device=query.device)
    out_key = torch.empty(rows, kv_heads, head_size, dtype=key.dtype, device=key.device)
    (query_weight, query_epsilon), (key_weight, key_epsilon) = norms or ((query, 0.0), (key, 0.0))
    kernel: Any = _norm_and_rotate[(rows, heads + kv_heads)]
    kernel(
        query,
        key,
        query_weight,
        key_weight,
        cos,
        sin,
        out_query,
        out_key,
        heads,
        kv_heads,
        query.stride(0),
        key.stride(0),
        query_epsilon,
        key_epsilon,
        D=head_size,
        ROTARY=rotary,
        ANGLES=cos.shape[1],
        NORM=norms is not None,
        WIDE=triton.next_power_of_2(head_size),
        num_warps=1,
    )
    return out_query, out_key
