"""What lies in a directory or file that is said to be an adapter: its tensors by name, whoever wrote them.

Only headers are read here. A directory may hold other safetensors (the whole model, an optimiser's state); a file
counts when it has LoRA tensors in it. GGUF files are known by their magic, not by their name.
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
from ktransformers.errors import InputError

LORA_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SAFETENSORS_DTYPES = {dtype: name for name, dtype in LORA_DTYPES.items()}
# Beyond these a checkpoint may hold tensors that are copied and never computed with.
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
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Content:
    path: Path
    tensors: Mapping[str, StoredTensor]
    fields: Mapping[str, Any] | None = None  # the key-value part of a GGUF file, None for safetensors
    release: Callable[[], None] = lambda: None

    @property
    def directory(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def files(self) -> list[str]:
        return sorted({stored.file for stored in self.tensors.values()})


def open_content(path: str | Path) -> Content:
    path = Path(path)
    if not path.exists():
        raise InputError(str(path), "no such file or directory", "an adapter")
    candidates = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    ggufs = [file for file in candidates if _magic(file) == b"GGUF"]
    files = [file for file in candidates if file.suffix == ".safetensors"]
    loras = {file: shards for file in files if _has_lora(shards := Shards([file]))}
    if (ggufs and loras) or len(ggufs) > 1:
        names = ", ".join(file.name for file in [*ggufs, *loras])
        raise InputError(str(path), f"several adapters, {names}", "one", "name the file or move the others away")
    if ggufs:
        return _open_gguf(path, ggufs[0])
    if not loras:
        raise InputError(str(path), "no LoRA tensors", "a .safetensors or GGUF file with lora_A and lora_B in it")
    tensors: dict[str, StoredTensor] = {}
    for file, shards in loras.items():
        for name in shards.names:
            if name in tensors:
                raise InputError(name, f"it in {tensors[name].file} and in {file.name}", "it in one file")
            tensors[name] = _stored_tensor(shards, name, file.name)

    def release() -> None:
        for shards in loras.values():
            shards.release()

    return Content(path, tensors, None, release)


def _stored_tensor(shards: Shards, name: str, file: str) -> StoredTensor:
    spelled = shards.dtype(name)
    if spelled not in LORA_DTYPES:
        raise InputError(name, f"dtype {spelled}", "one of " + ", ".join(LORA_DTYPES))
    return StoredTensor(name, file, shards.shape(name), LORA_DTYPES[spelled], lambda: shards.read(name))


def _has_lora(shards: Shards) -> bool:
    return any(parse_factor(name) or KT_KERNEL_KEY.fullmatch(name) for name in shards.names)


def _magic(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(4)


def _open_gguf(path: Path, file: Path) -> Content:
    from ktransformers.adapters.dialects.gguf import read_gguf

    fields, tensors = read_gguf(file)
    return Content(path, tensors, fields)
