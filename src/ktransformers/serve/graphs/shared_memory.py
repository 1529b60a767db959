"""Shared memory of a block of a GPU, by which kernels choose their tiles."""

from __future__ import annotations

import functools
from typing import Any

import torch

ASSUMED_BYTES = 190 << 10  # of the interpreter


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes."""
    if device.type != "cuda":
        return ASSUMED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    size: int = properties.shared_memory_per_block_optin
    return size
