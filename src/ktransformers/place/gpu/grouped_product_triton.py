"""Grouped products of `place/gpu/grouped_mlp.py` in Triton, for GPUs on which torch's are not one kernel: bf16 rows
sorted by group times one matrix per group (forward and the gradient of the rows), and the outer products of rows (the
gradient of LoRA factors). `ends` int32 `[G]` is read on the device, where the rows of each group end: no
synchronisation, so a CUDA graph can hold them. Sums are float32.

The grid does not depend on the routing. R rows of G groups have at most R / BLOCK_M + G tiles of rows; a program finds
the group of its tile by a sum over the groups, and programs behind the last tile end at once. Rows behind `ends[-1]`
are not written.

Sizes of tiles and the number of pipeline stages are a function of the shape and of the shared memory of the device
(`configuration`): 99 KiB a program on cards of capability 8.6, 8.9 and 12.0, 163 on 8.0, 227 on 9.0 and 10.0.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_TILE = 16  # of a product on tensor cores
SHARED_BYTES = 99 << 10  # of a program, on the smallest of the supported devices
LARGE_SHARED_BYTES = 160 << 10  # from here on tiles are larger


@triton.jit
def _find_tile(ends, tile, groups, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The group of a tile of rows, its first row and the end of its group; `group >= groups`: there is no such tile."""
    g = tl.arange(0, GROUPS)
    end = tl.load(ends + g, mask=g < groups, other=0)
    start = tl.load(ends + g - 1, mask=(g > 0) & (g < groups), other=0)
    tiles = tl.where(g < groups, tl.cdiv(end - start, BLOCK_M), 0)
    tiles_end = tl.cumsum(tiles, axis=0)
    group = tl.sum((tiles_end <= tile).to(tl.int32), axis=0)
    mine = g == group
    first = tl.sum(tl.where(mine, start + (tile - tiles_end + tiles) * BLOCK_M, 0), axis=0)
    return group, first, tl.sum(tl.where(mine, end, 0), axis=0)


@triton.jit
def _product(
    rows,  # bf16 [R, K]
    matrices,  # bf16 [G, K, N], of any strides
    ends,  # int32 [G]
    out,  # bf16 [R, N]
    groups,
    count,  # R
    columns,  # N
    inner,  # K
    row_stride,
    group_stride,
    k_stride,
    n_stride,
    GROUPS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tile, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    group, first, end = _find_tile(ends, tile, groups, GROUPS, BLOCK_M)
    if group < groups:
        m = first + tl.arange(0, BLOCK_M)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        # Rows of the next group are read at the end of a group and not written; the last row is read for those behind
        # it.
        x = rows + tl.minimum(m, count - 1).to(tl.int64)[:, None] * row_stride + k[None, :]
        w = matrices + group.to(tl.int64) * group_stride + k.to(tl.int64)[:, None] * k_stride
        w += n.to(tl.int64)[None, :] * n_stride
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, inner, BLOCK_K):
            if EVEN_K:
                a = tl.load(x)
                b = tl.load(w) if EVEN_N else tl.load(w, mask=(n < columns)[None, :], other=0.0)
            else:
                inside = start + k < inner
                a = tl.load(x, mask=inside[None, :], other=0.0)
                mask = inside[:, None] if EVEN_N else inside[:, None] & (n < columns)[None, :]
                b = tl.load(w, mask=mask, other=0.0)
            total = tl.dot(a, b, total)
            x += BLOCK_K
            w += BLOCK_K * k_stride
        target = out + m.to(tl.int64)[:, None] * columns + n[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=(m < end)[:, None] & (n < columns)[None, :])


