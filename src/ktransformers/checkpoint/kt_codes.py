"""kt-kernel's INT8 and INT4 (methods AMXINT8 and AMXINT4): rows quantised as its converter does it, and AMX tiles.

A row of a matrix `[N, K]` has one float32 scale. INT8: s = amax (1/127), q = x (1/s) rounded half to even, value q s.
INT4: the row is quantised to -112 ... 112, d = amax/112, q = x/d, and every code to a sixteenth of it, half away from
zero, -7 ... 7; value 16 q d. A quantized matrix is stored as tiles: blocks of 64 (INT8) or 128 (INT4) rows by 3584
columns hold steps of 32 rows by 64 bytes, two tiles of 16 rows each, in which 32-bit words are transposed; a byte of
INT4 has the columns j (low half) and j + 64 of a step. A matrix is divided among P NUMA nodes: gate and up by rows,
down by columns, so with P > 1 a row of down has P scales. `encode_rows` gives the same values in the form that
`ExpertStore` packs, without a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint.encoded import Encoded, format_of, nibbles, pair_nibbles
from ktransformers.ground.errors import InputError

ROWS, BYTES, K_BLOCK = 32, 64, 3584  # of a step; columns of a block


@dataclass(frozen=True)
class TileFormat:
    """One of kt-kernel's two integer methods."""

    bits: int
    method: str  # of KTMoEWrapper
    name: str  # in names of .kt files
    layout: str  # of the bytes, as kt-kernel 0.7 names it in manifests; INT4 has no name there, this one is ours
    n_block: int  # rows of a block
    k_step: int  # columns of a step
    limit: int  # the largest code before INT4 is shifted

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    def bytes(self, rows: int, columns: int) -> int:
        """Bytes of a quantized matrix."""
        return rows * columns // self.per_byte


TILE_FORMATS = {
    8: TileFormat(8, "AMXINT8", "INT8", "kt-int8-n32-k64-vnni-v1", 64, 64, 127),
    4: TileFormat(4, "AMXINT4", "INT4", "kt-int4-n32-k128-v1", 128, 128, 112),
}


def tile_format(bits: int) -> TileFormat:
    if bits not in TILE_FORMATS:
        raise InputError("bits", bits, "4 or 8")
    return TILE_FORMATS[bits]


