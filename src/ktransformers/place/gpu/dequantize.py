"""Packed bytes into bf16 matrices: for chosen experts of a buffer `[slots, expert_bytes]` into `[experts, rows, K]`.

Two ways to the same bits. `decode_plain` is torch alone, on any device: whole planes are taken apart by shifts, values
are made in float32 and rounded once to bf16, as the CPU's kernels do it. On a GPU with Triton `kernels.py` does it in
one pass for the formats that it knows. The surprising decision: multiplications and additions stand in separate
operators in the order of the format's definition, because a fused one would round once less and be another number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ktransformers.place.gpu.dequantize_grids import VALUES_IN_ROWS, rows_of_tiles
from ktransformers.place.gpu.layout import SIZES, TILE_BYTES, TILE_K, TILE_N, Field, PackedMatrix, Strip, StripFormat
from ktransformers.triton_modules import import_triton_module

TRITON = "ktransformers.place.gpu.dequantize_triton"

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
    if packed.is_cuda and (kernels := import_triton_module(TRITON)) is not None and kernels.knows(matrix):
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
    strip = matrix.strip(half)
    start = matrix.strip_at(half)
    found = blocks[:, start : start + strip.bytes]
    codes = (rows_of_tiles if strip.format.in_rows else planes)(found[:, strip.codes_at :], strip)
    row = _fields(found, 0, strip.format.row, 1)
    spans = _fields(found, strip.row_bytes, strip.format.fields, strip.spans) if strip.spans else []
    return _values(strip.format)(codes, row, spans).to(torch.bfloat16)


def planes(codes: Tensor, strip: Strip) -> Tensor:
    """uint8 or int16 [blocks, 16, K] from [blocks, code bytes]: the planes put together, the first one lowest."""
    count, found, at, low = codes.shape[0], None, 0, 0
    tiles = codes.view(count, strip.k_tiles, 64 * strip.format.bits)
    for bits in strip.format.planes:
        words, width, each = max(1, bits // 2), 4 if bits > 1 else 2, 8 // bits
        raw = tiles[:, :, at : at + 64 * bits].view(count, strip.k_tiles, words, TILE_N, 2, width)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
        cut = (raw.unsqueeze(-1) >> shifts) & (2**bits - 1) if each > 1 else raw.unsqueeze(-1)
        # [blocks, k_tiles, words, n, parity, bytes, codes] -> k = tile, word, byte, code, parity
        plane = cut.permute(0, 3, 1, 2, 5, 6, 4).reshape(count, TILE_N, strip.k_tiles * TILE_K)
        found = plane if found is None else found | (plane << low)
        at, low = at + 64 * bits, low + bits
    assert found is not None
    return found


def _fields(strips: Tensor, start: int, fields: Sequence[Field], spans: int) -> Fields:
    """Each as [blocks, 16 or 1, spans, count], in float32 where it is a float."""
    found, at, step = [], start, sum(field.bytes for field in fields)
    area = strips[:, start : start + spans * step].reshape(strips.shape[0], spans, step)
    at = 0
    for field in fields:
        entries = 1 if field.shared else TILE_N
        raw = area[:, :, at : at + field.bytes].contiguous().view(DTYPES[field.kind])
        value = raw.view(strips.shape[0], spans, field.count, entries).permute(0, 3, 1, 2)
        found.append(value.float() if field.kind in ("f32", "f16", "bf16") else value)
        at += SIZES[field.kind] * field.count * entries
    return found


def _spread(value: Tensor, span: int, columns: int) -> Tensor:
    """[blocks, 16, n] for every n-th stretch of `span` columns -> [blocks, 16, columns]."""
    return value.repeat_interleave(span, dim=-1)[..., :columns]


Values = Callable[[Tensor, Fields, Fields], Tensor]


def _values(form: StripFormat) -> Values:
    word = form.spec.partition(":")[0]
    return functools.partial(VALUES[word], form.span)


def e2m1(codes: Tensor) -> Tensor:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device=codes.device)
    return table[codes.int()]


def e4m3(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.float8_e4m3fn).float()


def e8m0(scales: Tensor) -> Tensor:
    """2^(s - 127); 255 is not a number."""
    bits = scales.int() << 23
    bits = torch.where(scales == 0, torch.full_like(bits, 1 << 22), bits)
    return torch.where(scales == 255, torch.full_like(bits, 0x7FC00000), bits).view(torch.float32)


def _scaled(span: int, values: Tensor, row: Fields, spans: Fields) -> Tensor:
    scale = row[0] if row else spans[0]
    return values * (_spread(scale[..., 0], span, values.shape[-1]) if span else scale[..., 0])


def _int8(span: int, codes: Tensor, row: Fields, spans: Fields) -> Tensor:
    return _scaled(span, codes.view(torch.int8).float(), row, spans)


def _int4(span: int, codes: Tensor, row: Fields, spans: Fields) -> Tensor:
    return _scaled(span, codes.float() - 8, row, spans)


def _fp8(span: int, codes: Tensor, row: Fields, spans: Fields) -> Tensor:
    return _scaled(span, e4m3(codes), row, spans)


def _mxfp8(span: int, codes: Tensor, row: Fields, spans: Fields) -> Tensor:
    return _scaled(span, e4m3(codes), row, [e8m0(spans[0])])


def _mxfp4(span: int, codes: Tensor, row: Fields, spans: Fields) -> Tensor:
    return _scaled(span, e2m1(codes), row, [e8m0(spans[0])])


def _nvfp4(span: int, codes: Tensor, row: Fields, spans: Fields) -> Tensor:
    scale = e4m3(spans[0]).flatten(-2) * row[0][..., 0]
    return e2m1(codes) * _spread(scale, span // 2, codes.shape[-1])


def _plus(value: int, span: int, codes: Tensor, row: Fields, spans: Fields) -> Tensor:
    return _scaled(span, codes.float() + value, row, spans)


def _offset(span: int, codes: Tensor, row: Fields, spans: Fields) -> Tensor:
    return _scaled(span, codes.float(), row, spans) + _spread(spans[1][..., 0], span, codes.shape[-1])


def _iq4(codes: Tensor) -> Tensor:
    return torch.tensor(IQ4, dtype=torch.float32, device=codes.device)[codes.int()]


def _iq4_nl(span: int, codes: Tensor, row: Fields, spans: Fields) -> Tensor:
    return _scaled(span, _iq4(codes), row, spans)


def _six_bits(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of 6 bits from 12 bytes [..., 12]: q4_k and q5_k."""
    d, m, high = (scales.int()[..., at : at + 4] for at in (0, 4, 8))
    scale = torch.cat((d & 63, (high & 15) | ((d >> 2) & 48)), dim=-1)
    least = torch.cat((m & 63, (high >> 4) | ((m >> 2) & 48)), dim=-1)
    return scale.float(), least.float()


