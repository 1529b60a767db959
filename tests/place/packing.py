"""Packed experts written with numpy from the description of the layout, column by column: what the
decoders are tested against. Nothing here is shared with them or with the native core."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Coded:
    """One matrix: numbers of codes [N, K], headers, and the value that they mean, float32 [N, K]."""

    planes: tuple[int, ...]
    codes: NDArray[np.uint32]
    values: NDArray[np.float32]
    row: list[NDArray[np.generic]] = field(default_factory=list)  # each [N], or [N / 16] where shared by a strip
    spans: list[NDArray[np.generic]] = field(default_factory=list)  # each [N, spans], or [N / 16, spans]

    def __post_init__(self) -> None:
        assert self.codes.shape == self.values.shape


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def plain_block(halves: list[NDArray[np.uint16]], columns: int) -> Bytes:
    """Two times up to 16 rows of bf16 bits."""
    tiles = round_up(columns, 32) // 32
    block = np.zeros((tiles, 2, 16, 16, 2), np.uint16)
    for half, rows in enumerate(halves):
        for k in range(columns):
            block[k // 32, half, k % 32 // 2, : len(rows), k % 2] = rows[:, k]
    out = np.zeros((2 * tiles + (tiles % 8 == 0)) * 1024, np.uint8)
    out[: block.nbytes] = block.reshape(-1).view(np.uint8)
    return out


def strip(coded: Coded, first: int) -> Bytes:
    """16 rows from `first` on; those beyond the matrix are zeros."""
    rows, columns = coded.codes.shape
    tiles = round_up(columns, 32) // 32
    header = b"".join(_entries(array, first, rows) for array in coded.row)
    spans = coded.spans[0].shape[1] if coded.spans else 0
    for span in range(spans):
        header += b"".join(_entries(array[:, span], first, rows) for array in coded.spans)
    header += bytes(-len(header) % 64)
    padded = np.zeros((16, 32 * tiles), np.uint32)
    part = coded.codes[first : first + 16]
    padded[: len(part), :columns] = part
    body = b""
    for tile in range(tiles):
        low = 0
        for bits in coded.planes:
            words = np.zeros((max(1, bits // 2), 32), np.uint32)
            for j in range(16):  # of lane 2 n + k % 2, the codes k = 2 j and 2 j + 1
                pair = padded[:, 32 * tile + 2 * j : 32 * tile + 2 * j + 2].reshape(32)
                words[j * bits // 32] |= (pair >> low & (1 << bits) - 1) << (j * bits % 32)
            body += (words.astype(np.uint16) if bits == 1 else words).tobytes()
            low += bits
    return np.frombuffer(header + body, np.uint8)


def _entries(array: NDArray[np.generic], first: int, rows: int) -> bytes:
    if array.shape[0] != rows:  # shared by the strip
        return array[first // 16 : first // 16 + 1].tobytes() or bytes(array.itemsize)
    found = np.zeros(16, array.dtype)
    part = array[first : first + 16]
    found[: len(part)] = part
    return found.tobytes()


def block_of(parts: list[Bytes]) -> Bytes:
    joined = np.concatenate(parts)
    lines = round_up(len(joined), 64) // 64
    out = np.zeros((lines + (lines % 2 == 0)) * 64, np.uint8)
    out[: len(joined)] = joined
    return out


def pack(matrices: list[Coded | NDArray[np.float32]]) -> Bytes:
    """One expert. Two matrices: gate and up together; one: down, or up without a gate."""
    paired = len(matrices) == 2
    first = matrices[0]
    rows, columns = (first.codes if isinstance(first, Coded) else first).shape
    blocks = []
    for block in range(2 * round_up(rows, 32) // 32 if paired else round_up(rows, 32) // 32):
        halves = []
        for half in range(2):
            matrix = matrices[half] if paired else first
            at = 16 * block if paired else 32 * block + 16 * half
            if isinstance(matrix, Coded):
                halves.append(strip(matrix, at))
            else:
                halves.append(bf16_bits(matrix[at : at + 16]).reshape(-1, columns))
        blocks.append(block_of(halves) if isinstance(first, Coded) else plain_block(halves, columns))
    return np.concatenate(blocks)
