"""The steps of `steps.py` in Triton: a program a row, or a stretch of one; arithmetic in float32."""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 1024  # columns that a program takes


@triton.jit
def _activate(wide, extra, out, columns, EXTRA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    gate = tl.load(wide + row * 2 * columns + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(wide + row * 2 * columns + columns + at, mask=inside, other=0.0).to(tl.float32)
    if EXTRA:
        gate += tl.load(extra + row * 2 * columns + at, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(extra + row * 2 * columns + columns + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + at, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16), mask=inside)


@triton.jit
def _activate_back(
    wide,
    extra,
    grad,
    more,
    weight,
    out,
    grad_wide,
    grad_weight,
    columns,
    EXTRA: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(weight + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        gate = tl.load(wide + row * 2 * columns + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(wide + row * 2 * columns + columns + at, mask=inside, other=0.0).to(tl.float32)
        if EXTRA:
            gate += tl.load(extra + row * 2 * columns + at, mask=inside, other=0.0).to(tl.float32)
            up += tl.load(extra + row * 2 * columns + columns + at, mask=inside, other=0.0).to(tl.float32)
        rising = tl.load(grad + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        if MORE:
            rising += tl.load(more + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        bent = gate * share
        h = bent * up
        total += rising * h
        weighed = rising * scale
        slope = share + bent * (1.0 - share)
        tl.store(out + row * columns + at, h.to(tl.bfloat16), mask=inside)
        tl.store(grad_wide + row * 2 * columns + at, (weighed * up * slope).to(tl.bfloat16), mask=inside)
        tl.store(grad_wide + row * 2 * columns + columns + at, (weighed * bent).to(tl.bfloat16), mask=inside)
    tl.store(grad_weight + row, tl.sum(total, axis=0))


@triton.jit
def _scatter(
    rows,
    extra,
    token,
    weight,
    out,
    live,
    columns,
    EXTRA: tl.constexpr,
    WEIGHT: tl.constexpr,
    LIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    if LIVE:
        inside = inside & (row < tl.load(live))
    value = tl.load(rows + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    if EXTRA:
        value += tl.load(extra + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    if WEIGHT:
        value *= tl.load(weight + row)
    target = tl.load(token + row).to(tl.int64)
    tl.atomic_add(out + target * columns + at, value, mask=inside, sem="relaxed")


@triton.jit
def _thin(rows, seeds, out, columns, limit, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    mask32 = 0xFFFFFFFF
    x = (at.to(tl.int64) * 0x9E3779B9) & mask32
    x = x ^ tl.load(seeds + row)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask32
    x = x ^ (x >> 16)
    value = tl.load(rows + row * columns + at, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + row * columns + at, tl.where(x < limit, 0.0, value).to(tl.bfloat16), mask=inside)


@triton.jit
def _pull(source, out, count, ADD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(source + at, mask=inside, other=0)
    if ADD:
        value = tl.load(out + at, mask=inside, other=0.0).to(tl.float32) + value.to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def _block(columns: int) -> int:
    return min(WIDTH, 1 << (columns - 1).bit_length())


def _grid(rows: int, columns: int) -> tuple[int, int]:
    return rows, -(-columns // _block(columns))


def activate(wide: Tensor, extra: Tensor | None) -> Tensor:
    count, columns = wide.shape[0], wide.shape[1] // 2
    out = wide.new_empty(count, columns)
    if count:
        launch: Any = _activate[_grid(count, columns)]
        launch(wide, wide if extra is None else extra, out, columns, EXTRA=extra is not None, BLOCK=_block(columns))
    return out


def activate_back(
    wide: Tensor, extra: Tensor | None, grad: Tensor, more: Tensor | None, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    count, columns = grad.shape
    out, grad_wide = torch.empty_like(grad), torch.empty_like(wide)
    grad_weight = torch.empty_like(weight)
    if count:
        launch: Any = _activate_back[(count,)]
        launch(
            wide,
            wide if extra is None else extra,
            grad,
            grad if more is None else more,
            weight,
            out,
            grad_wide,
            grad_weight,
            columns,
            EXTRA=extra is not None,
            MORE=more is not None,
            BLOCK=_block(columns),
        )
    return out, grad_wide, grad_weight


def scatter(
    rows: Tensor, extra: Tensor | None, token: Tensor, weight: Tensor | None, out: Tensor, live: Tensor | None
) -> None:
    count, columns = rows.shape
    if count:
        launch: Any = _scatter[_grid(count, columns)]
        launch(
            rows,
            rows if extra is None else extra,
            token,
            out if weight is None else weight,
            out,
            token if live is None else live,
            columns,
            EXTRA=extra is not None,
            WEIGHT=weight is not None,
            LIVE=live is not None,
            BLOCK=_block(columns),
        )


def thin(rows: Tensor, seeds: Tensor, limit: int, scale: float) -> Tensor:
    """`seeds` int64 [R], of 32 bits; what hashes below `limit` is gone."""
    count, columns = rows.shape
    out = torch.empty_like(rows)
    if count:
        launch: Any = _thin[_grid(count, columns)]
        launch(rows, seeds, out, columns, limit, scale, BLOCK=_block(columns))
    return out


def pull(source: Tensor, out: Tensor, add: bool) -> None:
    """`source` in pinned host memory, read by the GPU as the kernel runs."""
    if source.numel():
        block = 4096
        launch: Any = _pull[(-(-source.numel() // block),)]
        launch(source, out, source.numel(), ADD=add, BLOCK=block, num_warps=8)