def quantize_rows(matrix: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Values int8 `[N, K]` and scales float32 `[N]` of floats `[N, K]`: the bits that kt-kernel 0.7.2 computes from the
    same numbers. A value is the code (8 bits), or 16 times the code (4 bits), times its row's scale.

    kt-kernel gets bf16: a caller that wants its bits from another dtype rounds to bf16 before. It quantises each NUMA
    part by itself, which matters to down alone: give its parts of columns one by one, or use `encode_rows`. A row of
    zeros has scale 0. Numbers that are not finite are refused.
    """
    return _quantised(matrix, tile_format(bits), paired=False)


def _quantised(matrix: Tensor, form: TileFormat, *, paired: bool) -> tuple[Tensor, Tensor]:
    """`paired`: bytes `[N, K/2]` of two values, each plus 8."""
    if matrix.dim() != 2 or not matrix.is_floating_point():
        raise InputError("matrix", f"{matrix.dtype} of shape {list(matrix.shape)}", "floats of shape [rows, columns]")
    if matrix.dtype not in (torch.bfloat16, torch.float32):
        matrix = matrix.float()
    if matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    rows, columns = matrix.shape
    qweight = torch.empty(rows, columns // 2 if paired else columns, dtype=torch.uint8 if paired else torch.int8)
    scales = torch.empty(rows, dtype=torch.float32)
    if not _core.quantise_rows(matrix, form.bits, qweight, scales):
        raise InputError("matrix", "numbers that are not finite", "finite ones", "the source is damaged")
    return qweight, scales


def encode_rows(matrix: Tensor, bits: int, parts: int = 1, name: str = "") -> Encoded:
    """`[N, K]` or `[E, N, K]` with the values and scales of `quantize_rows`, for `ExpertStore.pack`; no bit is lost.

    `parts` is the number of NUMA parts of the *columns*: P for down. Gate and up are divided by rows, each of which
    keeps its scale, so theirs is 1. What comes back is `int8` or `int4:0:f32`, for several parts `uint8:G:f32` (zero
    points of 0) or `int4:G:f32` with G = K/P.
    """
    stacked = matrix if matrix.dim() == 3 else matrix[None]
    experts, rows, columns = stacked.shape
    if columns % parts:
        raise InputError(name or "matrix", f"{columns} columns", f"a multiple of {parts}, the NUMA parts")
    if bits == 4 and parts == 1 and columns % 2 == 0:
        paired, scale = _quantised(stacked.reshape(experts * rows, columns), tile_format(bits), paired=True)
        spec = spec_of(bits, columns, parts)
        qweight, scales = paired.view(experts, rows, -1), scale.view(experts, rows, 1)
        return Encoded(spec, qweight, scales * 16, columns=columns, name=name)
    pieces = [
        quantize_rows(part.reshape(experts * rows, columns // parts), bits) for part in stacked.chunk(parts, dim=2)
    ]
    qweight = torch.cat([piece for piece, _ in pieces], 1).view(experts, rows, columns)
    scales = torch.stack([scale for _, scale in pieces], 1).view(experts, rows, parts)
    return encoded_of(qweight, scales, bits, name)


def encoded_of(qweight: Tensor, scales: Tensor, bits: int, name: str = "") -> Encoded:
    """Values int8 `[E, N, K]` and scales float32 `[E, N, parts]` of equal parts of columns; see `encode_rows`."""
    _, _, columns = qweight.shape
    parts = scales.shape[2]
    spec = spec_of(bits, columns, parts)
    if bits == 4:
        stored = pair_nibbles((qweight + 8).view(torch.uint8))
        return Encoded(spec, stored, scales * 16, columns=columns, name=name)
    if parts == 1:
        return Encoded(spec, qweight, scales[:, :, 0].contiguous(), columns=columns, name=name)
    zeros = torch.zeros(scales.shape, dtype=torch.int8)
    return Encoded(spec, qweight, scales, zeros=zeros, columns=columns, name=name)


def spec_of(bits: int, columns: int, parts: int) -> str:
    """The format of what `encoded_of` makes of K columns in so many parts."""
    if parts == 1:
        return "int4:0:f32" if bits == 4 else "int8"
    return f"{'int4' if bits == 4 else 'uint8'}:{columns // parts}:f32"


def kept_codes(matrix: Encoded, bits: int, parts: int) -> tuple[Tensor, Tensor] | None:
    """Values int8 `[N, K]` and scales `[N, parts]` of a matrix `[1, N, K]` whose own values and scales can be stored as
    they are; None: it has to be quantised."""
    form = format_of(matrix.format)
    if matrix.scales is None or matrix.experts != 1 or matrix.columns % parts:
        return None
    width = matrix.columns // parts
    if bits == 8 and matrix.zeros is not None and form.element == "int8" and form.span and form.span % width == 0:
        groups = [part * width // form.span for part in range(parts)]
        kept = not matrix.zeros.any() and not (matrix.qweight == -128).any()
        return (matrix.qweight[0], matrix.scales[0].float()[:, groups]) if kept else None
    if form.scales != "floats":
        return None
    if bits == 8 and form.element == "int8":
        qweight, scale = matrix.qweight[0], matrix.scales[0].float()
        return None if bool((qweight == -128).any()) else (qweight, scale[:, None].expand(-1, parts).contiguous())
    if bits == 4 and form.element == "uint" and (form.span or matrix.columns) % width == 0:
        values = nibbles(matrix.qweight[0])
        if bool((values == 0).any()):  # -8
            return None
        groups = [part * width // (form.span or matrix.columns) for part in range(parts)]
        scale = matrix.scales[0].float().reshape(matrix.rows, -1)[:, groups] / 16
        return values.view(torch.int8) - 8, scale
    return None


def divided(role: str, rows: int, columns: int, parts: int) -> tuple[int, int]:
    """Rows and columns of a NUMA part of gate, up or down."""
    return (rows // parts, columns) if role != "down" else (rows, columns // parts)


def part_of(matrix: Tensor, role: str, part: int, parts: int) -> Tensor:
    """A view of a NUMA part of a matrix `[N, K]`."""
    rows, columns = matrix.shape
    n, k = divided(role, rows, columns, parts)
    return matrix[part * n : (part + 1) * n] if role != "down" else matrix[:, part * k : (part + 1) * k]


def check_size(name: str, role: str, rows: int, columns: int, bits: int, parts: int) -> None:
    """Refuse a matrix that kt-kernel's tiles cannot hold in so many NUMA parts."""
    form, cut = tile_format(bits), columns if role == "down" else rows
    n, k = divided(role, rows, columns, parts)
    if cut % parts or n % ROWS or k % form.k_step:
        given = f"{role} of {rows} x {columns} in {parts} NUMA parts"
        expected = f"equal parts, each a multiple of {ROWS} rows and {form.k_step} columns for {form.name}"
        raise InputError(name, given, expected, "fewer NUMA parts, or --layout packed, which takes any size")


def tile(qweight: Tensor, bits: int) -> Tensor:
    """Values int8 `[n, k]` as the bytes of kt-kernel's tiles, uint8 `[n k bits / 8]`."""
    form = tile_format(bits)
    n, k = qweight.shape
    if n % ROWS or k % form.k_step:
        raise InputError("qweight", f"shape {[n, k]}", f"multiples of {ROWS} and {form.k_step}")
    result = torch.empty(form.bytes(n, k) // 4, dtype=torch.int32)
    for nb, nbs, kb, kbs, start in _blocks(form, n, k):
        rows = qweight[nb : nb + nbs, kb : kb + kbs]
        if bits == 4:
            halves = rows.reshape(nbs, kbs // form.k_step, 2, BYTES)
            rows = (halves[:, :, 0] & 15).bitwise_or_(halves[:, :, 1] << 4)
        words = rows.reshape(nbs, -1).view(torch.int32).view(nbs // ROWS, 2, 16, kbs // form.k_step, 16)
        size = nbs * kbs // form.per_byte // 4
        result[start // 4 : start // 4 + size].view(nbs // ROWS, kbs // form.k_step, 2, 16, 16).copy_(
            words.permute(0, 3, 1, 4, 2)
        )
    return result.view(torch.uint8)


def untile(data: Tensor, n: int, k: int, bits: int) -> Tensor:
    """The inverse of `tile`."""
    form = tile_format(bits)
    result = torch.empty(n, k, dtype=torch.int8)
    source = data.view(torch.uint8)
    if source.storage_offset() % 4 or source.data_ptr() % 4:  # a safetensors header may have any length
        source = source.clone()
    for nb, nbs, kb, kbs, start in _blocks(form, n, k):
        tiles = source[start : start + nbs * kbs // form.per_byte].view(torch.int32)
        # [row steps, column steps, 2 tiles, 16 words, 16 rows] -> rows, then columns in words of four bytes
        words = tiles.view(nbs // ROWS, kbs // form.k_step, 2, 16, 16).permute(0, 2, 4, 1, 3).contiguous()
        rows = words.view(torch.int8).view(nbs, kbs // form.k_step, BYTES)
        if bits == 4:
            rows = torch.cat([(rows << 4) >> 4, rows >> 4], dim=-1)
        result[nb : nb + nbs, kb : kb + kbs] = rows.reshape(nbs, kbs)
    return result


def _blocks(form: TileFormat, n: int, k: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(first row, rows, first column, columns, first byte) of every block."""
    for nb in range(0, n, form.n_block):
        nbs = min(form.n_block, n - nb)
        for kb in range(0, k, K_BLOCK):
            yield nb, nbs, kb, min(K_BLOCK, k - kb), (nb * k + kb * nbs) // form.per_byte
