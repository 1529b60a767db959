"""A file as a memory-mapped tensor: pages are read on first access, and all processes share one copy.

The mapping is shared and read-only, so a stray write faults instead of changing the model. `pages` says when pages are
read: `lazy` on first access, `prefault` all of them now, `lock` all of them now and never swapped out. Tensors keep the
mapping alive.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
from pathlib import Path

import torch
from torch import Tensor

from ktransformers.errors import InputError
from ktransformers.system import memory

PAGE_MODES = ("lazy", "prefault", "lock")
POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14


def check_pages(pages: str) -> None:
    if pages not in PAGE_MODES:
        raise InputError("pages", repr(pages), f"one of {', '.join(PAGE_MODES)}")


def map_file(file: Path, pages: str = "lazy") -> Tensor:
    """All bytes of the file, uint8 [size]."""
    check_pages(pages)
    with file.open("rb") as stream:
        mapping = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    if pages != "lazy":
        _populate(mapping)
    if pages == "lock":
        _lock(file, tensor)
    return tensor


def _populate(mapping: mmap.mmap) -> None:
    mapping.madvise(mmap.MADV_WILLNEED)
    try:
        mapping.madvise(POPULATE_READ)
    except OSError:  # an older kernel: touch every page
        for offset in range(0, len(mapping), mmap.PAGESIZE):
            mapping[offset]


def _lock(file: Path, tensor: Tensor) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)) != 0:
        reason = os.strerror(ctypes.get_errno())
        given = f"{tensor.nbytes} bytes that could not be locked ({reason}); {memory().available} are available"
        expected = "enough memory, and a limit `ulimit -l` above it"
        raise InputError(str(file), given, expected, "raise the limit, or use pages=prefault")
