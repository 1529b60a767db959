"""RMS norm of rows in one Triton kernel, with the roundings of the stock modules: x / rms(x) in float32, rounded to x's
dtype, times the weight.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_PER_WARP = 1024
MAX_WARPS = 8


@triton.jit
def _rms_norm(x, weight, out, columns, epsilon, WIDE: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    inside = c < columns
    values = tl.load(x + row * columns + c, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / columns + epsilon)
    rounded = (values * scale).to(x.dtype.element_ty).to(tl.float32)
    factors = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + c, (rounded * factors).to(out.dtype.element_ty), mask=inside)


def rms_norm(rows: Tensor, weight: Tensor, out: Tensor, epsilon: float) -> None:
    """`[T, n]`, contiguous -> `out`, the same."""
    wide = triton.next_power_of_2(rows.shape[1])
    warps = max(1, min(MAX_WARPS, wide // ELEMENTS_PER_WARP))
    kernel: Any = _rms_norm[(rows.shape[0],)]
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        kernel(rows, weight, out, rows.shape[1], epsilon, WIDE=wide, num_warps=warps)