def _q45_k(span: int, codes: Tensor, row: Fields, spans: Fields) -> Tensor:
    d, dmin, packed = spans
    scale, least = _six_bits(packed)
    columns = codes.shape[-1]
    slope, low = (d * scale).flatten(-2), (dmin * least).flatten(-2)
    return _spread(slope, span // 8, columns) * codes.float() - _spread(low, span // 8, columns)


def _q2_k(span: int, codes: Tensor, row: Fields, spans: Fields) -> Tensor:
    packed, d, dmin = spans
    columns = codes.shape[-1]
    slope, low = (d * (packed & 15).float()).flatten(-2), (dmin * (packed >> 4).float()).flatten(-2)
    return _spread(slope, span // 16, columns) * codes.float() - _spread(low, span // 16, columns)


def _q3_k(span: int, codes: Tensor, row: Fields, spans: Fields) -> Tensor:
    packed, d = spans[0].int(), spans[1]
    low, high = packed[..., :8], packed[..., 8:]
    nibbles = torch.cat((low & 15, low >> 4), dim=-1)
    pairs = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    scale = ((nibbles | (pairs << 4)) - 32).float()
    return _spread((d * scale).flatten(-2), span // 16, codes.shape[-1]) * (codes.float() - 4)


def _q6_k(span: int, codes: Tensor, row: Fields, spans: Fields) -> Tensor:
    scale, d = spans
    return _spread((d * scale.float()).flatten(-2), span // 16, codes.shape[-1]) * (codes.float() - 32)


def _iq4_xs(span: int, codes: Tensor, row: Fields, spans: Fields) -> Tensor:
    d, high, low = spans[0], spans[1].int() & 0xFFFF, spans[2].int()
    nibbles = torch.stack((low & 15, low >> 4), dim=-1).flatten(-2)
    pairs = torch.cat([(high >> shift) & 3 for shift in range(0, 16, 2)], dim=-1)
    scale = ((nibbles | (pairs << 4)) - 32).float()
    return _spread((d * scale).flatten(-2), span // 8, codes.shape[-1]) * _iq4(codes)


VALUES: dict[str, Callable[[int, Tensor, Fields, Fields], Tensor]] = {
    "int8": _int8,
    "int4": _int4,
    "fp8": _fp8,
    "mxfp8": _mxfp8,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "q8_0": _int8,
    "q4_0": functools.partial(_plus, -8),
    "q4_1": _offset,
    "q5_0": functools.partial(_plus, -16),
    "q5_1": _offset,
    "iq4_nl": _iq4_nl,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q45_k,
    "q5_k": _q45_k,
    "q6_k": _q6_k,
    "iq4_xs": _iq4_xs,
    "tq2_0": functools.partial(_plus, -1),
    **VALUES_IN_ROWS,
}
