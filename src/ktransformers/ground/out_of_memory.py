"""Recognises exceptions that mean that memory ran out, on a GPU or on the host, and says in one clause what was asked
for and what was free. torch, the CUDA libraries and the C++ runtime report it as different exceptions, some of them
plain RuntimeErrors that only their text tells apart. What is free is what torch may still allocate.
"""

from __future__ import annotations

import re

import torch

from ktransformers.ground import system

GPU, HOST = "gpu", "host"
_ASKED = re.compile(r"tried to allocate ([0-9.]+) ?(bytes|[KMG]iB)", re.IGNORECASE)
_DEVICE = re.compile(r"\bGPU (\d+) has a total capacity")
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


def _device_of(error: BaseException) -> int:
    """The GPU that the message names, else the current one."""
    match = _DEVICE.search(str(error))
    return torch.cuda.current_device() if match is None else int(match[1])


def allowed_bytes(device: torch.device | int) -> int:
    """Memory of a GPU, within torch's per-process memory fraction."""
    return int(torch.cuda.mem_get_info(device)[1] * torch.cuda.get_per_process_memory_fraction(device))


def free_bytes(device: torch.device | int) -> int:
    """Bytes that torch can still allocate, its own cache included, within its per-process memory fraction."""
    allocated = torch.cuda.memory_allocated(device)
    usable = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated
    return max(0, min(usable, allowed_bytes(device) - allocated))


def describe_shortage(error: BaseException, memory: str) -> str:
    """`X asked for, Y free of Z` of the memory that ran out."""
    size = asked_bytes(error)
    asked = "an allocation" if size is None else format_bytes(size)
    if memory == GPU and torch.cuda.is_available():
        device = _device_of(error)
        free, total = free_bytes(device), allowed_bytes(device)
        return f"{asked} asked for, {format_bytes(free)} free of {format_bytes(total)} on the GPU"
    host = system.memory()
    return f"{asked} asked for, {format_bytes(host.available)} free of {format_bytes(host.total)} of host memory"


def format_bytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
