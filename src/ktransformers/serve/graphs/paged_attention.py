"""Attention of a step over the blocks of the KV cache, by kernels that find rows and blocks in tables on the device
(`attention/step.py`), so that a CUDA graph can replay it: when sequences grow or change, the tables change and the
graph stays.

query `[heads, R, d]`, key `[kv, R, d]`, value `[kv, R, dv]` -> `[R, heads, dv]`; new keys and values are written into
the blocks, in FP8 where the cache is (`serve/cache/cache_codes.py`), and the rows attend to what is stored. Of latents
there is one head of keys, whose beginning is the value. Rows of no sequence read and write no block. On a GPU Triton
kernels compute it (`paged_attention_triton.py`, `paged_latents_triton.py`); on the CPU, for tests, torch computes the
same from the same tables.

`cache`: keys and values of a layer, `[kv, blocks, BLOCK_TOKENS, d]`, and of FP8 their scales (`BlockMemory.of_layer`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ktransformers.ground.packages import import_triton_module
from ktransformers.serve.attention.spec import AttentionSpec
from ktransformers.serve.attention.step import COUNT, FIRST_BLOCK, FIRST_ROW, POSITION, DeviceStep
from ktransformers.serve.cache.cache_codes import CODE_DTYPE, decode, encode
from ktransformers.serve.cache.kv_cache import BLOCK_TOKENS

TRITON = "ktransformers.serve.graphs.paged_attention_triton"
TRITON_LATENTS = "ktransformers.serve.graphs.paged_latents_triton"


def has_kernels() -> bool:
    return import_triton_module(TRITON) is not None


def is_supported(device: torch.device) -> bool:
    return device.type == "cpu" or (device.type == "cuda" and has_kernels())


def attend(
    step: DeviceStep, cache: Sequence[Tensor], spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    kernels = import_triton_module(TRITON) if query.is_cuda else None
    if kernels is None:
        return _attend_in_torch(step, cache, spec, query, key, value)
    output: Tensor = kernels.attend(step, cache, spec, query, key, value)
    return output


def attend_latents(
    step: DeviceStep, cache: Sequence[Tensor], spec: AttentionSpec, query: Tensor, key: Tensor
) -> Tensor:
    """Absorbed queries `[heads, R, rank + rope]` and new latents `[1, R, rank + rope]` -> weighted sums of latents
    `[R, heads, rank]`, one row a sequence."""
    assert spec.latent is not None
    kernels = import_triton_module(TRITON_LATENTS) if query.is_cuda else None
    if kernels is None:
        return _attend_in_torch(step, cache, spec, query, key, key)[..., : spec.latent.rank]
    output: Tensor = kernels.attend(step.table, cache, spec, query, key)
    return output


def _attend_in_torch(
    step: DeviceStep, cache: Sequence[Tensor], spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    heads, rows, _ = query.shape
    out = query.new_zeros(rows, heads, value.shape[2])
    for column in step.table.T.tolist():
        for at in range(column[COUNT]):
            row, position = column[FIRST_ROW] + at, column[POSITION] + at
            start = spec.first_key(position)
            where = torch.tensor(column[FIRST_BLOCK:]).repeat_interleave(BLOCK_TOKENS) * BLOCK_TOKENS
            where = (where + torch.arange(len(where)) % BLOCK_TOKENS)[start : position + 1]
            keys, values = (
                _visible_rows(held, scales, new[:, row : row + 1], where)
                for held, scales, new in zip(cache[:2], cache[2:] or (None, None), (key, value), strict=True)
            )
            grouped = query[:, row].reshape(keys.shape[0], -1, query.shape[2]).float()
            scores = grouped @ keys.float().transpose(1, 2) * spec.scale
            if spec.softcap:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            if spec.sinks is not None:
                scores = torch.cat([scores, spec.sinks.float().reshape(*scores.shape[:2], 1)], dim=-1)
            weights = scores.softmax(-1)[..., : position + 1 - start]
            out[row] = (weights @ values.float()).reshape(heads, -1)
    return out


def _visible_rows(held: Tensor, scales: Tensor | None, new: Tensor, where: Tensor) -> Tensor:
    """The rows at `where`, after `new` `[heads, 1, d]` was stored in the last of them."""
    held = held.flatten(1, 2)
    if scales is None:
        held[:, where[-1]] = new[:, 0]
        return held[:, where]
    scales, (codes, new_scales) = scales.flatten(1, 2), encode(new)
    held[:, where[-1]], scales[:, where[-1]] = codes[:, 0].view(torch.uint8), new_scales[:, 0]
    return decode(held[:, where].view(CODE_DTYPE), scales[:, where], new.dtype)
