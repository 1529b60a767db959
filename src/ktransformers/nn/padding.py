"""Rows of a batch that nobody asked for: a step of fixed size computes them beside the others, and no expert is to be
read for their sake.

`with padded(asked):` holds for the calling thread while the model is called; `asked` is bool `[T]` on the device of the
hidden states, in their order. Routers choose for padding too, so its ids `[T, k]` become -1 at the door of the experts,
which everybody behind it leaves out. The surprising decision: a tensor says it, not a count, so that a CUDA graph that
holds the step serves any number of rows up to its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_asked: ContextVar[Tensor | None] = ContextVar("asked", default=None)


@contextmanager
def padded(asked: Tensor) -> Iterator[None]:
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


def without_padding(ids: Tensor) -> Tensor:
    """The ids of the experts, -1 in rows that nobody asked for; as they are outside of `padded`."""
    asked = _asked.get()
    return ids if asked is None else ids.masked_fill(~asked[:, None], -1)
