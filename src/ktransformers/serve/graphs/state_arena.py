"""Convolution and recurrent states of sequences that decode in CUDA graphs, at fixed addresses.

A captured step reads and writes states in an arena: one tensor `[rows, ...]` for each state of a layer, in which a
sequence has a row. The row's number is in the table of the step; the graph gathers the rows of its batch, calls the
stock module with `[R, 1, H]` and scatters the new states. Row 0 belongs to no sequence: padding rows use it.

The states of a slot with a row are views of the arena and are written in place by steps outside of graphs as well
(`ArenaStates`). A slot whose states were replaced, because it was released or truncated, has lost its row; the next
sequence that needs one gets it.

Capturing a step computes it several times, and every time advances the states: `preserved` restores them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.cache.recurrent_states import StatefulForward
from ktransformers.serve.cache.snapshots import States, copy_states

PADDING_ROW = 0


class ArenaStates(States):
    """Views of a row of the arena."""

    def put(self, layer: int, name: str, state: Tensor) -> None:
        self[layer][name].copy_(state)


class StateArena:
    """States of at most `rows` sequences. The first of them decides shapes, dtypes and device."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.tensors: dict[tuple[int, str], Tensor] = {}  # [1 + rows, ...]
        self._views: list[ArenaStates] = []  # by row
        self._slots: list[weakref.ref[KVSlot] | None] = [None] * (1 + rows)

    def place(self, slots: Sequence[KVSlot]) -> list[int]:
        """The row of each slot, into which its states are copied unless they are there."""
        if not self.tensors:
            self._allocate(slots[0].states)
        held = {id(slot): row for row in range(1, 1 + self._rows) if (slot := self._holder(row)) is not None}
        kept = {held[id(slot)] for slot in slots if id(slot) in held}
        free = [row for row in range(1, 1 + self._rows) if row not in kept]
        free.sort(key=lambda row: self._holder(row) is None)  # rows without a sequence last: they are popped first
        return [held[id(slot)] if id(slot) in held else self._move_in(slot, free.pop()) for slot in slots]

    def _allocate(self, states: States) -> None:
        for layer, kept in states.items():
            for name, state in kept.items():
                self.tensors[layer, name] = state.new_zeros(1 + self._rows, *state.shape)
        for row in range(1 + self._rows):
            views = ArenaStates()
            for (layer, name), tensor in self.tensors.items():
                views.setdefault(layer, {})[name] = tensor[row]
            self._views.append(views)

    def _holder(self, row: int) -> KVSlot | None:
        """The slot whose states are in a row; None: the slot is gone, or its states were replaced."""
        reference = self._slots[row]
        slot = None if reference is None else reference()
        return slot if slot is not None and slot.states is self._views[row] else None

    def _move_in(self, slot: KVSlot, row: int) -> int:
        holder = self._holder(row)
        if holder is not None:
            holder.states = copy_states(holder.states)
        for layer, kept in slot.states.items():
            for name, state in kept.items():
                self._views[row].put(layer, name, state)
        slot.states, self._slots[row] = self._views[row], weakref.ref(slot)
        return row

    @contextmanager
    def preserved(self, rows: Sequence[int]) -> Iterator[None]:
        """Whatever is computed meanwhile, these rows are then as before."""
        before = {row: copy_states(self._views[row]) for row in rows}
        try:
            yield
        finally:
            for device in {tensor.device for tensor in self.tensors.values() if tensor.is_cuda}:
                torch.cuda.synchronize(device)  # a step is rehearsed on another stream
            for row, states in before.items():
                for layer, kept in states.items():
                    for name, state in kept.items():
                        self._views[row].put(layer, name, state)


@dataclass(frozen=True)
class ArenaRows:
    """The states of a captured step: row i of the batch has row `rows[i]` of the arena."""

    arena: StateArena
    rows: Tensor  # int64 [R], on the device
    started: bool = True

    def load(self, layer: int, name: str) -> Tensor:
        return self.arena.tensors[layer, name].index_select(0, self.rows)

    def save(self, layer: int, name: str, state: Tensor) -> None:
        self.arena.tensors[layer, name].index_copy_(0, self.rows, state)

    def compute(self, module: StatefulForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result `[1, R, ...]` of a module. Adapters of rows are those of the batch, whose order is the same."""
        turned = {name: self._turn(value) for name, value in kwargs.items()}
        return self._turn_back(module.call(self, self._turn(args), turned))

    def _turn(self, value: Any) -> Any:
        """Tensors of tokens as `[R, 1, ...]`."""
        if isinstance(value, tuple):
            return tuple(self._turn(member) for member in value)
        by_rows = isinstance(value, Tensor) and value.shape[:2] == (1, len(self.rows))
        return value.transpose(0, 1) if by_rows else value

    def _turn_back(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._turn_back(member) for member in value)
        by_rows = isinstance(value, Tensor) and value.shape[:2] == (len(self.rows), 1)
        return value.reshape(1, len(self.rows), *value.shape[2:]) if by_rows else value
