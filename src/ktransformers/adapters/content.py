"""Opens a directory or file that holds an adapter: its tensors by name, in any format.

Only headers are read. A directory may hold other safetensors (the base model, optimizer state), so a file counts only
if it has LoRA tensors. GGUF files are recognised by their magic bytes, not by their name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformers.adapters.gguf_file import is_gguf, read_gguf
from ktransformers.adapters.names import KT_KERNEL_KEY, parse_factor
from ktransformers.adapters.stored_tensor import LORA_DTYPES, StoredTensor
from ktransformers.checkpoint import Shards
from ktransformers.checkpoint.matrix import DTYPES
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import path_exists, shorten


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
