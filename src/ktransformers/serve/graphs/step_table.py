"""The table of a captured decode step: int64 `[FIRST_ADDRESS + 2 L, R]`, one column per row of the batch.

Its lines are token, position, capacity of the slot, whether the row is active, index of its adapter (`adapter_set.py`;
0: the base), row of its states (`state_arena.py`; 0: none), then the addresses of its keys and of its values in every
layer.
"""

from __future__ import annotations

from dataclasses import dataclass

TOKEN, POSITION, CAPACITY, ACTIVE, ADAPTER, STATES, FIRST_ADDRESS = range(7)


@dataclass(frozen=True)
class CacheLines:
    """The lines that hold the addresses of a layer's keys and values."""

    keys: int
    values: int


def table_lines(layers: int) -> int:
    return FIRST_ADDRESS + 2 * layers
