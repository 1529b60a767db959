"""bf16:12 in torch, on any device: low bytes, high bytes by index, patches, in the order of `csrc/kernels/bf16_12.h`.
The result has the bits of the bf16 numbers that were packed."""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.quantized.gpu.layout import TILE_K, TILE_N, Strip

LOW_BYTES = TILE_K * TILE_N  # of a k tile; the indices follow
NO_PATCH = -1


def _in_tile_order(values: Tensor) -> Tensor:
    """[blocks, k_tiles, 512] in stored order -> in the order of tiles of bf16 pairs: 16 rows of 32."""
    blocks, k_tiles, _ = values.shape
    # [two rows, quarter, row of the two, value] -> [two rows, row of the two, quarter, value]
    return values.reshape(blocks, k_tiles, 8, 4, 2, 8).transpose(3, 4).reshape(blocks, k_tiles, LOW_BYTES)


def _high_bytes(strips: Tensor, strip: Strip, quants: Tensor) -> Tensor:
    """uint8 [blocks, k_tiles * 512] in the order of tiles."""
    count, k_tiles = quants.shape[:2]
    tables = strips[:, : strip.spans * strip.span_bytes].reshape(count, strip.spans, strip.span_bytes)
    tables = tables.repeat_interleave(strip.format.span // TILE_K, dim=1)[:, :k_tiles]
    pairs = quants[:, :, LOW_BYTES:].reshape(count, k_tiles, 4, 64)
    indices = torch.stack((pairs & 15, pairs >> 4), dim=3).reshape(count, k_tiles, LOW_BYTES)
    high = tables.gather(2, _in_tile_order(indices).long()).reshape(count, k_tiles * LOW_BYTES)
    area = strips[:, strip.patches_at : strip.patches_at + 4 * strip.patches]
    patches = area.contiguous().view(torch.int32).view(count, strip.patches).long()
    # Patches that are not used go to one more value, so that their number is not asked for.
    at = torch.where(patches == NO_PATCH, high.shape[1], (patches >> 8) & 0xFFFFFF)
    room = torch.cat((high, high.new_zeros(count, 1)), dim=1)
    return room.scatter_(1, at, (patches & 255).to(torch.uint8))[:, :-1]


def bf16_12_values(strips: Tensor, strip: Strip) -> Tensor:
    """bf16 [blocks, 16, K] from [blocks, bytes of a strip]."""
    count, k_tiles = strips.shape[0], strip.k_tiles
    quants = strips[:, strip.codes_at :].reshape(count, k_tiles, LOW_BYTES * 3 // 2)
    low = _in_tile_order(quants[:, :, :LOW_BYTES]).reshape(count, -1)
    values = torch.stack((low, _high_bytes(strips, strip, quants)), dim=-1).view(torch.bfloat16)
    tiles = values.view(count, k_tiles, TILE_K // 2, TILE_N, 2)
    return tiles.permute(0, 3, 1, 2, 4).reshape(count, TILE_N, k_tiles * TILE_K)
