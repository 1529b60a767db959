"""A file as a memory-mapped tensor: pages are read on first access, and all processes share one copy.

The mapping is shared and read-only. `pages` says when pages are read: `lazy` on first access, `prefault` all of them
now, `lock` all of them now and never swapped out. Tensors keep the mapping alive. A file that is truncated while it is
mapped is reported by the call that reads it, and a stray write, which does not reach the file, by the next call
(csrc/mapped_file.h).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.ground.errors import InputError
from ktransformers.ground.system import memory

PAGE_MODES = ("lazy", "prefault", "lock")
POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14


def check_pages(pages: str) -> None:
    if pages not in PAGE_MODES:
        raise InputError("pages", repr(pages), f"one of {', '.join(PAGE_MODES)}")


def map_file(file: Path, pages: str = "lazy") -> Tensor:
    """All bytes of the file, uint8 [size]."""
    check_pages(pages)
    tensor = read_only_tensor(_core.map_file(os.fspath(file)))
    load_pages(file, tensor, pages)
    return tensor


def load_pages(file: Path, tensor: Tensor, pages: str) -> None:
    """What `pages` says of a mapped file, on the calling thread: pages that are not in memory come to its NUMA node."""
    if pages != "lazy":
        _populate(tensor)
    if pages == "lock":
        _lock(file, tensor)


def read_only_tensor(array: Any) -> Tensor:
    """A read-only numpy array as a tensor, without torch's warning that it has no such thing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _populate(tensor: Tensor) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    libc.madvise(address, size, mmap.MADV_WILLNEED)
    if libc.madvise(address, size, POPULATE_READ) != 0:  # an older kernel: touch every page
        tensor[:: mmap.PAGESIZE].sum()


def _lock(file: Path, tensor: Tensor) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)) != 0:
        reason = os.strerror(ctypes.get_errno())
        given = f"{tensor.nbytes} bytes that could not be locked ({reason}); {memory().available} are available"
        expected = "enough memory, and a limit `ulimit -l` above it"
        raise InputError(str(file), given, expected, "raise the limit, or use pages=prefault")
