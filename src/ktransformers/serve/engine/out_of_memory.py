"""Which exceptions mean that memory ran out, on a GPU or on the host, and the one line that says so: what was asked,
what was free, and what to change.
"""

from __future__ import annotations

import re

import torch

from ktransformers import system

_REQUESTED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMG]iB)", re.IGNORECASE)
_HOST_MESSAGES = ("can't allocate memory", "cannot allocate memory", "not enough memory")
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        any(message in text for message in _HOST_MESSAGES) or ("cuda" in text and "out of memory" in text)
    )


def describe(error: BaseException, tokens: int, advice: str) -> str:
    """One line. `tokens`: that the ended request had in the failed step."""
    match = _REQUESTED.search(str(error))
    asked = "an allocation" if match is None else _size(float(match[1]) * _UNITS[match[2].lower()])
    on_gpu = "cuda" in str(error).lower() or isinstance(error, torch.OutOfMemoryError)
    free = f"{_size(system.memory().available)} of host memory"
    if on_gpu and torch.cuda.is_available():
        free = f"{_size(torch.cuda.mem_get_info()[0])} of the GPU and {free}"
    line = f"out of memory: {asked} was asked for in a step with {tokens} tokens of this request, free were {free}"
    return f"{line}; in this order: {advice}" if advice else line


def release_unused() -> None:
    """Return cached blocks of torch to the GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
