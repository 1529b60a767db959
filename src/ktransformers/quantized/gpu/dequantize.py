"""Packed bytes into bf16 matrices: chosen experts of a buffer `[slots, expert_bytes]` into `[experts, rows, K]`.

Two implementations give the same bits. `decode_plain` is torch alone, on any device: whole planes are taken apart by
shifts, values are made in float32 and rounded once to bf16, as the CPU's kernels do it. On a GPU with Triton
`dequantize_triton.py` does it in one pass for the kinds of elements and scales that it has a kernel for. A value is
`number * scale`, or `number * scale + offset` in separate operators, because a fused multiply-add would round once less
and give another number. Numbers are told by the kind of elements, scales and offsets by the kind of scales: a format of
known kinds needs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ktransformers.ground.current_device import on_device
from ktransformers.ground.packages import import_triton_module
from ktransformers.quantized.gpu.dequantize_bf16_12 import bf16_12_values
from ktransformers.quantized.gpu.dequantize_grids import grid_values, rows_of_tiles
from ktransformers.quantized.gpu.layout import (
    SIZES,
    TILE_BYTES,
    TILE_K,
    TILE_N,
    Field,
    PackedMatrix,
    Strip,
    StripFormat,
)

TRITON = "ktransformers.quantized.gpu.dequantize_triton"

Fields = list[Tensor]  # float32 or integers, [..., 16, spans, count]
DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "u16": torch.int16,
    "u8": torch.uint8,
    "i8": torch.int8,
}
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def decode(packed: Tensor, slots: Sequence[int], where: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
    """`packed` uint8 `[slots, expert_bytes]`, `out` bf16 `[G, out_rows, K]`; `where` is `slots` as int32 `[G]` on the
    device, because asking it for them would wait. Triton's decoder also takes int64: bytes from the beginning of
    `packed` to experts that may lie outside of it."""
    if packed.is_cuda and (kernels := import_triton_module(TRITON)) is not None and kernels.supports(matrix):
        with on_device(packed.device):
            kernels.decode(packed, where, matrix, out)
        return
    for place, slot in enumerate(slots):  # one at a time: float32 in between is many times as large
        decode_plain(packed[slot], matrix, out[place])


def decode_plain(packed: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
    """One expert: `[expert_bytes]` into `[out_rows, K]`."""
    blocks = packed.view(matrix.blocks, matrix.block_bytes)
    for half in range(2):
        values = _plain_half(blocks, matrix, half) if matrix.plain else _strip_half(blocks, matrix, half)
        rows = values[..., : matrix.columns]
        if matrix.paired:
            out[half * matrix.rows : (half + 1) * matrix.rows] = rows.reshape(-1, matrix.columns)[: matrix.rows]
            continue
        for first in range(TILE_N):  # rows of a half lie 32 apart
            target = out[half * TILE_N + first :: 2 * TILE_N]
            target.copy_(rows[: target.shape[0], first])


def _plain_half(blocks: Tensor, matrix: PackedMatrix, half: int) -> Tensor:
    """bf16 [blocks, 16, K]."""
    tiles = blocks[:, : 2 * matrix.k_tiles * TILE_BYTES].view(torch.bfloat16)
    tiles = tiles.view(matrix.blocks, matrix.k_tiles, 2, TILE_K // 2, TILE_N, 2)[:, :, half]
    return tiles.permute(0, 3, 1, 2, 4).reshape(matrix.blocks, TILE_N, matrix.k_tiles * TILE_K)


def _strip_half(blocks: Tensor, matrix: PackedMatrix, half: int) -> Tensor:
    """bf16 [blocks, 16, K]."""
    strip, form = matrix.strip(half), matrix.strip(half).format
    start = matrix.strip_at(half)
    strips = blocks[:, start : start + strip.bytes]
    if form.element == "bf16_12":
        return bf16_12_values(strips, strip)
    row = packed_fields(strips, 0, form.row, 1)
    spans = packed_fields(strips, strip.row_bytes, form.fields, strip.spans) if strip.spans else []
    if form.in_grid:
        return grid_values(form.spec, rows_of_tiles(strips[:, strip.codes_at :], strip), spans).to(torch.bfloat16)
    numbers = ELEMENTS[form.element](form, planes(strips[:, strip.codes_at :], strip))
    scale, offset = SCALES[form.scales](row, spans)
    # Several scales of a span lie one after the other; one of the whole row is broadcast.
    columns, step = numbers.shape[-1], form.span * strip.spans // scale.shape[-1] if form.span else 0
    values = numbers * (_spread(scale, step, columns) if step else scale)
    return (values if offset is None else values + _spread(offset, step, columns)).to(torch.bfloat16)


def planes(quants: Tensor, strip: Strip) -> Tensor:
    """uint8 or int16 [blocks, 16, K] from [blocks, code bytes]: the planes put together, the first one lowest."""
    count, joined, at, low = quants.shape[0], None, 0, 0
    tiles = quants.view(count, strip.k_tiles, 64 * strip.format.bits)
    for bits in strip.format.planes:
        words, width, each = max(1, bits // 2), 4 if bits > 1 else 2, 8 // bits
        raw = tiles[:, :, at : at + 64 * bits].view(count, strip.k_tiles, words, TILE_N, 2, width)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=quants.device)
        cut = (raw.unsqueeze(-1) >> shifts) & (2**bits - 1) if each > 1 else raw.unsqueeze(-1)
        # [blocks, k_tiles, words, n, parity, bytes, quants] -> k = tile, word, byte, code, parity
        plane = cut.permute(0, 3, 1, 2, 5, 6, 4).reshape(count, TILE_N, strip.k_tiles * TILE_K)
        joined = plane if joined is None else joined | (plane << low)
        at, low = at + 64 * bits, low + bits
    assert joined is not None
    return joined


def packed_planes(quants: Tensor, strip: Strip) -> Tensor:
    """The inverse of `planes`: uint8 [blocks, code bytes]."""
    count, parts, low = quants.shape[0], [], 0
    for bits in strip.format.planes:
        words, width, each = max(1, bits // 2), 4 if bits > 1 else 2, 8 // bits
        cut = ((quants >> low) & (2**bits - 1)).view(count, TILE_N, strip.k_tiles, words, width, each, 2)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=quants.device)
        raw = (cut.permute(0, 2, 3, 1, 6, 4, 5) << shifts).sum(-1, dtype=torch.uint8)
        parts.append(raw.reshape(count, strip.k_tiles, 64 * bits))
        low += bits
    return torch.cat(parts, dim=2).flatten(1)


def packed_fields(strips: Tensor, start: int, fields: Sequence[Field], spans: int) -> Fields:
    """Each as [blocks, 16 or 1, spans, count], in float32 where it is a float."""
    values, at, step = [], 0, sum(field.bytes for field in fields)
    area = strips[:, start : start + spans * step].reshape(strips.shape[0], spans, step)
    for field in fields:
        entries = 1 if field.shared else TILE_N
        raw = area[:, :, at : at + field.bytes].contiguous().view(DTYPES[field.kind])
        value = raw.view(strips.shape[0], spans, field.count, entries).permute(0, 3, 1, 2)
        values.append(value.float() if field.kind in ("f32", "f16", "bf16") else value)
        at += SIZES[field.kind] * field.count * entries
    return values


def put_fields(strips: Tensor, start: int, fields: Sequence[Field], values: Fields) -> None:
    """The inverse of `packed_fields`, into `strips`."""
    at, step = 0, sum(field.bytes for field in fields)
    for field, value in zip(fields, values, strict=True):
        spans = value.shape[2]
        raw = value.permute(0, 2, 3, 1).to(DTYPES[field.kind]).flatten().view(torch.uint8)
        area = strips[:, start : start + spans * step].view(-1, spans, step)
        area[:, :, at : at + field.bytes] = raw.view(-1, spans, field.bytes)
        at += field.bytes


def _spread(value: Tensor, span: int, columns: int) -> Tensor:
    """[blocks, 16, n], one number for each `span` columns -> [blocks, 16, columns]."""
    return value.repeat_interleave(span, dim=-1)[..., :columns]


def e2m1(quants: Tensor) -> Tensor:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device=quants.device)
    return table[quants.int()]


def e4m3(quants: Tensor) -> Tensor:
    return quants.contiguous().view(torch.float8_e4m3fn).float()


def e8m0(scales: Tensor) -> Tensor:
    """2^(s - 127); 255 is not a number."""
    bits = scales.int() << 23
    bits = torch.where(scales == 0, torch.full_like(bits, 1 << 22), bits)
    return torch.where(scales == 255, torch.full_like(bits, 0x7FC00000), bits).view(torch.float32)


def _iq4(quants: Tensor) -> Tensor:
    return torch.tensor(IQ4, dtype=torch.float32, device=quants.device)[quants.int()]


# float32 values of quants [blocks, 16, K], by the kind of elements.
ELEMENTS: dict[str, Callable[[StripFormat, Tensor], Tensor]] = {
    "int8": lambda form, quants: quants.view(torch.int8).float(),
    "uint": lambda form, quants: quants.float() - form.zero_point,
    "e4m3": lambda form, quants: e4m3(quants),
    "e2m1": lambda form, quants: e2m1(quants),
    "iq4": lambda form, quants: _iq4(quants),
}

# Scales [blocks, 16, n] and what is added, n numbers of a row that share K evenly.
Scaled = tuple[Tensor, Tensor | None]


def _floats(row: Fields, spans: Fields) -> Scaled:
    return (spans or row)[0][..., 0], None


def _e8m0(row: Fields, spans: Fields) -> Scaled:
    return e8m0(spans[0][..., 0]), None


def _e4m3(row: Fields, spans: Fields) -> Scaled:
    return e4m3(spans[0]).flatten(-2) * row[0][..., 0], None


def _scale_and_min(row: Fields, spans: Fields) -> Scaled:
    return spans[0][..., 0], spans[1][..., 0]


def _scale_and_zero(row: Fields, spans: Fields) -> Scaled:
    scale, zero = (field[..., 0] for field in spans or row)
    return scale, -(zero.float() * scale)


def _q2_k(row: Fields, spans: Fields) -> Scaled:
    packed, d, dmin = spans
    return (d * (packed & 15).float()).flatten(-2), -(dmin * (packed >> 4).float()).flatten(-2)


def q3_k_scales(packed: Tensor) -> Tensor:
    """Sixteen of 6 bits, from 0, in 12 bytes -> int32 [..., 16]."""
    low, high = packed.int()[..., :8], packed.int()[..., 8:]
    nibbles = torch.cat((low & 15, low >> 4), dim=-1)
    pairs = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    return nibbles | (pairs << 4)


def packed_q3_k_scales(scales: Tensor) -> Tensor:
    """The inverse of `q3_k_scales`."""
    low = (scales[..., :8] & 15) | ((scales[..., 8:] & 15) << 4)
    pairs = (scales >> 4).view(*scales.shape[:-1], 4, 4)
    return torch.cat(
        (low, pairs[..., 0, :] | (pairs[..., 1, :] << 2) | (pairs[..., 2, :] << 4) | (pairs[..., 3, :] << 6)), dim=-1
    )


def _q3_k(row: Fields, spans: Fields) -> Scaled:
    return (spans[1] * (q3_k_scales(spans[0]) - 32).float()).flatten(-2), None


def q4_k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of 6 bits in 12 bytes -> int32 [..., 8] each."""
    s, m, high = (packed.int()[..., at : at + 4] for at in (0, 4, 8))
    scale = torch.cat((s & 63, (high & 15) | ((s >> 2) & 48)), dim=-1)
    least = torch.cat((m & 63, (high >> 4) | ((m >> 2) & 48)), dim=-1)
    return scale, least