@triton.jit
def _outer(
    left,  # bf16 [R, M]
    right,  # bf16 [R, N]
    ends,  # int32 [G]
    out,  # bf16 [G, M, N]
    left_columns,  # M
    right_columns,  # N
    left_stride,
    right_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    group = tl.program_id(2)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(start, end, BLOCK_K):
        row = first + tl.arange(0, BLOCK_K)
        at = row.to(tl.int64)[:, None]
        inside = (row < end)[:, None]
        a = tl.load(left + at * left_stride + m[None, :], mask=inside & (m < left_columns)[None, :], other=0.0)
        b = tl.load(right + at * right_stride + n[None, :], mask=inside & (n < right_columns)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total)
    target = out + (group.to(tl.int64) * left_columns + m[:, None]) * right_columns + n[None, :]
    mask = (m < left_columns)[:, None] & (n < right_columns)[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class GroupedTile:
    """Sizes of a program's tile and of its pipeline."""

    rows: int
    columns: int
    inner: int
    stages: int
    warps: int

    @property
    def shared_bytes(self) -> int:
        """Of the two bf16 operands in every stage; a compiled program has no more."""
        return 2 * self.stages * self.inner * (self.rows + self.columns)


def configuration(rows: int, groups: int, columns: int, inner: int, shared_bytes: int) -> GroupedTile:
    """The tile for R rows in G groups, N columns and K numbers of a row, on a device with so much shared memory."""
    per_group = -(-rows // max(1, groups))
    if shared_bytes >= LARGE_SHARED_BYTES:
        row_tile = _between(MIN_TILE if per_group <= MIN_TILE else 64, per_group, 128)
        column_tile, inner_tile, stages = (256, 64, 4 if per_group <= 256 else 3) if row_tile == 128 else (128, 64, 4)
    else:
        row_tile = _between(MIN_TILE, per_group, 128)
        column_tile, inner_tile, stages = 128, 32, 4
    if 2 * stages * inner_tile * (row_tile + column_tile) > shared_bytes:
        stages -= 1
    column_tile = _between(MIN_TILE, columns, column_tile)
    warps = 8 if row_tile * column_tile > 128 * 128 else 4
    return GroupedTile(row_tile, column_tile, _between(MIN_TILE, inner, inner_tile), stages, warps)


def outer_configuration(left: int, right: int) -> GroupedTile:
    """The tile for outer products `[M, N]`, of which one side is a LoRA rank; `inner` counts rows."""
    left_tile, right_tile = _between(MIN_TILE, left, 128), _between(MIN_TILE, right, 128)
    return GroupedTile(left_tile, right_tile, 32, 3, 4)


def _between(low: int, value: int, high: int) -> int:
    """The power of two at or above `value`, within bounds."""
    return int(max(low, min(high, triton.next_power_of_2(value))))


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may use."""
    if device.type != "cuda":
        return SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """rows of group g times matrices[g]: `[R, K]`, `[G, K, N]` -> `[R, N]`; rows are contiguous along K."""
    (count, inner), (groups, _, columns) = rows.shape, matrices.shape
    out = torch.empty(count, columns, dtype=rows.dtype, device=rows.device)
    if not out.numel():
        return out
    tile = configuration(count, groups, columns, inner, _shared_bytes(rows.device))
    max_tiles = min(count, count // tile.rows + groups)
    launch: Any = _product[(max_tiles * -(-columns // tile.columns),)]
    launch(
        rows,
        matrices,
        ends,
        out,
        groups,
        count,
        columns,
        inner,
        rows.stride(0),
        *matrices.stride(),
        **product_constants(tile, groups, columns, inner),
        num_stages=tile.stages,
        num_warps=tile.warps,
    )
    return out


def product_constants(tile: GroupedTile, groups: int, columns: int, inner: int) -> dict[str, Any]:
    """The constexpr values of `_product`."""
    return {
        "GROUPS": triton.next_power_of_2(groups),
        "EVEN_N": columns % tile.columns == 0,
        "EVEN_K": inner % tile.inner == 0,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.inner,
    }


def outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """left of group g, transposed, times right of group g: `[R, M]`, `[R, N]` -> `[G, M, N]`; zeros for a group without
    rows. Both are contiguous along their columns."""
    groups, (left_columns, right_columns) = ends.shape[0], (left.shape[1], right.shape[1])
    out = torch.empty(groups, left_columns, right_columns, dtype=left.dtype, device=left.device)
    if not out.numel():
        return out
    tile = outer_configuration(left_columns, right_columns)
    launch: Any = _outer[(-(-right_columns // tile.columns), -(-left_columns // tile.rows), groups)]
    launch(
        left,
        right,
        ends,
        out,
        left_columns,
        right_columns,
        left.stride(0),
        right.stride(0),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.inner,
        num_stages=tile.stages,
        num_warps=tile.warps,
    )
    return out
