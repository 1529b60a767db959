"""One captured step, and a launch of it whose result the host has not read yet.

What differs from launch to launch is one run of int64 numbers (`StepInputs`), written into one of two pinned buffers,
because a second step may be launched while the first one's copy to the device is still queued, and copied to the device
before the graph. A launch leaves the most likely token of each sequence in pinned memory; `wait` reads them. A step
that was launched ahead knows its tokens by the rows of the step before it, and once that step is finished by their
numbers: `rows_of` compares it with the batch that the engine builds then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ktransformers.serve.attention.step import COUNT, FIRST_BLOCK, FIRST_ROW, POSITION, DeviceStep, Span, tiles_of
from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.graphs.adapter_set import AdapterSet
from ktransformers.serve.scheduler.forward import Chunk
from ktransformers.serve.scheduler.lora import LoadedAdapter

# Lines of `StepInputs.rows`. ADAPTER: the index of the row's adapter (`adapter_set.py`; 0: the base); STATES: the row
# of its states (`state_arena.py`; 0: none).
TOKEN, ROW_POSITION, ACTIVE, ADAPTER, STATES = range(5)
ROW_LINES = 5

Compute = Callable[[], Tensor]  # the logits [S, V] of what the inputs say


@dataclass(frozen=True)
class StepRow:
    """One row of a step of new tokens."""

    slot: KVSlot
    token: int  # of a step ahead: the row of the step before that computes the token
    position: int
    adapter: LoadedAdapter | None
    states: int = 0  # row of the state arena

    def computes(self, chunk: Chunk) -> bool:
        """Whether the chunk is this row, apart from its token."""
        same = self.slot is chunk.slot and self.position == chunk.position and self.adapter is chunk.adapter
        return same and chunk.logits_reader is None


@dataclass(frozen=True)
class StepInputs:
    """What a step of R rows and S sequences reads: views of one run of int64 numbers."""

    words: Tensor
    rows: Tensor  # [ROW_LINES, R]
    tiles: Tensor  # [2, N], as those of `DeviceStep`
    kept: Tensor  # [S]: the rows whose logits are wanted
    table: Tensor  # [FIRST_BLOCK + blocks, S], as that of `DeviceStep`

    @classmethod
    def allocate(cls, rows: int, columns: int, tiles: int, blocks: int, **options: Any) -> StepInputs:
        sizes = (ROW_LINES * rows, 2 * tiles, columns, (FIRST_BLOCK + blocks) * columns)
        words = torch.zeros(sum(sizes), dtype=torch.int64, **options)
        of_rows, of_tiles, kept, table = words.split(sizes)  # type: ignore[no-untyped-call]
        return cls(words, of_rows.view(ROW_LINES, rows), of_tiles.view(2, tiles), kept, table.view(-1, columns))

    def copy_from(self, other: StepInputs, blocks: int) -> None:
        """Queue a copy of everything up to that many blocks of each sequence."""
        used = self.words.numel() - self.table[FIRST_BLOCK + blocks :].numel()
        self.words[:used].copy_(other.words[:used], non_blocking=True)


@dataclass(frozen=True)
class CapturedStep:
    """A graph knows its tensors by their addresses alone: they live as long as it does."""

    pinned: tuple[StepInputs, StepInputs]  # of a step and of the one ahead of it
    inputs: StepInputs  # on the device
    adapter_set: AdapterSet
    uses_host: bool  # the CPU computes experts in host callbacks
    replay: Compute  # queues the kernels; the device has the inputs and the tokens
    # The slot and the number of blocks that each column of the pinned tables has.
    written: tuple[list[tuple[int, int]], list[tuple[int, int]]] = field(default_factory=lambda: ([], []))

    @property
    def size(self) -> int:
        """R."""
        return self.inputs.rows.shape[1]

    @property
    def columns(self) -> int:
        """S."""
        return self.inputs.kept.shape[0]

    @property
    def decodes(self) -> bool:
        """Every row is a new token of a sequence of its own."""
        return not self.inputs.tiles.shape[1]

    def attention(self) -> DeviceStep:
        return DeviceStep(self.inputs.table, None if self.decodes else self.inputs.tiles)

    def load(self, which: int, rows: Sequence[StepRow]) -> None:
        """Write new tokens into the pinned inputs `which`, and queue the copy to the device."""
        pinned, count = self.pinned[which], len(rows)
        lines = pinned.rows.numpy()
        adapters = [0 if row.adapter is None else self.adapter_set.indices[row.adapter] for row in rows]
        lines[:, count:] = 0
        lines[TOKEN, :count] = [row.token for row in rows]
        lines[ROW_POSITION, :count] = [row.position for row in rows]
        lines[ACTIVE, :count] = 1
        lines[ADAPTER, :count] = adapters
        lines[STATES, :count] = [row.states for row in rows]
        table = pinned.table.numpy()
        table[POSITION], table[COUNT] = lines[ROW_POSITION], lines[ACTIVE]
        table[FIRST_ROW] = range(self.columns)
        self._write_blocks(which, [row.slot for row in rows])

    def load_chunks(self, which: int, chunks: Sequence[Chunk]) -> None:
        """Write chunks of any length, and queue the copy to the device."""
        pinned, spans = self.pinned[which], list[Span]()
        lines, table, tiles = (tensor.numpy() for tensor in (pinned.rows, pinned.table, pinned.tiles))
        first = 0
        for chunk in chunks:
            last = first + len(chunk.tokens)
            spans.append(Span(chunk.slot, first, last, chunk.position, chunk.adapter))
            lines[TOKEN, first:last] = chunk.tokens
            lines[ROW_POSITION, first:last] = range(chunk.position, chunk.position + last - first)
            lines[ADAPTER, first:last] = 0 if chunk.adapter is None else self.adapter_set.indices[chunk.adapter]
            first = last
        lines[ACTIVE], lines[ACTIVE, :first] = 0, 1
        lines[TOKEN, first:], lines[ADAPTER, first:] = 0, 0
        used = len(spans)
        table[COUNT], table[FIRST_ROW], table[POSITION] = 0, -1, 0
        table[POSITION, :used] = [span.position for span in spans]
        table[COUNT, :used] = [span.rows for span in spans]
        table[FIRST_ROW, :used] = [span.first for span in spans]
        found = tiles_of(spans)
        tiles[:] = -1
        tiles[:, : found.shape[1]] = found
        pinned.kept.numpy()[:used] = [span.last - 1 for span in spans]
        self._write_blocks(which, [span.slot for span in spans])

    def _write_blocks(self, which: int, slots: Sequence[KVSlot]) -> None:
        """Only of columns whose blocks have changed."""
        pinned, written = self.pinned[which], self.written[which]
        table = pinned.table.numpy()
        held = [(slot.number, len(slot.blocks)) for slot in slots]
        for column, (slot, one) in enumerate(zip(slots, held, strict=True)):
            if column >= len(written) or written[column] != one:
                table[FIRST_BLOCK : FIRST_BLOCK + len(slot.blocks), column] = slot.table
        written[: len(held)] = held
        self.inputs.copy_from(pinned, max(len(slot.blocks) for slot in slots))


@dataclass(frozen=True)
class LaunchedStep:
    """A step of new tokens whose kernels are queued."""

    step: CapturedStep
    rows: Sequence[StepRow]
    logits: Tensor  # [S, V], valid until the next launch
    argmax: Tensor  # int64 [S], pinned: the most likely tokens, once the step is finished
    finished: torch.cuda.Event | None  # None: the device is a CPU
    inputs: Sequence[int] = ()  # the token of each row of a step ahead, known once the step before is finished

    def wait(self) -> list[int]:
        """The most likely token of each sequence."""
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
