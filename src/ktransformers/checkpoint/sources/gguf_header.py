"""The header of a GGUF file: keys, and where each tensor lies. Versions 2 and 3, little-endian.

Read without the `gguf` package: opening takes milliseconds where that builds an object for every word of the
vocabulary, and a file that was cut short is told by its size before anything is read from it.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformers.checkpoint.encoded import GGUF_BLOCKS
from ktransformers.errors import InputError

MAGIC = b"GGUF"
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 10: "q2_k", 11: "q3_k", 12: "q4_k",
    13: "q5_k", 14: "q6_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s",
    22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 29: "iq1_m", 30: "bf16",
    34: "tq1_0", 35: "tq2_0", 39: "mxfp4",
}  # fmt: skip
SIZES = {
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "f64": (1, 8), "i8": (1, 1), "i16": (1, 2), "i32": (1, 4),
    "i64": (1, 8), "mxfp4": (32, 17), **GGUF_BLOCKS,
}  # fmt: skip


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
    found = []
    for _ in range(count):
        name = reader.string()
        shape = tuple(reader.number("Q") for _ in range(reader.number("I")))
        found.append((name, shape, reader.number("I"), reader.number("Q")))
    alignment = int(fields.get("general.alignment", 32))
    start = -(-reader.at // alignment) * alignment
    return Header(fields, [_tensor(file, len(data), start, *one) for one in found])


def _tensor(file: Path, size: int, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
    word = TYPES.get(kind)
    if word is None:
        raise InputError(name, f"type {kind} in {file.name}", "one of " + ", ".join(TYPES.values()))
    values, block = SIZES[word]
    if not shape or shape[0] % values:
        raise InputError(name, f"{word} of shape {list(shape[::-1])}", f"rows of a multiple of {values}")
    length = math.prod(shape) // values * block
    if start + offset + length > size:
        given = f"{size} bytes in {file.name}"
        raise InputError(name, given, f"{start + offset + length} up to its end", "the download is not complete")
    return GGUFTensor(name, word, shape[::-1], file, start + offset, length)
