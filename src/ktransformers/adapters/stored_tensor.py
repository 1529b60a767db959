"""One tensor of an adapter file: its name, shape and dtype from the header, and a function that reads its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Of LoRA factors, as safetensors spells them.
LORA_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]  # refuses NaN and infinite numbers
