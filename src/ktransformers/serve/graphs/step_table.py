"""The table of a captured decode step: int64 `[FIRST_ADDRESS + 2 L, R]`, one column per row of the batch.

Its lines are token, position, capacity of the slot, whether the row is active, index of its adapter (`adapter_set.py`;
0: the base), row of its states (`state_arena.py`; 0: none), then the addresses of its keys and of its values in every
layer, and 2 L more of their scales where they are FP8 (`serve/cache/cache_codes.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

TOKEN, POSITION, CAPACITY, ACTIVE, ADAPTER, STATES, FIRST_ADDRESS = range(7)


@dataclass(frozen=True)
class CacheLines:
    """The lines that hold the addresses of a layer's keys and values, and of their scales where they are FP8."""

    keys: int
    values: int
    key_scales: int | None = None
    value_scales: int | None = None

    @classmethod
    def of_layer(cls, index: int, layers: int, *, fp8: bool = False) -> CacheLines:
        """`index`: among the `layers` that have keys."""
        first = FIRST_ADDRESS + index
        scales = (first + 2 * layers, first + 3 * layers) if fp8 else (None, None)
        return cls(first, first + layers, *scales)

    @property
    def fp8(self) -> bool:
        return self.key_scales is not None


def table_lines(layers: int, *, fp8: bool = False) -> int:
    return FIRST_ADDRESS + (4 if fp8 else 2) * layers
