"""Reads a GGUF file that holds a LoRA adapter: its metadata and its tensors, data memory-mapped.

The `gguf` package is optional; a missing one is reported with the command that installs it. Shapes are in numpy's
order, the reverse of the order in the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters.stored_tensor import StoredTensor
from ktransformers.errors import InputError


def is_gguf(file: Path) -> bool:
    """Decided by the magic bytes, not by the file name."""
    with file.open("rb") as stream:
        return stream.read(4) == b"GGUF"


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """(metadata, tensors) of a GGUF file; the data stays memory-mapped."""
    gguf = import_gguf()
    try:
        reader = gguf.GGUFReader(str(file))
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise InputError(str(file), f"a file that does not open ({error})", "GGUF", "download it again") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    if metadata.get("general.type") != "adapter" or metadata.get("adapter.type") != "lora":
        raise InputError(str(file), f"general.type {metadata.get('general.type')!r}", "a LoRA adapter, not a model")
    quant_types = gguf.GGMLQuantizationType
    dtypes = {
        quant_types.F32: torch.float32,
        quant_types.F16: torch.float16,
        quant_types.BF16: torch.bfloat16,
        quant_types.F64: torch.float64,
    }
    tensors = {}
    for tensor in reader.tensors:
        if tensor.tensor_type not in dtypes:
            raise InputError(tensor.name, f"type {tensor.tensor_type.name}", "F32, F16, BF16 or F64")
        shape, dtype = tuple(int(n) for n in tensor.shape[::-1]), dtypes[tensor.tensor_type]
        tensors[tensor.name] = StoredTensor(tensor.name, file.name, shape, dtype, _reader(tensor.data, shape, dtype))
    return metadata, tensors


def _reader(data: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    def read_tensor() -> Tensor:
        array = data.copy().reshape(-1).view("uint8")  # torch needs writable memory
        return torch.from_numpy(array).view(dtype).reshape(shape)

    return read_tensor


def import_gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise InputError(
            "gguf", "a package that is not installed", "the gguf package", "pip install 'ktransformers[gguf]'"
        ) from None
    return gguf
