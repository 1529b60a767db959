"""Triton kernels of `place/gpu/epilogue.py`: one program per row, or per piece of one; arithmetic in float32."""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COLUMNS = 1024  # of one program


@triton.jit
def _load_sum(rows, addend, at, valid, ADDEND: tl.constexpr):
    """float32: rows at these offsets, plus the addend."""
    value = tl.load(rows + at, mask=valid, other=0.0).to(tl.float32)
    if ADDEND:
        value += tl.load(addend + at, mask=valid, other=0.0).to(tl.float32)
    return value


@triton.jit
def _activate(gate_up, addend, out, columns, ADDEND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < columns
    gate = _load_sum(gate_up, addend, row * 2 * columns + column, valid, ADDEND)
    up = _load_sum(gate_up, addend, row * 2 * columns + columns + column, valid, ADDEND)
    tl.store(out + row * columns + column, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16), mask=valid)


@triton.jit
def _activate_backward(
    gate_up,
    addend,
    grad,
    lora_grad,
    weight,
    out,
    grad_gate_up,
    grad_weight,
    columns,
    ADDEND: tl.constexpr,
    LORA_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(weight + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        valid = column < columns
        gate = _load_sum(gate_up, addend, row * 2 * columns + column, valid, ADDEND)
        up = _load_sum(gate_up, addend, row * 2 * columns + columns + column, valid, ADDEND)
        grad_h = _load_sum(grad, lora_grad, row * columns + column, valid, LORA_GRAD)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        h = silu * up
        total += grad_h * h
        weighted = grad_h * scale
        slope = sigmoid + silu * (1.0 - sigmoid)
        tl.store(out + row * columns + column, h.to(tl.bfloat16), mask=valid)
        tl.store(grad_gate_up + row * 2 * columns + column, (weighted * up * slope).to(tl.bfloat16), mask=valid)
        tl.store(grad_gate_up + row * 2 * columns + columns + column, (weighted * silu).to(tl.bfloat16), mask=valid)
    tl.store(grad_weight + row, tl.sum(total, axis=0))


@triton.jit
def _scatter(
    rows,
    addend,
    token,
    weight,
    out,
    valid_rows,
    columns,
    ADDEND: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_VALID_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < columns
    if HAS_VALID_ROWS:
        valid = valid & (row < tl.load(valid_rows))
    value = _load_sum(rows, addend, row * columns + column, valid, ADDEND)
    if WEIGHT:
        value *= tl.load(weight + row)
    target = tl.load(token + row).to(tl.int64)
    tl.atomic_add(out + target * columns + column, value, mask=valid, sem="relaxed")


@triton.jit
def _dropout(rows, seeds, out, columns, limit, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < columns
    mask32 = 0xFFFFFFFF
    x = (column.to(tl.int64) * 0x9E3779B9) & mask32
    x = x ^ tl.load(seeds + row)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask32
    x = x ^ (x >> 16)
    value = tl.load(rows + row * columns + column, mask=valid, other=0.0).to(tl.float32) * scale
    tl.store(out + row * columns + column, tl.where(x < limit, 0.0, value).to(tl.bfloat16), mask=valid)


@triton.jit
def _zero_copy(source, out, count, ADD: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = offset < count
    value = tl.load(source + offset, mask=valid, other=0)
    if ADD:
        value = tl.load(out + offset, mask=valid, other=0.0).to(tl.float32) + value.to(tl.float32)
    tl.store(out + offset, value.to(out.dtype.element_ty), mask=valid)


def _block(columns: int) -> int:
    return min(MAX_COLUMNS, 1 << (columns - 1).bit_length())


def _grid(rows: int, columns: int) -> tuple[int, int]:
    return rows, -(-columns // _block(columns))


def activate(gate_up: Tensor, addend: Tensor | None) -> Tensor:
    count, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(count, columns)
    if count:
        launch: Any = _activate[_grid(count, columns)]
        launch(
            gate_up,
            gate_up if addend is None else addend,
            out,
            columns,
            ADDEND=addend is not None,
            BLOCK=_block(columns),
        )
    return out


def activate_backward(
    gate_up: Tensor, addend: Tensor | None, grad: Tensor, lora_grad: Tensor | None, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    count, columns = grad.shape
    out, grad_gate_up = torch.empty_like(grad), torch.empty_like(gate_up)
    grad_weight = torch.empty_like(weight)
    if count:
        launch: Any = _activate_backward[(count,)]
        launch(
            gate_up,
            gate_up if addend is None else addend,
            grad,
            grad if lora_grad is None else lora_grad,
            weight,
            out,
            grad_gate_up,
            grad_weight,
            columns,
            ADDEND=addend is not None,
            LORA_GRAD=lora_grad is not None,
            BLOCK=_block(columns),
        )
    return out, grad_gate_up, grad_weight


def scatter(
    rows: Tensor, addend: Tensor | None, token: Tensor, weight: Tensor | None, out: Tensor, valid_rows: Tensor | None
) -> None:
    count, columns = rows.shape
    if count:
        launch: Any = _scatter[_grid(count, columns)]
        launch(
            rows,
            rows if addend is None else addend,
            token,
            out if weight is None else weight,
            out,
            token if valid_rows is None else valid_rows,
            columns,
            ADDEND=addend is not None,
            WEIGHT=weight is not None,
            HAS_VALID_ROWS=valid_rows is not None,
            BLOCK=_block(columns),
        )


def dropout(rows: Tensor, seeds: Tensor, limit: int, scale: float) -> Tensor:
    """`seeds` int64 [R] of 32 bits; elements whose hash is below `limit` are zeroed, the others scaled."""
    count, columns = rows.shape
    out = torch.empty_like(rows)
    if count:
        launch: Any = _dropout[_grid(count, columns)]
        launch(rows, seeds, out, columns, limit, scale, BLOCK=_block(columns))
    return out


def zero_copy(source: Tensor, out: Tensor, add: bool) -> None:
    """Copy or add `source` in pinned host memory to `out`: the GPU reads host memory while the kernel runs."""
    if source.numel():
        block = 4096
        launch: Any = _zero_copy[(-(-source.numel() // block),)]
        launch(source, out, source.numel(), ADD=add, BLOCK=block, num_warps=8)
