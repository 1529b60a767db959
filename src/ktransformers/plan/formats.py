"""Weight formats of routed experts as the planner sees them: bytes of a weight with what its scales add.

Bits, groups and scales are those of the native core's table (`_core.formats()`). Bytes are exact for bf16, whose tiles
are laid out here as csrc/moe/weights.cpp does it; for the others they follow from bits, group and scale, to which their
strips add a percent at most (csrc/kernels/format.h). Formats with calibrated rates are proposed; GGUF types of fewer
than four bits are counted as they are, because no proposed format is as small; all others count as the proposed format
with as many bits of a code, or the next larger.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ktransformers.ground.errors import InputError

if TYPE_CHECKING:
    from ktransformers._core import FormatInfo

TILE_K, BLOCK_N, TILE_BYTES = 32, 32, 1024  # csrc/types.h: a block is two tiles side by side, 2 KB per step of K
PATCH_BYTES = 6 / 512  # of a weight in bf16:12: csrc/kernels/format.h has one patch, and its index, for each k tile
LOSSLESS_FORMAT = "bf16:12"  # what a plan proposes for bf16 experts that do not fit; it changes no result
PROPOSED = ("bf16", "fp8", "int8", "int4")  # with rates of their own in plan/profiles
TYPICAL_COLUMNS = 2048  # of a matrix whose rows have one scale each
RELEASED_METHODS = {"gptq": "int4"}  # quantisation methods that are stored in a format of another name


@dataclass(frozen=True)
class WeightFormat:
    name: str
    bits: float  # of one weight
    group: int = 1  # weights that share a scale
    scale_bytes: float = 0  # of one group
    executable: bool = True  # False: shown by `kt plan --all` alone

    @property
    def bytes_per_weight(self) -> float:
        return self.bits / 8 + self.scale_bytes / self.group


@functools.cache
def _table() -> dict[str, FormatInfo]:
    """The core's formats by name, with the first of their specs."""
    from ktransformers import _core

    rows: dict[str, FormatInfo] = {}
    for row in _core.formats():
        rows.setdefault(row["name"], row)
    return rows


def _is_small(row: FormatInfo) -> bool:
    return row["block_bytes"] > 0 and sum(row["planes"]) < 4


@functools.cache
def _formats() -> dict[str, WeightFormat]:
    table = {}
    for name, row in ((name, _table()[name]) for name in PROPOSED):
        group = (row["span"] or TYPICAL_COLUMNS) * row["scale_rows"] if row["header"] else 1
        table[name] = WeightFormat(name, sum(row["planes"]), group, row["header_bytes"])
    for name, row in _table().items():
        if row["patches"]:
            table[name] = WeightFormat(name, 8 * bytes_in_format(name))
        if _is_small(row):
            table[name] = WeightFormat(name, 8 * row["block_bytes"] / row["span"])
    return table


def format_of(name: str) -> WeightFormat:
    if name not in _formats():
        raise InputError("format", name, "one of " + ", ".join(_formats()))
    return _formats()[name]


def planes_of(spec: str) -> int:
    """Into how many parts the core divides the bits of a code."""
    from ktransformers import _core

    return len(_core.format(spec)["planes"])


def bytes_in_format(spec: str) -> float:
    """Bytes of a weight in any format of the core, with its share of the scales."""
    from ktransformers import _core

    row = _core.format(spec)
    if row["block_bytes"]:
        return row["block_bytes"] / row["span"]
    scales = row["header_bytes"] / ((row["span"] or TYPICAL_COLUMNS) * row["scale_rows"])
    return sum(row["planes"]) / 8 + scales + (PATCH_BYTES if row["patches"] else 0.0)


def name_of(spec: str) -> str:
    """The name of a format without what its groups are: int4 of int4:32, but bf16:12."""
    return spec if spec in _table() else spec.partition(":")[0]


def counted_as(stored: str) -> str:
    """The format of this table whose bytes a release takes in memory, where experts keep their bits."""
    if stored in _formats():
        return stored
    if stored in RELEASED_METHODS:
        return RELEASED_METHODS[stored]
    bits = sum(_table()[stored]["planes"]) if stored in _table() else 16
    return "int4" if bits <= 4 else "int8" if bits <= 8 else "bf16"


def tiles(size: int) -> int:
    return -(-size // TILE_K)


def block_bytes(k: int) -> int:
    """One block of 32 outputs by k: a padding tile where k is a multiple of 8 tiles, as weights.cpp lays it out."""
    steps = tiles(k)
    return steps * 2 * TILE_BYTES + (TILE_BYTES if steps and steps % 8 == 0 else 0)


def matrix_bytes(n: int, k: int) -> int:
    """A packed matrix of n outputs by k."""
    return -(-n // BLOCK_N) * block_bytes(k)


def packed_expert_bytes(hidden: int, intermediate: int, gated: bool, weights: WeightFormat) -> int:
    """One expert: gate and up side by side, and down."""
    wide = BLOCK_N * tiles(intermediate) * (2 if gated else 1)
    exact = matrix_bytes(wide, hidden) + matrix_bytes(hidden, intermediate)
    return exact if weights.bits == 16 else round(exact * weights.bytes_per_weight / 2)


def packed_lora_bytes(hidden: int, intermediate: int, gated: bool, rank: int) -> int:
    """One expert's factors as csrc/moe/lora.h stores them: ranks are padded to whole tiles of 32, gate and up share
    one A because PEFT adapts them as one matrix."""
    wide = BLOCK_N * tiles(intermediate) * (2 if gated else 1)
    padded = TILE_K * tiles(rank)
    return (
        matrix_bytes(padded, hidden)
        + matrix_bytes(wide, padded)
        + matrix_bytes(padded, intermediate)
        + matrix_bytes(hidden, padded)
    )
