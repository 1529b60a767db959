"""The layout of packed experts in memory, as the GPU's decoders need it: sizes and offsets, no tensors.

A matrix of one expert is `[blocks][block_bytes]`; a block is 32 outputs over all of K, in two halves of 16. For gate
and up, packed together, half 0 is gate's and half 1 the same rows of up's; elsewhere half 1 is the next 16 rows. bf16
is `[k_tiles][2 halves][16 pairs][16 n][2]`; every other format has a strip for each half: headers of the whole row,
headers of each span of K, then quants in planes, or in rows of bytes where they are indices into a grid. The fields of
headers and the widths of planes are those of the native core (`_core.format`); `dequantize.py` and
`dequantize_triton.py` make values of them by the kinds of elements and scales, so that a format has no row here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ktransformers import _core
from ktransformers.ground.errors import InputError

TILE_K, TILE_N, LINE, TILE_BYTES = 32, 16, 64, 1024
MORE_PATCHES = 16  # than k tiles, in a strip of bf16:12
NOWHERE = -1  # an expert that no token routes to: no slot, and no distance, because all are even
SIZES = {"f32": 4, "f16": 2, "bf16": 2, "u16": 2, "u8": 1, "i8": 1}


@dataclass(frozen=True)
class Field:
    """`count` arrays of one type, each over the 16 rows of a strip; `shared`: one number for all of them."""

    kind: str
    count: int = 1
    shared: bool = False

    @property
    def bytes(self) -> int:
        return SIZES[self.kind] * self.count * (1 if self.shared else TILE_N)


@dataclass(frozen=True)
class StripFormat:
    spec: str
    element: str  # how a code becomes a number: csrc/kernels/format.h, ElementKind
    zero_point: int  # of unsigned quants
    scales: str  # what the fields mean: csrc/kernels/format.h, ScaleKind
    planes: tuple[int, ...]  # bits, the lowest first
    span: int  # values of K that share the fields below; 0: none
    fields: tuple[Field, ...] = ()
    row: tuple[Field, ...] = ()  # of the whole row
    patches: bool = False  # behind the headers: csrc/kernels/format.h

    @property
    def bits(self) -> int:
        return sum(self.planes)

    @property
    def in_grid(self) -> bool:
        """A k tile is 16 rows of bytes with as many bits a value, not planes."""
        return self.element == "grid"


@functools.cache
def format_of(spec: str) -> StripFormat:
    try:
        row = _core.format(spec)
    except ValueError as error:
        raise InputError("format", spec, str(error)) from error
    header = tuple(Field(kind, count, row["shared_header"]) for kind, count in row["header"])
    whole = (Field("f32", shared=True),) if row["tensor_scale"] else ()
    fields, of_row = (header, whole) if row["span"] else ((), header)
    kinds = row["element"], row["zero_point"], row["scales"]
    return StripFormat(row["spec"], *kinds, tuple(row["planes"]), row["span"], fields, of_row, row["patches"])


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True)
class Strip:
    """16 outputs over all of K. Offsets are from the strip's first byte."""

    format: StripFormat
    k_tiles: int
    columns: int

    @functools.cached_property
    def spans(self) -> int:
        return -(-self.columns // self.format.span) if self.format.span else 0

    @functools.cached_property
    def row_bytes(self) -> int:
        return sum(field.bytes for field in self.format.row)

    @functools.cached_property
    def span_bytes(self) -> int:
        return sum(field.bytes for field in self.format.fields)

    @functools.cached_property
    def patches_at(self) -> int:
        """The patches, behind the number of the first one of every k tile."""
        return self.row_bytes + self.spans * self.span_bytes + _round_up(2 * (self.k_tiles + 1), 4)

    @functools.cached_property
    def patches(self) -> int:
        return self.k_tiles + MORE_PATCHES if self.format.patches else 0

    @functools.cached_property
    def codes_at(self) -> int:
        headers = self.row_bytes + self.spans * self.span_bytes
        return _round_up(self.patches_at + 4 * self.patches if self.patches else headers, LINE)

    @functools.cached_property
    def bytes(self) -> int:
        return self.codes_at + self.k_tiles * 64 * self.format.bits


@dataclass(frozen=True)
class PackedMatrix:
    """One packed matrix of every expert: `paired` is gate and up, `rows` outputs each; else `rows` outputs."""

    rows: int
    columns: int
    formats: tuple[StripFormat, StripFormat]  # of the halves
    paired: bool

    def __post_init__(self) -> None:
        if (self.formats[0].spec == "bf16") != (self.formats[1].spec == "bf16"):
            given = f"{self.formats[0].spec} with {self.formats[1].spec}"
            raise InputError("formats of gate and up", given, "bf16 for both, or for none")

    @functools.cached_property
    def plain(self) -> bool:
        return self.formats[0].spec == "bf16"

    @functools.cached_property
    def k_tiles(self) -> int:
        return -(-self.columns // TILE_K)

    @functools.cached_property
    def blocks(self) -> int:
        return 2 * -(-self.rows // 32) if self.paired else -(-self.rows // 32)

    @functools.cached_property
    def out_rows(self) -> int:
        """Rows of the decoded matrix: gate's before up's."""
        return 2 * self.rows if self.paired else self.rows

    @functools.cached_property
    def block_rows(self) -> int:
        """Rows by which a block is further down than the one before it."""
        return TILE_N if self.paired else 2 * TILE_N

    @functools.cached_property
    def half_rows(self) -> int:
        """Rows from half 0 to half 1 of a block."""
        return self.rows if self.paired else TILE_N

    @functools.cached_property
    def _strips(self) -> tuple[Strip, Strip]:
        return Strip(self.formats[0], self.k_tiles, self.columns), Strip(self.formats[1], self.k_tiles, self.columns)

    def strip(self, half: int) -> Strip:
        return self._strips[half]

    def strip_at(self, half: int) -> int:
        return half * self.strip(0).bytes

    @functools.cached_property
    def block_bytes(self) -> int:
        if self.plain:
            return (2 * self.k_tiles + (self.k_tiles % 8 == 0)) * TILE_BYTES
        lines = -(-(self.strip(0).bytes + self.strip(1).bytes) // LINE)
        return (lines | 1) * LINE

    @functools.cached_property
    def expert_bytes(self) -> int:
        return self.blocks * self.block_bytes


@dataclass(frozen=True)
class Geometry:
    """The packed matrices of one layer."""

    experts: int
    hidden: int
    intermediate: int
    gated: bool
    first: PackedMatrix  # gate and up, or up
    down: PackedMatrix

    @functools.cached_property
    def expert_bytes(self) -> int:
        return self.first.expert_bytes + self.down.expert_bytes

    @functools.cached_property
    def decoded_bytes(self) -> int:
        """Bytes of one expert in bf16, as it is multiplied."""
        return 2 * self.hidden * self.intermediate * (3 if self.gated else 2)


def geometry(experts: int, hidden: int, intermediate: int, gated: bool, formats: dict[str, str]) -> Geometry:
    """`formats` by matrix: gate, up and down."""
    up = format_of(formats["up"])
    first = PackedMatrix(intermediate, hidden, (format_of(formats["gate"]) if gated else up, up), gated)
    down = format_of(formats["down"])
    return Geometry(
        experts, hidden, intermediate, gated, first, PackedMatrix(hidden, intermediate, (down, down), False)
    )
