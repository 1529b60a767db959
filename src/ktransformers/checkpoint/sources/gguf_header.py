"""The header of a GGUF file: keys, and type, shape and offset of each tensor. Versions 2 and 3, little-endian.

It is read without the `gguf` package, which builds an object for every word of the vocabulary: opening takes
milliseconds, and a truncated file is recognised by its size before any tensor is read. Numbers and block sizes of types
are those of the native core's table of formats.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformers import _core
from ktransformers.errors import InputError

MAGIC = b"GGUF"
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# Types by number, and values and bytes of a block of each: plain numbers, and the formats of the core's table.
PLAIN_TYPES = {0: "f32", 1: "f16", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 30: "bf16"}
PLAIN_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f64": 8, "i8": 1, "i16": 2, "i32": 4, "i64": 8}
FORMATS = {row["gguf_type"]: row for row in _core.formats() if row["gguf_type"] is not None}
TYPES = PLAIN_TYPES | {number: row["name"] for number, row in FORMATS.items()}
BLOCKS = {name: (1, size) for name, size in PLAIN_BYTES.items()} | {
    row["name"]: (row["span"], row["span"] * sum(row["planes"]) // 8 + row["header_bytes"]) for row in FORMATS.values()
}


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    kind: str
    shape: tuple[int, ...]  # outermost first, as torch has it; GGUF itself counts the other way
    file: Path
    offset: int  # from the beginning of the file
    bytes: int


@dataclass(frozen=True)
class Header:
    fields: dict[str, Any]
    tensors: list[GGUFTensor]


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def number(self, kind: str) -> Any:
        value = struct.unpack_from("<" + kind, self.data, self.at)[0]
        self.at += struct.calcsize("<" + kind)
        return value

    def string(self) -> str:
        size = self.number("Q")
        if size > len(self.data) - self.at:
            raise ValueError(f"a string of {size} bytes")
        text = self.data[self.at : self.at + size]
        self.at += size
        return text.decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(NUMBERS[kind])
        inner, count = self.number("I"), self.number("Q")
        if count > len(self.data) - self.at:
            raise ValueError(f"an array of {count}")
        if inner in NUMBERS:
            values = struct.unpack_from(f"<{count}{NUMBERS[inner]}", self.data, self.at)
            self.at += struct.calcsize(f"<{count}{NUMBERS[inner]}")
            return list(values)
        return [self.value(inner) for _ in range(count)]


def read_header(file: Path) -> Header:
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(file, data)
    except FileNotFoundError:
        raise InputError(str(file), "no such file", "a GGUF file") from None
    except (ValueError, KeyError, struct.error, OSError) as error:
        raise InputError(
            str(file), f"a file that does not open ({error})", "a GGUF file", "download it again"
        ) from error


def _parse(file: Path, data: mmap.mmap) -> Header:
    if data[:4] != MAGIC:
        raise ValueError(f"it begins with {data[:4]!r}")
    reader = _Reader(data)
    reader.at = 4
    version, count, keys = reader.number("I"), reader.number("Q"), reader.number("Q")
    if version not in (2, 3):
        raise ValueError(f"version {version}")
    fields = {}
    for _ in range(keys):
        name = reader.string()
        fields[name] = reader.value(reader.number("I"))
    entries = []
    for _ in range(count):
        name = reader.string()
        shape = tuple(reader.number("Q") for _ in range(reader.number("I")))
        entries.append((name, shape, reader.number("I"), reader.number("Q")))
    alignment = int(fields.get("general.alignment", 32))
    start = -(-reader.at // alignment) * alignment
    return Header(fields, [_tensor(file, len(data), start, *entry) for entry in entries])


def _tensor(file: Path, size: int, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
    word = TYPES.get(kind)
    if word is None:
        raise InputError(name, f"type {kind} in {file.name}", "one of " + ", ".join(TYPES.values()))
    values, block = BLOCKS[word]
    if not shape or shape[0] % values:
        raise InputError(name, f"{word} of shape {list(shape[::-1])}", f"rows of a multiple of {values}")
    length = math.prod(shape) // values * block
    if start + offset + length > size:
        given = f"{size} bytes in {file.name}"
        raise InputError(name, given, f"{start + offset + length} up to its end", "the download is not complete")
    return GGUFTensor(name, word, shape[::-1], file, start + offset, length)
