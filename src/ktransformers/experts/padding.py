"""Padding rows of a batch with a fixed size: they are routed to no expert.

A decoding step that runs as a CUDA graph has a fixed number of rows, of which some are padding. Routers choose experts
for padding too, so its ids `[T, k]` become -1 where the experts are called, and every kernel skips -1. The mask is a
tensor rather than a count, because a captured graph then serves any number of real rows up to its size.

The ContextVar `_real_rows` carries that mask, bool `[T]` on the device of the hidden states and in their order, and -1
on that device, from the code that runs the model past the stock model to the experts. It holds for the calling thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_real_rows: ContextVar[tuple[Tensor, Tensor] | None] = ContextVar("real_rows", default=None)


@contextmanager
def use_padding_mask(real_rows: Tensor) -> Iterator[None]:
    """While the model is called: rows with `real_rows[t]` False are padding."""
    nowhere = torch.full((), -1, device=real_rows.device)  # `where` would make a tensor of a number in every layer
    token = _real_rows.set((real_rows, nowhere))
    try:
        yield
    finally:
        _real_rows.reset(token)


def mask_padding(ids: Tensor) -> Tensor:
    """Expert ids `[T, k]` with -1 in padding rows; unchanged outside of `use_padding_mask`."""
    padding = _real_rows.get()
    return ids if padding is None else torch.where(padding[0][:, None], ids, padding[1])
