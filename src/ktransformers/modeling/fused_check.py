"""Whether a fused kernel computes what a stock module computes, on random numbers of the model's dtype: the modules
that get a new `forward` are recognised by that, not by their class."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_ERROR = {torch.float32: 1e-5}  # relative, by the norm of the whole tensor
MAX_ERROR_16_BIT = 1e-2


def matches(fused: Tensor, stock: object) -> bool:
    """Whether both have the same shape and dtype, and the same numbers but for roundings."""
    if not isinstance(stock, Tensor) or fused.shape != stock.shape or fused.dtype != stock.dtype:
        return False
    limit = MAX_ERROR.get(stock.dtype, MAX_ERROR_16_BIT)
    return bool((fused.float() - stock.float()).norm() <= limit * stock.float().norm())