def packed_q4_k_scales(scale: Tensor, least: Tensor) -> Tensor:
    """The inverse of `q4_k_scales`."""
    first, second = (part[..., :4] | ((part[..., 4:] & 48) << 2) for part in (scale, least))
    return torch.cat((first, second, (scale[..., 4:] & 15) | ((least[..., 4:] & 15) << 4)), dim=-1)


def _q4_k(row: Fields, spans: Fields) -> Scaled:
    d, dmin, packed = spans
    scale, least = q4_k_scales(packed)
    return (d * scale.float()).flatten(-2), -(dmin * least.float()).flatten(-2)


def _q6_k(row: Fields, spans: Fields) -> Scaled:
    scale, d = spans
    return (d * scale.float()).flatten(-2), None


def _iq4_xs(row: Fields, spans: Fields) -> Scaled:
    d, high, low = spans[0], spans[1].int() & 0xFFFF, spans[2].int()
    nibbles = torch.stack((low & 15, low >> 4), dim=-1).flatten(-2)
    pairs = torch.cat([(high >> shift) & 3 for shift in range(0, 16, 2)], dim=-1)
    return (d * ((nibbles | (pairs << 4)) - 32).float()).flatten(-2), None


SCALES: dict[str, Callable[[Fields, Fields], Scaled]] = {
    "floats": _floats,
    "e8m0": _e8m0,
    "e4m3": _e4m3,
    "scale_and_min": _scale_and_min,
    "scale_and_zero": _scale_and_zero,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q6_k": _q6_k,
    "iq4_xs": _iq4_xs,
}
