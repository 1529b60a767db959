"""Reads a GGUF file that holds a LoRA adapter: its metadata and its tensors, data memory-mapped.

The header is read by `checkpoint/sources/gguf_header.py`, which needs no package; the optional `gguf` package is for
writing. Shapes are in numpy's order, the reverse of the order in the file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters.stored_tensor import StoredTensor
from ktransformers.checkpoint.finite import all_finite
from ktransformers.checkpoint.mapped import map_file
from ktransformers.checkpoint.sources.gguf import FLOATS
from ktransformers.checkpoint.sources.gguf_header import GGUFTensor, read_header
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import short


def is_gguf(file: Path) -> bool:
    """Decided by the magic bytes, not by the file name."""
    with file.open("rb") as stream:
        return stream.read(4) == b"GGUF"


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """(metadata, tensors) of a GGUF file; the data stays memory-mapped."""
    header = read_header(file)
    kind = header.fields.get("general.type")
    if kind != "adapter" or header.fields.get("adapter.type") != "lora":
        raise InputError(str(file), f"general.type {short(kind)}", "a LoRA adapter, not a model")
    if not header.tensors:
        raise InputError(str(file), "no tensors in it", "a LoRA adapter")
    data = map_file(file)
    tensors: dict[str, StoredTensor] = {}
    for tensor in header.tensors:
        if tensor.kind not in FLOATS:
            raise InputError(f"{file}: {tensor.name}", f"type {tensor.kind}", "F32, F16, BF16 or F64")
        if tensor.name in tensors:
            raise InputError(f"{file}: {tensor.name}", "two tensors of this name", "one")
        dtype = FLOATS[tensor.kind]
        tensors[tensor.name] = StoredTensor(
            tensor.name, file.name, tensor.shape, dtype, _reader(file, data, tensor, dtype)
        )
    return header.fields, tensors


def _reader(file: Path, data: Tensor, tensor: GGUFTensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    def read_tensor() -> Tensor:
        stored = data[tensor.offset : tensor.offset + tensor.bytes]
        numbers = stored.clone().view(dtype).reshape(tensor.shape)  # a copy: the mapped file is read-only
        if not all_finite(numbers):
            raise InputError(f"{file}: {tensor.name}", "NaN or infinite numbers", "finite ones", "the file is damaged")
        return numbers

    return read_tensor
