"""Recognises exceptions that mean that memory ran out, on a GPU or on the host, and says in one clause what was asked
for and what was free. torch, the CUDA libraries and the C++ runtime report it as different exceptions, some of them
plain RuntimeErrors that only their text tells apart.
"""

from __future__ import annotations

import re

import torch

from ktransformers import system

GPU, HOST = "gpu", "host"
_ASKED = re.compile(r"tried to allocate ([0-9.]+) ?(bytes|[KMG]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_GPU_TEXTS = ("cuda out of memory", "cuda error: out of memory", "cublas_status_alloc_failed")
_HOST_TEXTS = ("can't allocate memory", "cannot allocate memory", "not enough memory", "std::bad_alloc")


def exhausted_memory(error: BaseException) -> str | None:
    """GPU or HOST if the error means that this memory ran out, else None."""
    if isinstance(error, torch.OutOfMemoryError):
        return GPU
    if isinstance(error, MemoryError):
        return HOST
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    if any(part in text for part in _GPU_TEXTS):
        return GPU
    return HOST if any(part in text for part in _HOST_TEXTS) else None


def asked_bytes(error: BaseException) -> int | None:
    match = _ASKED.search(str(error))
    return None if match is None else int(float(match[1]) * _UNITS[match[2].lower()])


def describe_shortage(error: BaseException, memory: str) -> str:
    """`X asked for, Y free of Z` of the memory that ran out."""
    size = asked_bytes(error)
    asked = "an allocation" if size is None else format_bytes(size)
    if memory == GPU and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return f"{asked} asked for, {format_bytes(free)} free of {format_bytes(total)} on the GPU"
    host = system.memory()
    return f"{asked} asked for, {format_bytes(host.available)} free of {format_bytes(host.total)} of host memory"


def format_bytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
