"""A safetensors file with a layout that is planned before writing: tensors at page boundaries, filled in any order.

safetensors allows no gaps between tensors, and its own writer aligns to eight bytes. A file that kernels compute from
while it is mapped needs page alignment: the header is padded with spaces, which the format allows, and byte tensors
named `...padding` fill the gap to the next page. A file is written as `.NAME.partial` and renamed when it is complete
and synced.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.checkpoint.matrix import DTYPES
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import sync

PAGE_BYTES = 4096
CHUNK_BYTES = 16 << 20
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format


@dataclass(frozen=True)
class TensorSlot:
    """Dtype, shape and offset of a tensor in its file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the beginning of the file

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class FileLayout:
    header: bytes  # with its length in front
    slots: Mapping[str, TensorSlot]

    @property
    def size(self) -> int:
        return len(self.header) + sum(slot.bytes for slot in self.slots.values())


def plan_layout(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str], *, padding: str | None = None
) -> FileLayout:
    """The layout of (name, dtype, shape) in this order; with `padding`, the prefix of names of padding tensors, every
    tensor begins at a page of the file."""
    placed: list[tuple[str, TensorSlot]] = []
    names: set[str] = set()
    end = 0
    for name, dtype, shape in tensors:
        if name in names:
            raise InputError(name, "two tensors of this name", "one")
        names.add(name)
        if padding is not None and end % PAGE_BYTES:
            placed.append((f"{padding}.{len(placed)}", TensorSlot("U8", (PAGE_BYTES - end % PAGE_BYTES,), end)))
            end += PAGE_BYTES - end % PAGE_BYTES
        slot = TensorSlot(dtype, shape, end)
        if end % DTYPES[dtype].itemsize:
            raise ValueError(f"{name} would begin at {end}, which its dtype does not allow: give wide dtypes first")
        placed.append((name, slot))
        end += slot.bytes
    fields: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, slot in placed:
        offsets = [slot.offset, slot.offset + slot.bytes]
        fields[name] = {"dtype": slot.dtype, "shape": list(slot.shape), "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    begin = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES
    header = (begin - 8).to_bytes(8, "little") + text.ljust(begin - 8)
    return FileLayout(header, {name: TensorSlot(slot.dtype, slot.shape, begin + slot.offset) for name, slot in placed})


def read_layout(file: Path) -> FileLayout:
    """The layout in the file's header. A file that is shorter or longer than its header says is refused."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"{size} bytes, too few for its header")
            text = stream.read(length)
        fields = json.loads(text)
        fields.pop("__metadata__", None)
        slots = {
            name: TensorSlot(field["dtype"], tuple(field["shape"]), 8 + length + field["data_offsets"][0])
            for name, field in fields.items()
        }
        layout = FileLayout(start + text, slots)
        if layout.size != size:
            raise ValueError(f"{size} bytes where its header says {layout.size}")
    except FileNotFoundError:
        raise InputError(str(file), "no such file", "a part of the model") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(str(file), str(error), "a whole safetensors file") from error
    return layout


class TensorFile:
    """A file that is being written; `finish` renames it to its final name."""

    def __init__(self, path: Path, layout: FileLayout) -> None:
        self.path = path
        self.layout = layout
        self._draft = path.with_name(f".{path.name}.partial")
        self._handle = os.open(self._draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write(layout.header, 0)
        os.ftruncate(self._handle, layout.size)  # padding reads as zeros

    def write(self, name: str, data: Tensor, offset: int = 0) -> None:
        """Write bytes of a tensor from its byte `offset` on; `data` is contiguous and of any dtype."""
        slot = self.layout.slots[name]
        if offset + data.nbytes > slot.bytes:
            raise ValueError(f"{name}: {data.nbytes} bytes at {offset}, and it has {slot.bytes}")
        self._write(byte_view(data), slot.offset + offset)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        remaining = memoryview(data)
        while remaining:
            count = os.pwrite(self._handle, remaining[:CHUNK_BYTES], offset)
            remaining, offset = remaining[count:], offset + count

    def finish(self) -> None:
        os.fsync(self._handle)
        self.close()
        self._draft.replace(self.path)
        sync(self.path.parent)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def sha256(file: Path) -> str:
    """Hash of the file's contents; hashlib releases the GIL."""
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        buffer = bytearray(1 << 20)
        view = memoryview(buffer)
        while count := stream.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()
