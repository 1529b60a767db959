"""One step of the server as attention sees it: which rows of the batch belong to which sequence, and where the blocks
of that sequence lie. What kernels read of it is made once and shared by all layers.

A GPU reads two tables. One has a column for each sequence, int64 `[FIRST_BLOCK + blocks, S]`: the lines below, then the
numbers of its blocks. The other has the prompt's rows in tiles, int32 `[2, N]`: the column of a tile and its first row
within the sequence's rows of this step; column -1 is padding. A captured step has tables at fixed addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktransformers import _core
from ktransformers.serve.cache.kv_cache import BlockMemory, KVSlot
from ktransformers.serve.scheduler.lora import LoadedAdapter

# Lines of the table. POSITION: of the sequence's first row in this step; COUNT: its rows, 0 for padding; FIRST_ROW: the
# first of them in the batch.
POSITION, COUNT, FIRST_ROW, FIRST_BLOCK = range(4)
TILE_ROWS = 128


@dataclass(frozen=True)
class Span:
    """Rows first .. last - 1 of the batch are consecutive tokens of the sequence in `slot`."""

    slot: KVSlot
    first: int
    last: int
    position: int  # of row `first` in its sequence
    adapter: LoadedAdapter | None = None

    @property
    def rows(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class DeviceStep:
    """The tables of a step on a GPU. `decodes`: sequences of one row may be among them; `tiles` None: there are no
    others."""

    table: Tensor
    tiles: Tensor | None
    decodes: bool = True

    @classmethod
    def of_spans(cls, spans: Sequence[Span], device: torch.device) -> DeviceStep:
        table = np.zeros((FIRST_BLOCK + max(len(span.slot.blocks) for span in spans), len(spans)), np.int64)
        for column, span in enumerate(spans):
            fill_column(table, column, span)
        tiles = tiles_of(spans)
        on_device = torch.from_numpy(table).to(device, non_blocking=True)
        decodes = any(span.rows == 1 for span in spans)
        return cls(on_device, torch.from_numpy(tiles).to(device, non_blocking=True) if tiles.size else None, decodes)


def fill_column(table: NDArray[np.int64], column: int, span: Span) -> None:
    blocks = span.slot.table
    table[:FIRST_BLOCK, column] = span.position, span.rows, span.first
    table[FIRST_BLOCK : FIRST_BLOCK + len(blocks), column] = blocks


def tiles_of(spans: Sequence[Span]) -> NDArray[np.int32]:
    """Of sequences with several rows. Those with the most keys come first: they take the longest."""
    tiles = [
        (span.position + first, column, first)
        for column, span in enumerate(spans)
        if span.rows > 1
        for first in range(0, span.rows, TILE_ROWS)
    ]
    tiles.sort(reverse=True)
    return np.array([tile[1:] for tile in tiles], np.int32).reshape(-1, 2).T.copy()


class BatchStep:
    """The spans of one batch, and what the kernels of every layer read of them."""

    def __init__(self, spans: Sequence[Span]) -> None:
        if len({id(span.slot.memory) for span in spans}) > 1:
            raise ValueError("sequences of one step with blocks of several memories")
        self.spans = spans
        self._on_device: dict[torch.device, DeviceStep] = {}

    @functools.cached_property
    def decoding(self) -> list[Span]:
        """Those of one row."""
        return [span for span in self.spans if span.rows == 1]

    @property
    def memory(self) -> BlockMemory:
        return self.spans[0].slot.memory

    @functools.cached_property
    def alone(self) -> BatchStep:
        """The spans of one row, which follow each other in a batch of their own."""
        return BatchStep([replace(span, first=row, last=row + 1) for row, span in enumerate(self.decoding)])

    @functools.cached_property
    def sequences(self) -> _core.StepSequences:
        """The spans of one row as the native core reads them."""
        rows = np.array([span.first for span in self.decoding], np.int32)
        positions = np.array([span.position for span in self.decoding], np.int32)
        table = np.zeros((len(rows), max(len(span.slot.blocks) for span in self.decoding)), np.int32)
        for line, span in zip(table, self.decoding, strict=True):
            line[: len(span.slot.blocks)] = span.slot.table
        return _core.StepSequences(rows, positions, table)

    def on_device(self, device: torch.device) -> DeviceStep:
        if device not in self._on_device:
            self._on_device[device] = DeviceStep.of_spans(self.spans, device)
        return self._on_device[device]


_step: ContextVar[BatchStep | None] = ContextVar("kt_step", default=None)


@contextmanager
def use_step(step: BatchStep) -> Iterator[None]:
    """While the model is called, its rows are those of this step, which covers the batch."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def current_step() -> BatchStep | None:
    """For modules that are called before their attention function: indexers, and decoder layers of the core."""
    return _step.get()
