"""Copies through a C function given by address: one of libc's here, so that no driver is needed."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from ktransformers import _core
from ktransformers.place.gpu.copy_plan import plan_copies, runs
from ktransformers.place.gpu.expert_cache import with_addresses

COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def test_copied_rows_arrive_at_their_offsets() -> None:
    source = torch.randint(256, (9, 48), dtype=torch.uint8)
    target = torch.zeros(12, 48, dtype=torch.uint8)
    calls = []

    def copy(to: int, origin: int, count: int, stream: int) -> int:
        calls.append((count, stream))
        ctypes.memmove(to, origin, count)
        return 0

    function = COPY(copy)
    filled = [(0, 4), (1, 5), (2, 6), (5, 9), (8, 1)]  # expert, slot
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    rows = with_addresses([(target.view(-1), source.view(-1), plan_copies(runs(filled, 2), 0, 48, 48))])
    assert _core.copy_rows(address, rows, 77) == 0
    assert calls == [(96, 77), (48, 77), (48, 77), (48, 77)]
    for expert, slot in filled:
        assert torch.equal(target[slot], source[expert])
    assert not target[[0, 2, 3, 7, 8, 10, 11]].any()


def test_first_copy_error_stops_and_is_returned() -> None:
    seen = []
    function = COPY(lambda to, *_: seen.append(to) or (700 if to == 2 else 0))
    rows = np.array([(1, 0, 8), (2, 0, 8), (3, 0, 8)], np.uint64)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    assert _core.copy_rows(address, rows, 0) == 700
    assert seen == [1, 2]
