"""Opens a directory or file that holds an adapter: its tensors by name, in any format.

Only headers are read. A directory may hold other safetensors (the base model, optimizer state), so a file counts only
if it has LoRA tensors. GGUF files are recognised by their magic bytes, not by their name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters.names import KT_KERNEL_KEY, parse_factor
from ktransformers.checkpoint import Shards
from ktransformers.checkpoint.finite import all_finite
from ktransformers.checkpoint.mapped import map_file
from ktransformers.checkpoint.matrix import DTYPES
from ktransformers.checkpoint.sources.gguf import FLOATS
from ktransformers.checkpoint.sources.gguf_header import GGUFTensor, read_header
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import path_exists, short, shorten

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


@dataclass(frozen=True)
class Content:
    path: Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, Any] | None = None  # key-value pairs of a GGUF file, None for safetensors
    release: Callable[[], None] = lambda: None

    @property
    def directory(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def files(self) -> list[str]:
        return sorted({stored.file for stored in self.tensors.values()})


def open_content(path: str | Path) -> Content:
    path = Path(path)
    if not path_exists(path):
        raise InputError(shorten(path), "no such file or directory", "an adapter")
    try:
        candidates = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
        ggufs = [file for file in candidates if is_gguf(file)]
    except OSError as error:
        raise InputError(str(path), f"what does not open ({error.strerror or error})", "an adapter") from None
    files = [file for file in candidates if file.suffix == ".safetensors"]
    loras = {file: shards for file in files if _has_lora(shards := Shards([file]))}
    if (ggufs and loras) or len(ggufs) > 1:
        names = ", ".join(file.name for file in [*ggufs, *loras])
        raise InputError(str(path), f"several adapters, {names}", "one", "name the file or move the others away")
    if ggufs:
        metadata, gguf_tensors = read_gguf(ggufs[0])
        return Content(path, gguf_tensors, metadata)
    if not loras:
        raise InputError(str(path), "no LoRA tensors", "a .safetensors or GGUF file with lora_A and lora_B in it")
    tensors: dict[str, StoredTensor] = {}
    for file, shards in loras.items():
        for name in shards.names:
            if name in tensors:
                raise InputError(name, f"stored in {tensors[name].file} and in {file.name}", "stored in one file")
            tensors[name] = _stored_tensor(shards, name, file.name)

    def release() -> None:
        for shards in loras.values():
            shards.release()

    return Content(path, tensors, None, release)


def _stored_tensor(shards: Shards, name: str, file: str) -> StoredTensor:
    dtype_name = shards.dtype(name)
    if dtype_name not in LORA_DTYPES:
        raise InputError(name, f"dtype {dtype_name}", "one of " + ", ".join(LORA_DTYPES))
    return StoredTensor(name, file, shards.shape(name), DTYPES[dtype_name], lambda: shards.read_finite(name))


def _has_lora(shards: Shards) -> bool:
    return any(parse_factor(name) or KT_KERNEL_KEY.fullmatch(name) for name in shards.names)


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
