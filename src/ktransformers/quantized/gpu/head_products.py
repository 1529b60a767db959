"""Products of x `[heads, T, .]`, head by head, with some rows of each head in one packed weight `[N, K]`.

That is how latent attention uses `kv_b_proj` when it absorbs it (`serve/attention/latent.py`). Up to DIRECT_ROWS rows
of bf16, or half as many along rows, are multiplied with the words of the weight, in one kernel for all heads
(`head_products_triton.py`), which reads packed bytes only. Everything else dequantizes the rows of the heads,
for this product alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.ground.current_device import on_device
from ktransformers.ground.errors import KTError
from ktransformers.ground.packages import import_triton_module
from ktransformers.quantized.gpu.linear import BLOCK_ROWS, TOLERANCE, GpuLinearWeight

TRITON = "ktransformers.quantized.gpu.head_products_triton"
DIRECT_ROWS = 64
DIRECT_ROWS_ALONG_ROWS = 32  # that take no longer than dequantizing: programs have 16 of them
CHECKED_ROWS = (1, DIRECT_ROWS_ALONG_ROWS, DIRECT_ROWS)  # each has another tile


@dataclass(frozen=True)
class HeadRows:
    """Rows first .. first + count - 1 of every `step` rows of a weight: those of one head after the other."""

    first: int
    count: int
    step: int

    @property
    def in_blocks(self) -> bool:
        """Whether the CPU's blocks of rows can be dequantized without those of other parts."""
        return not any(size % BLOCK_ROWS for size in (self.first, self.count, self.step))


def decoded_rows(weight: GpuLinearWeight, rows: HeadRows) -> Tensor:
    """bf16 `[heads, count, K]`."""
    if rows.in_blocks:
        return weight.decoded_groups(rows.first, rows.count, rows.step)
    by_head = weight.decoded(0, weight.matrix.rows).view(-1, rows.step, weight.matrix.columns)
    return by_head[:, rows.first : rows.first + rows.count]


def multiply_heads(
    weight: GpuLinearWeight, x: Tensor, rows: HeadRows, *, along_rows: bool = False, out: Tensor | None = None
) -> Tensor:
    """x `[heads, T, K]` times the rows of its head transposed: `[heads, T, count]`; `along_rows`: x `[heads, T, count]`
    times these rows, `[heads, T, K]`."""
    if out is None:
        out = x.new_empty(*x.shape[:2], weight.matrix.columns if along_rows else rows.count)
    if reads_packed(weight, x, rows, along_rows):
        kernels, layout = import_triton_module(TRITON), weight.layout
        assert kernels is not None and layout is not None
        config = kernels.configuration(x.shape[1], rows.count, along_rows)
        span = rows.first, rows.count, rows.step
        with on_device(weight.packed.device):
            kernels.multiply_heads(x, layout.parts_of(weight.packed), layout, span, out, along_rows, config)
        return out
    numbers = decoded_rows(weight, rows).to(x.dtype)
    return torch.bmm(x, numbers if along_rows else numbers.transpose(1, 2), out=out)


def reads_packed(weight: GpuLinearWeight, x: Tensor, rows: HeadRows, along_rows: bool) -> bool:
    """Whether x is multiplied without dequantizing."""
    most = DIRECT_ROWS_ALONG_ROWS if along_rows else DIRECT_ROWS
    if not weight.reads_packed or x.dtype != torch.bfloat16 or not 0 < x.shape[1] <= most or x.stride(2) != 1:
        return False
    kernels = import_triton_module(TRITON)
    return kernels is not None and (not along_rows or rows.count <= kernels.MAX_COUNT)


def check_heads(weight: GpuLinearWeight, rows: HeadRows) -> None:
    """Compare both products with those of dequantized rows on this device, and raise if they differ."""
    generator = torch.Generator().manual_seed(0)
    numbers = decoded_rows(weight, rows)
    if not numbers.any():
        return
    for along_rows in (False, True):
        size = rows.count if along_rows else weight.matrix.columns
        for count in CHECKED_ROWS:
            x = torch.randn(numbers.shape[0], count, size, generator=generator).bfloat16().to(numbers.device)
            if not reads_packed(weight, x, rows, along_rows):
                continue
            actual = multiply_heads(weight, x, rows, along_rows=along_rows).float()
            expected = torch.bmm(x, numbers if along_rows else numbers.transpose(1, 2)).float()
            difference = float((actual - expected).norm() / expected.norm())
            if not difference < TOLERANCE:
                raise KTError(
                    f"products of heads with the packed {weight.matrix.formats[0].spec} weight `[{weight.matrix.rows}, "
                    f"{weight.matrix.columns}]` on {numbers.device} differ by {difference:.2g} from those of "
                    "dequantized rows; this is a defect of ktransformers or of Triton. --rest bf16 keeps them dense"
                )
