"""One captured decode step of R rows, and a launch of it whose result the host has not read yet.

The table of a step (`step_table.py`) is written to one of two pinned buffers, because a second step may be launched
while the first one's copy to the device is still queued. A launch leaves the most likely token of each row in pinned
memory; `wait` reads them. A step that was launched ahead knows its tokens by the rows of the step before it, and once
that step is finished by their numbers: `rows_of` compares it with the batch that the engine builds then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.graphs.adapter_set import AdapterSet
from ktransformers.serve.graphs.step_table import FIRST_ADDRESS
from ktransformers.serve.scheduler.forward import Chunk
from ktransformers.serve.scheduler.lora import LoadedAdapter

Compute = Callable[[], Tensor]  # the logits [R, V] of what the table says


@dataclass(frozen=True)
class StepRow:
    """What one row of a step computes. The addresses in its table are those of a slot with this capacity."""

    slot: KVSlot
    token: int  # of a step ahead: the row of the step before that computes the token
    position: int
    adapter: LoadedAdapter | None
    capacity: int
    states: int = 0  # row of the state arena

    def computes(self, chunk: Chunk) -> bool:
        """Whether the chunk is this row, apart from its token."""
        same = self.slot is chunk.slot and self.position == chunk.position and self.adapter is chunk.adapter
        return same and self.capacity == chunk.slot.capacity and chunk.logits_reader is None


@dataclass(frozen=True)
class DecodeStep:
    """A graph knows its tensors by their addresses alone: they live as long as it does."""

    tables: Tensor  # int64 [2, lines, R], pinned: of a step and of the one ahead of it
    device_table: Tensor  # int64 [lines, R]
    adapter_set: AdapterSet
    uses_host: bool  # the CPU computes experts in host callbacks
    replay: Compute  # queues the kernels; the device has the table and the tokens

    @property
    def size(self) -> int:
        """R."""
        return self.device_table.shape[1]

    def copy_table(self, which: int, rows: Sequence[StepRow]) -> None:
        """Write the pinned table `which` and queue its copy to the device."""
        table = self.tables[which].numpy()
        table[:] = 0
        for column, row in enumerate(rows):
            adapter = 0 if row.adapter is None else self.adapter_set.indices[row.adapter]
            table[:FIRST_ADDRESS, column] = row.token, row.position, row.capacity, 1, adapter, row.states
            table[FIRST_ADDRESS:, column] = row.slot.addresses()
        self.device_table.copy_(self.tables[which], non_blocking=True)


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose kernels are queued."""

    step: DecodeStep
    rows: Sequence[StepRow]
    logits: Tensor  # [R, V], valid until the next launch
    argmax: Tensor  # int64 [R], pinned: the most likely tokens, once the step is finished
    finished: torch.cuda.Event | None  # None: the device is a CPU
    inputs: Sequence[int] = ()  # the token of each row of a step ahead, known once the step before is finished

    def wait(self) -> list[int]:
        """The most likely token of each row."""
        if self.finished is not None:
            self.finished.synchronize()
        tokens: list[int] = self.argmax.tolist()
        return tokens

    def rows_of(self, chunks: Sequence[Chunk]) -> list[int] | None:
        """The rows of this step ahead that compute `chunks`; None: it does not compute all of them."""
        row_of = {id(row.slot): index for index, row in enumerate(self.rows)}
        found: list[int] = []
        for chunk in chunks:
            index = row_of.get(id(chunk.slot))
            if index is None or not self.rows[index].computes(chunk) or list(chunk.tokens) != [self.inputs[index]]:
                return None
            found.append(index)
        return found
