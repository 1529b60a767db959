"""A Triton kernel that does nothing: the time of a launch, beside which small layers are measured (gpu_linear.py)."""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _store_nothing(flag):
    tl.store(flag, 0.0, mask=tl.program_id(0) < 0)


def launch(flag: Tensor, programs: int) -> None:
    kernel: Any = _store_nothing[(programs,)]
    kernel(flag)
