"""GGUF types whose quants are indices into a grid, in torch: rows of bytes `[blocks, 16, k_tiles, bytes]` into values
`[blocks, 16, K]`.

An entry of a grid is four or eight quants, a code one of 16 levels, and the value `d (2 s + 1) level`, exact in
float32. Grids are the native core's (`_core.grid`), so that there is one copy of them. Signs that are stored in seven
bits for eight values are expanded without a table, because the eighth is their parity."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.quantized.gpu.layout import TILE_K, TILE_N, Strip

Fields = list[Tensor]  # [blocks, 16, spans, count]
SPAN_TILES = 8
EVEN, ODD = 0, 16  # bits of an entry from which quants of even and of odd columns lie


def rows_of_tiles(quants: Tensor, strip: Strip) -> Tensor:
    """uint8 [blocks, 16, k_tiles, bytes] from [blocks, code bytes]."""
    count = quants.shape[0]
    return quants.reshape(count, strip.k_tiles, TILE_N, 4 * strip.format.bits).permute(0, 2, 1, 3)


@functools.cache
def _tables(spec: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Entries in int32, levels in float32."""
    entries, levels = _core.grid(spec)
    return torch.tensor(entries.view("int32"), device=device), torch.tensor(levels, device=device)


def _steps(values: range | list[int], like: Tensor) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=like.device)


