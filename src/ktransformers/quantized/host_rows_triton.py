"""Rows of a matrix in pinned host memory, read by a kernel over the bus: a program takes BLOCK words of one row."""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _gather(table, numbers, out, columns, BLOCK: tl.constexpr):
    place, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(numbers + place).to(tl.int64)
    words = tl.load(table + row * columns + at, mask=at < columns, other=0)
    tl.store(out + place * columns + at, words, mask=at < columns)


def gather(table: Tensor, numbers: Tensor, out: Tensor) -> None:
    """`table` `[N, K]`, pinned; `numbers` int64 `[n]` and `out` `[n, K]`, of the table's dtype, on a GPU."""
    if not numbers.shape[0]:
        return
    size = table.shape[1] * table.element_size()
    word = torch.int32 if size % 4 == 0 else torch.int16
    columns = size // (4 if size % 4 == 0 else 2)
    launch: Any = _gather[(numbers.shape[0], -(-columns // BLOCK))]
    launch(table.view(word), numbers, out.view(word), columns, BLOCK=BLOCK)
