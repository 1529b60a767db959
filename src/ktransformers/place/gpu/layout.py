"""How packed experts lie in memory, as far as a GPU has to know it: sizes and offsets, no tensors.

A matrix of one expert is `[blocks][block_bytes]`; a block is 32 outputs over all of K, in two halves of 16. For gate
and up, packed together, half 0 is gate's and half 1 the same rows of up's; elsewhere half 1 is the next 16 rows. bf16
is `[k_tiles][2 halves][16 pairs][16 n][2]`; every other format has a strip for each half: headers of the whole row,
headers of each span of K, then codes in planes, or in rows of bytes where they are places in a table. A format is a row
of data here: the fields of its headers and the widths of its planes. How a value is made of them is in `decode.py` and
`kernels.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ktransformers.errors import InputError

TILE_K, TILE_N, LINE, TILE_BYTES = 32, 16, 64, 1024
NOWHERE = -1  # an expert that nobody wants: no slot, and no distance, because all are even
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
    planes: tuple[int, ...]  # bits, the widest first
    span: int  # values of K that share the fields below; 0: none
    fields: tuple[Field, ...] = ()
    row: tuple[Field, ...] = ()  # of the whole row
    in_rows: bool = False  # a k tile is 16 rows of bytes with as many bits a value, not planes

    @property
    def bits(self) -> int:
        return sum(self.planes)


_F16, _U8 = Field("f16"), Field("u8")
_FIXED = {
    "bf16": StripFormat("bf16", (16,), 0),
    "int8": StripFormat("int8", (8,), 0, row=(Field("f32"),)),
    "fp8:row": StripFormat("fp8:row", (8,), 0, row=(Field("f32"),)),
    "fp8:1x128": StripFormat("fp8:1x128", (8,), 128, (Field("f32"),)),
    "fp8:128x128": StripFormat("fp8:128x128", (8,), 128, (Field("f32", shared=True),)),
    "mxfp8": StripFormat("mxfp8", (8,), 32, (_U8,)),
    "mxfp4": StripFormat("mxfp4", (4,), 32, (_U8,)),
    "nvfp4": StripFormat("nvfp4", (4,), 32, (Field("u8", 2),), (Field("f32", shared=True),)),
    "q8_0": StripFormat("q8_0", (8,), 32, (_F16,)),
    "q4_0": StripFormat("q4_0", (4,), 32, (_F16,)),
    "q4_1": StripFormat("q4_1", (4,), 32, (_F16, _F16)),
    "q5_0": StripFormat("q5_0", (4, 1), 32, (_F16,)),
    "q5_1": StripFormat("q5_1", (4, 1), 32, (_F16, _F16)),
    "iq4_nl": StripFormat("iq4_nl", (4,), 32, (_F16,)),
    "q2_k": StripFormat("q2_k", (2,), 256, (Field("u8", 16), _F16, _F16)),
    "q3_k": StripFormat("q3_k", (2, 1), 256, (Field("u8", 12), _F16)),
    "q4_k": StripFormat("q4_k", (4,), 256, (_F16, _F16, Field("u8", 12))),
    "q5_k": StripFormat("q5_k", (4, 1), 256, (_F16, _F16, Field("u8", 12))),
    "q6_k": StripFormat("q6_k", (4, 2), 256, (Field("i8", 16), _F16)),
    "iq4_xs": StripFormat("iq4_xs", (4,), 256, (_F16, Field("u16"), Field("u8", 4))),
    "tq2_0": StripFormat("tq2_0", (2,), 256, (_F16,)),
    "tq1_0": StripFormat("tq1_0", (1,), 256, (Field("u8", 16), Field("u8", 4), _F16), in_rows=True),
    "iq1_s": StripFormat("iq1_s", (1,), 256, (_F16, Field("u16", 8)), in_rows=True),
    "iq1_m": StripFormat("iq1_m", (1,), 256, (Field("u8", 16), Field("u16", 4)), in_rows=True),
    "iq2_xxs": StripFormat("iq2_xxs", (2,), 256, (_F16,), in_rows=True),
    "iq2_xs": StripFormat("iq2_xs", (2,), 256, (_F16, Field("u8", 8)), in_rows=True),
    "iq2_s": StripFormat("iq2_s", (2,), 256, (_F16, Field("u8", 8), Field("u8", 8)), in_rows=True),
    "iq3_xxs": StripFormat("iq3_xxs", (3,), 256, (_F16,), in_rows=True),
    "iq3_s": StripFormat("iq3_s", (3,), 256, (_F16, Field("u8", 8), Field("u8", 4)), in_rows=True),
}
_INT4_SCALES = {"": "bf16", "f16": "f16", "f32": "f32"}


def format_of(spec: str) -> StripFormat:
    """The format that a spec names; `int4:G[:f16|:f32]` has its group in the name."""
    if spec in _FIXED:
        return _FIXED[spec]
    word, _, rest = spec.partition(":")
    group, _, scale = rest.partition(":")
    if word == "int4" and group.isdigit() and int(group) % TILE_K == 0 and scale in _INT4_SCALES:
        field = (Field(_INT4_SCALES[scale]),)
        return StripFormat(spec, (4,), int(group), field) if int(group) else StripFormat(spec, (4,), 0, row=field)
    raise InputError("format", spec, "int4:G or one of " + ", ".join(_FIXED), "such experts are computed on the CPU")


def _up(value: int, step: int) -> int:
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
    def codes_at(self) -> int:
        return _up(self.row_bytes + self.spans * self.span_bytes, LINE)

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
            given = f"{self.formats[0].spec} beside {self.formats[1].spec}"
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
        """Of the decoded matrix: gate's before up's."""
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
    """All that is packed of one layer."""

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
        """Of one expert in bf16, as it is multiplied."""
        return 2 * self.hidden * self.intermediate * (3 if self.gated else 2)


def geometry(experts: int, hidden: int, intermediate: int, gated: bool, formats: dict[str, str]) -> Geometry:
    """`formats` by matrix: gate, up and down."""
    up = format_of(formats["up"])
    first = PackedMatrix(intermediate, hidden, (format_of(formats["gate"]) if gated else up, up), gated)
    down = format_of(formats["down"])
    return Geometry(
        experts, hidden, intermediate, gated, first, PackedMatrix(hidden, intermediate, (down, down), False)
    )