def _codes(spec: str, indices: Tensor, each: int) -> Tensor:
    """[..., k_tiles, 32 / each] indices into the grid -> [..., k_tiles, 32] quants."""
    entries = _tables(spec, indices.device)[0][indices]
    shifts = _steps([column // 2 * 4 + (ODD if column % 2 else EVEN) for column in range(each)], indices)
    return ((entries.unsqueeze(-1) >> shifts) & 15).flatten(-2)


def _bits(signs: Tensor) -> Tensor:
    """[..., k_tiles, 4] bytes -> [..., k_tiles, 32], 8 where a sign is minus."""
    return (((signs.int().unsqueeze(-1) >> _steps(range(8), signs)) & 1) << 3).flatten(-2)


def _expand_signs(words: Tensor) -> Tensor:
    """[..., k_tiles, 4] numbers of seven bits -> their signs; the eighth makes the number of minus signs even."""
    parity = words ^ (words >> 4)
    parity = parity ^ (parity >> 2)
    return _bits(words | (((parity ^ (parity >> 1)) & 1) << 7))


def _words(quants: Tensor) -> Tensor:
    """[..., 4] bytes -> [...] int32."""
    return quants.contiguous().view(torch.int32).squeeze(-1)


def _by_tile(field: Tensor) -> Tensor:
    """[..., spans, 8] -> [..., k_tiles]."""
    return field.int().flatten(-2)


def _nibbles(packed: Tensor) -> Tensor:
    """[...] bytes -> [..., 2]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1)


def _values(spec: str, quants: Tensor, scales: Tensor, d: Tensor) -> Tensor:
    """`quants` [..., k_tiles, 32], `scales` s [..., k_tiles, 1 or 2], `d` float32 [..., spans]."""
    scale = d.repeat_interleave(SPAN_TILES, dim=-1).unsqueeze(-1) * (2 * scales + 1).float()
    levels = _tables(spec, quants.device)[1][quants]
    return (levels * scale.repeat_interleave(TILE_K // scales.shape[-1], dim=-1)).flatten(-2)


def _iq2_xxs(quants: Tensor, spans: Fields) -> Tensor:
    words = _words(quants[..., 4:])
    signs = _expand_signs((words.unsqueeze(-1) >> _steps(range(0, 28, 7), words)) & 127)
    codes_of_tile = _codes("iq2_xxs", quants[..., :4].int(), 8) | signs
    return _values("iq2_xxs", codes_of_tile, ((words >> 28) & 15).unsqueeze(-1), spans[0][..., 0])


def _iq2_xs(quants: Tensor, spans: Fields) -> Tensor:
    halves = quants.contiguous().view(torch.int16).int() & 0xFFFF
    codes_of_tile = _codes("iq2_xs", halves & 511, 8) | _expand_signs(halves >> 9)
    return _values("iq2_xs", codes_of_tile, _nibbles(_by_tile(spans[1])), spans[0][..., 0])


def _iq2_s(quants: Tensor, spans: Fields) -> Tensor:
    high = (_by_tile(spans[1]).unsqueeze(-1) >> _steps(range(0, 8, 2), quants)) & 3
    codes_of_tile = _codes("iq2_s", quants[..., :4].int() | (high << 8), 8) | _bits(quants[..., 4:])
    return _values("iq2_s", codes_of_tile, _nibbles(_by_tile(spans[2])), spans[0][..., 0])


def _iq3_xxs(quants: Tensor, spans: Fields) -> Tensor:
    words = _words(quants[..., 8:])
    signs = _expand_signs((words.unsqueeze(-1) >> _steps(range(0, 28, 7), words)) & 127)
    codes_of_tile = _codes("iq3_xxs", quants[..., :8].int(), 4) | signs
    return _values("iq3_xxs", codes_of_tile, ((words >> 28) & 15).unsqueeze(-1), spans[0][..., 0])


def _iq3_s(quants: Tensor, spans: Fields) -> Tensor:
    high = (_by_tile(spans[1]).unsqueeze(-1) >> _steps(range(8), quants)) & 1
    codes_of_tile = _codes("iq3_s", quants[..., :8].int() | (high << 8), 4) | _bits(quants[..., 8:])
    scales = _nibbles(spans[2].int()).flatten(-3).unsqueeze(-1)
    return _values("iq3_s", codes_of_tile, scales, spans[0][..., 0])


def _iq1_s(quants: Tensor, spans: Fields) -> Tensor:
    words = _by_tile(spans[1]) & 0xFFFF
    high = (words.unsqueeze(-1) >> _steps(range(0, 12, 3), words)) & 7
    below = ((words >> 15) << 3).unsqueeze(-1)
    codes_of_tile = _codes("iq1_s", quants.int() | (high << 8), 8) | below
    return _values("iq1_s", codes_of_tile, ((words >> 12) & 7).unsqueeze(-1), spans[0][..., 0])


def _iq1_m(quants: Tensor, spans: Fields) -> Tensor:
    # Two bytes a tile, a nibble for every eight columns; four words of scales with a quarter of d each at the top.
    high = _nibbles(spans[0].int()).reshape(*quants.shape[:3], 4)
    words = spans[1].int() & 0xFFFF
    d = ((words >> 12) << _steps(range(0, 16, 4), words)).sum(-1).to(torch.int16).view(torch.float16).float()
    scales = (words.unsqueeze(-1) >> _steps(range(0, 12, 3), words)) & 7
    codes_of_tile = _codes("iq1_m", quants.int() | ((high & 7) << 8), 8) | (high & 8).repeat_interleave(8, dim=-1)
    return _values("iq1_m", codes_of_tile, scales.reshape(*quants.shape[:3], 2), d)


def _tq1_0(quants: Tensor, spans: Fields) -> Tensor:
    """Of each tile even and odd columns apart: ten trits in its own two bytes, five in the header and a last one."""
    powers, tiles = _steps([1, 3, 9, 27, 81], quants), quants.shape[:3]

    def trits(packed: Tensor) -> Tensor:
        return (packed.int().unsqueeze(-1) // powers) % 3

    own = trits(quants).reshape(*tiles, 2, 10)
    more = trits(spans[0]).reshape(*tiles, 2, 5)
    last = trits(spans[1])[..., :4].reshape(*tiles, 2, 1)
    codes_of_tile = torch.cat((own, more, last), dim=-1).transpose(-1, -2).flatten(-2)
    return _values("tq1_0", codes_of_tile, torch.zeros_like(codes_of_tile[..., :1]), spans[2][..., 0])


DECODERS: dict[str, Callable[[Tensor, Fields], Tensor]] = {
    "tq1_0": _tq1_0,
    "iq1_s": _iq1_s,
    "iq1_m": _iq1_m,
    "iq2_xxs": _iq2_xxs,
    "iq2_xs": _iq2_xs,
    "iq2_s": _iq2_s,
    "iq3_xxs": _iq3_xxs,
    "iq3_s": _iq3_s,
}


def grid_values(spec: str, quants: Tensor, spans: Fields) -> Tensor:
    """float32 [blocks, 16, K] from the rows of tiles and the fields of spans."""
    return DECODERS[spec](quants, spans)
