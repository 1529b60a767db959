"""Memory of this process: resident, and allocated by malloc. Fragmentation of the heap grows only the first."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import ClassVar


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Heap(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in "abcdefg"] + [("used", ctypes.c_size_t)]
    _fields_ += [(name, ctypes.c_size_t) for name in ("free", "kept")]


def allocated() -> int:
    """Bytes that malloc has allocated; 0 without glibc."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0
    ask.restype = _Heap
    return int(ask().used)
