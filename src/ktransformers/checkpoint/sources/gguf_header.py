"""The header of a GGUF file: keys, and type, shape and offset of each tensor. Versions 2 and 3, little-endian.

It is read without the `gguf` package, which builds an object for every word of the vocabulary: opening takes
milliseconds, and a truncated file is recognised by its size before any tensor is read. Numbers and block sizes of types
are those of the native core's table of formats. As in llama.cpp, tensors lie in the order of the header without gaps,
each padded to `general.alignment`; this tells a tensor whose type is not that of its bytes by the place of the next
one. An error names the key or the tensor, or the byte where the header ends to make sense.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformers import _core
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import short

MAGIC = b"GGUF"
MAX_DIMENSIONS = 4
MAX_NAME_CHARACTERS = 255
MAX_ALIGNMENT = 1 << 20
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
class GgufHeader:
    fields: dict[str, Any]
    tensors: list[GGUFTensor]


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def number(self, kind: str) -> Any:
        value = struct.unpack_from("<" + kind, self.data, self.at)[0]
        self.at += struct.calcsize("<" + kind)
        return value

    def string(self, errors: str = "strict") -> str:
        size = self.number("Q")
        if size > len(self.data) - self.at:
            raise ValueError(f"a string of {size} bytes")
        text = self.data[self.at : self.at + size]
        self.at += size
        return text.decode("utf-8", errors)

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string("replace")  # a vocabulary may hold halves of characters
        if kind != ARRAY:
            if kind not in NUMBERS:
                raise ValueError(f"a value of type {kind}")
            return self.number(NUMBERS[kind])
        inner, count = self.number("I"), self.number("Q")
        smallest = struct.calcsize(f"<{NUMBERS[inner]}") if inner in NUMBERS else 8
        if inner not in NUMBERS and inner != STRING:
            raise ValueError(f"an array of values of type {inner}")
        if count > (len(self.data) - self.at) // smallest:
            raise ValueError(f"an array of {count}")
        if inner in NUMBERS:
            values = struct.unpack_from(f"<{count}{NUMBERS[inner]}", self.data, self.at)
            self.at += struct.calcsize(f"<{count}{NUMBERS[inner]}")
            return list(values)
        return [self.value(inner) for _ in range(count)]


def read_header(file: Path) -> GgufHeader:
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(file, data)
    except FileNotFoundError:
        raise InputError(str(file), "no such file", "a GGUF file") from None
    except (ValueError, struct.error, OSError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            str(file), f"a file that does not open ({error})", "a GGUF file", "download it again"
        ) from None


def _parse(file: Path, data: mmap.mmap) -> GgufHeader:
    if data[:4] != MAGIC:
        raise ValueError(f"it begins with {data[:4]!r}")
    reader = _Reader(data)
    reader.at = 4
    version, count, keys = reader.number("I"), reader.number("Q"), reader.number("Q")
    if version not in (2, 3):
        raise ValueError(f"version {version}")
    fields: dict[str, Any] = {}
    entries = []
    try:
        for _ in range(keys):
            name = reader.string()
            fields[name] = reader.value(reader.number("I"))
        for _ in range(count):
            name, dimensions = reader.string(), reader.number("I")
            if len(name) > MAX_NAME_CHARACTERS:
                raise ValueError(f"a name of {len(name)} characters")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise ValueError(f"{dimensions} dimensions of {name!r}")
            shape = tuple(reader.number("Q") for _ in range(dimensions))
            entries.append((name, shape, reader.number("I"), reader.number("Q")))
    except (ValueError, struct.error) as error:
        entry = f"key {len(fields) + 1} of {keys}" if len(fields) < keys else f"tensor {len(entries) + 1} of {count}"
        raise ValueError(f"{entry}, byte {reader.at}: {error}") from None
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        given = f"{short(alignment)} in {file}"
        raise InputError("general.alignment", given, f"a power of two from 8 to {MAX_ALIGNMENT}")
    start = -(-reader.at // alignment) * alignment
    tensors, expected = [], 0
    for row in entries:
        tensor = _tensor(file, len(data), start, *row)
        if tensor.offset != start + expected:
            given = f"offset {tensor.offset - start} in {file}"
            place = f"{expected}, where the tensor before it ends"
            raise InputError(tensor.name, given, place, "the file is damaged, or a type is not that of its bytes")
        expected += -(-tensor.bytes // alignment) * alignment
        tensors.append(tensor)
    return GgufHeader(fields, tensors)


def _tensor(file: Path, size: int, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
    word = TYPES.get(kind)
    if word is None:
        raise InputError(name, f"type {kind} in {file}", "one of " + ", ".join(TYPES.values()))
    values, block = BLOCKS[word]
    if shape[0] % values or min(shape) < 1:
        given = f"{word} of shape {list(shape[::-1])} in {file}"
        raise InputError(name, given, f"sizes from 1, and rows of a multiple of {values}")
    length = math.prod(shape) // values * block
    if start + offset + length > size:
        given = f"{size} bytes in {file}"
        raise InputError(name, given, f"{start + offset + length} up to its end", "the download is not complete")
    return GGUFTensor(name, word, shape[::-1], file, start + offset, length)
