"""Host tensors whose memory is used again.

A training step makes the same large tensors as the step before: activations kept for backward, gradients. The C library
gives such sizes back to the system, and the system clears them page by page when they come again, which takes longer
than writing them. These come from a store of the core that never holds more than was in use at one time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ktransformers import _core

LEAST = 1 << 20  # bytes; smaller ones are the C library's business


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Like `torch.empty` on the CPU."""
    bytes = math.prod(shape) * dtype.itemsize
    if bytes < LEAST:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(_core.pooled_array(bytes)).view(dtype).view(tuple(shape))


def result_like(hidden: Tensor) -> Tensor:
    """Contiguous; pinned where hidden is, because then it is on its way to the same device."""
    if torch.cuda.is_initialized() and hidden.is_pinned():  # type: ignore[no-untyped-call]
        return torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
    return empty(hidden.shape, hidden.dtype)
