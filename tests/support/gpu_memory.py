"""Real shortages of GPU memory: torch may take a little more than it holds, so that only large work fails."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

_SHORTAGE = re.compile(r"([0-9.]+) ([MG])iB asked for, ([0-9.]+) ([MG])iB free of ([0-9.]+) ([MG])iB on the GPU")
_UNITS = {"M": 2**20, "G": 2**30}


def read_shortage(line: str) -> tuple[float, float, float]:
    """Bytes asked for, free, and in all, as an error says them."""
    match = _SHORTAGE.search(line)
    assert match is not None, line
    numbers = [float(match[at]) * _UNITS[match[at + 1]] for at in (1, 3, 5)]
    return numbers[0], numbers[1], numbers[2]


def check_shortage(line: str, limit: int) -> None:
    """The line says what torch was allowed to take, and that less was free than was asked for."""
    asked, free, total = read_shortage(line)
    assert "\n" not in line and total == pytest.approx(limit, rel=0.01), line
    assert free < total and asked > 0, line


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@contextmanager
def limited_gpu_memory(spare: int) -> Iterator[int]:
    """Lets torch take `spare` bytes beyond those of live tensors; yields the limit."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    limit = torch.cuda.memory_reserved() + spare
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        yield limit
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
