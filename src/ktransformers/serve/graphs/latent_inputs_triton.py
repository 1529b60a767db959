"""What lies between the projections of latent attention and attention itself, in one Triton kernel
(`latent_inputs.py`).

A program rotates the queries of some heads of one row into their place behind the absorbed query; the last program of a
row normalises its latent and rotates its key. Products are rounded as the stock modules round them: one by one where
these compute in the model's dtype (ROUNDED), once where they compute in float32.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 16  # of a program


@triton.jit
def _rotated(x, y, cos, sin, dtype: tl.constexpr, ROUNDED: tl.constexpr):
    """Of pairs (x, y), in float32 and not rounded yet."""
    xc, ys, yc, xs = x * cos, y * sin, y * cos, x * sin
    if ROUNDED:
        xc, ys = xc.to(dtype).to(tl.float32), ys.to(dtype).to(tl.float32)
        yc, xs = yc.to(dtype).to(tl.float32), xs.to(dtype).to(tl.float32)
    return xc - ys, yc + xs


@triton.jit
def _latent_inputs(
    query,  # [R, heads, NOPE + ROPE]
    latent,  # [R, RANK + ROPE]
    weight,  # [RANK]
    cos,  # [R, ROPE // 2] in the strides below
    sin,
    absorbed,  # [heads, R, RANK + ROPE], its beginning is not written
    key,  # [R, RANK + ROPE]
    rows,
    heads,
    epsilon,
    query_row,
    latent_row,
    angle_row,
    angle_column,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    PAIRED: tl.constexpr,  # numbers of a pair are neighbours; otherwise half of ROPE apart
    PAIRED_OUT: tl.constexpr,
    ROUNDED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDE: tl.constexpr,
    HALF: tl.constexpr,  # of ROPE, padded
):
    row, tile = tl.program_id(0), tl.program_id(1)
    dtype = key.dtype.element_ty
    e = tl.arange(0, HALF)
    inside = e < ROPE // 2
    c = tl.load(cos + row * angle_row + e * angle_column, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + row * angle_row + e * angle_column, mask=inside, other=0.0).to(tl.float32)
    first = 2 * e if PAIRED else e
    second = 2 * e + 1 if PAIRED else e + ROPE // 2
    first_out = 2 * e if PAIRED_OUT else e
    second_out = 2 * e + 1 if PAIRED_OUT else e + ROPE // 2
    if tile < tl.num_programs(1) - 1:
        h = tile * HEADS + tl.arange(0, HEADS)
        mask = (h < heads)[:, None] & inside[None, :]
        of_query = query + row * query_row + h[:, None] * (NOPE + ROPE) + NOPE
        query_x = tl.load(of_query + first[None, :], mask=mask, other=0.0).to(tl.float32)
        query_y = tl.load(of_query + second[None, :], mask=mask, other=0.0).to(tl.float32)
        query_a, query_b = _rotated(query_x, query_y, c[None, :], s[None, :], dtype, ROUNDED)
        to_absorbed = absorbed + (h[:, None] * rows + row) * (RANK + ROPE) + RANK
        tl.store(to_absorbed + first_out[None, :], query_a.to(dtype), mask=mask)
        tl.store(to_absorbed + second_out[None, :], query_b.to(dtype), mask=mask)
    else:
        n = tl.arange(0, WIDE)
        values = tl.load(latent + row * latent_row + n, mask=n < RANK, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, axis=0) / RANK + epsilon)
        rounded = (values * scale).to(dtype).to(tl.float32)
        factors = tl.load(weight + n, mask=n < RANK, other=0.0).to(tl.float32)
        tl.store(key + row * (RANK + ROPE) + n, (rounded * factors).to(dtype), mask=n < RANK)
        source = latent + row * latent_row + RANK
        x = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
        a, b = _rotated(x, y, c, s, dtype, ROUNDED)
        target = key + row * (RANK + ROPE) + RANK
        tl.store(target + first_out, a.to(dtype), mask=inside)
        tl.store(target + second_out, b.to(dtype), mask=inside)


def write_inputs(
    query: Tensor,
    latent: Tensor,
    weight: Tensor,
    epsilon: float,
    cos: Tensor,
    sin: Tensor,
    style: tuple[bool, bool, bool],
    absorbed: Tensor,
    key: Tensor,
) -> None:
    """`latent_inputs.write_inputs` on a GPU."""
    (rows, heads, size), rank = query.shape, weight.shape[0]
    rope = latent.shape[1] - rank
    kernel: Any = _latent_inputs[(rows, triton.cdiv(heads, HEADS) + 1)]
    paired, paired_out, rounded = style
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        kernel(
            query,
            latent,
            weight,
            cos,
            sin,
            absorbed,
            key,
            rows,
            heads,
            epsilon,
            query.stride(0),
            latent.stride(0),
            *cos.stride(),
            NOPE=size - rope,
            ROPE=rope,
            RANK=rank,
            PAIRED=paired,
            PAIRED_OUT=paired_out,
            ROUNDED=rounded,
            HEADS=HEADS,
            WIDE=triton.next_power_of_2(rank),
            HALF=triton.next_power_of_2(max(1, rope // 2)),
        )
