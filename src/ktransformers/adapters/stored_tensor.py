"""One tensor of an adapter file: its name, shape and dtype from the header, and a function that reads its numbers.

`LORA_DTYPES` are the dtypes of LoRA factors by their name in a safetensors header; `SAFETENSORS_DTYPES` is the inverse
and adds the dtypes of checkpoint tensors that a merge copies without computing with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LORA_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SAFETENSORS_DTYPES = {dtype: name for name, dtype in LORA_DTYPES.items()}
SAFETENSORS_DTYPES |= {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint8: "U8",
    torch.int8: "I8",
}
SAFETENSORS_DTYPES |= {torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL"}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]  # refuses NaN and infinite numbers
