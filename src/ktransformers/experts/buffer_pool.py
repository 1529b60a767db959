"""Host tensors from a buffer pool of the native core.

A training step allocates the same large tensors as the step before: saved activations, gradients. The C library returns
blocks of such sizes to the system, and every new allocation page-faults and zeroes them again, which takes longer than
writing them. The pool of the core reuses freed blocks and never holds more bytes than were in use at one time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ktransformers import _core

MIN_POOLED_BYTES = 1 << 20  # smaller tensors come from torch's allocator


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Like `torch.empty` on the CPU."""
    size = math.prod(shape) * dtype.itemsize
    if size < MIN_POOLED_BYTES:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(_core.pooled_array(size)).view(dtype).view(tuple(shape))


def empty_output_like(hidden: Tensor) -> Tensor:
    """A contiguous tensor for the experts' output; pinned if `hidden` is, because the output is then copied to the GPU
    that `hidden` came from."""
    if torch.cuda.is_initialized() and hidden.is_pinned():  # type: ignore[no-untyped-call]
        return torch.empty(hidden.shape, dtype=hidden.dtype, device="cpu", pin_memory=True)
    return empty(hidden.shape, hidden.dtype)
