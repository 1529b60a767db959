"""Decode attention over slots that are found by address, so that a CUDA graph can replay it.

The inputs of a step are a table on the device (`step_table.py`). When slots grow or change, the table changes and the
graph stays. An inactive row reads and writes no slot; its output is zero.

query `[heads, R, d]`, key `[kv, R, d]`, value `[kv, R, dv]` -> `[R, heads, dv]`; the new key and value are written into
the slot, in FP8 where the slot is (`serve/cache/cache_codes.py`), and the row attends to what is stored. Of latents
(`engine/latent.py`) there is one head of keys, whose beginning is the value. On a GPU Triton kernels compute it
(`decode_attention_triton.py`, `decode_latents_triton.py`); on the CPU, for tests, torch reads the same addresses.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from ktransformers.ground.packages import import_triton_module
from ktransformers.serve.attention.attention import AttentionSpec
from ktransformers.serve.cache.cache_codes import CODE_DTYPE, decode, encode
from ktransformers.serve.graphs.step_table import ACTIVE, CAPACITY, POSITION, CacheLines

TRITON = "ktransformers.serve.graphs.decode_attention_triton"
TRITON_LATENTS = "ktransformers.serve.graphs.decode_latents_triton"


def is_supported(device: torch.device) -> bool:
    return device.type == "cpu" or (device.type == "cuda" and import_triton_module(TRITON) is not None)


def attend_new_tokens(
    table: Tensor, lines: CacheLines, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    kernels = import_triton_module(TRITON) if query.is_cuda else None
    if kernels is None:
        return _attend_in_torch(table, lines, spec, query, key, value)
    output: Tensor = kernels.attend(table, lines, spec, query, key, value)
    return output


def attend_latents(table: Tensor, lines: CacheLines, spec: AttentionSpec, query: Tensor, key: Tensor) -> Tensor:
    """Absorbed queries `[heads, R, rank + rope]` and new latents `[1, R, rank + rope]` -> weighted sums of latents
    `[R, heads, rank]`. The lines of values are not read."""
    assert spec.latent is not None
    kernels = import_triton_module(TRITON_LATENTS) if query.is_cuda else None
    if kernels is None:
        both = CacheLines(lines.keys, lines.keys, lines.key_scales, lines.key_scales)
        return _attend_in_torch(table, both, spec, query, key, key)[..., : spec.latent.rank]
    output: Tensor = kernels.attend(table, lines, spec, query, key)
    return output


def _attend_in_torch(
    table: Tensor, lines: CacheLines, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    heads, rows, _ = query.shape
    out = query.new_zeros(rows, heads, value.shape[2])
    for row in range(rows):
        column = table[:, row].tolist()
        if not column[ACTIVE]:
            continue
        position = column[POSITION]
        start = 0 if spec.window is None else max(0, position + 1 - spec.window)
        keys, values = (
            _visible_rows(column, line, scales, new[:, row : row + 1], start)
            for line, scales, new in ((lines.keys, lines.key_scales, key), (lines.values, lines.value_scales, value))
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


def _visible_rows(column: list[int], line: int, scales_line: int | None, new: Tensor, start: int) -> Tensor:
    """Rows from `start` on, after `new` `[heads, 1, d]` was stored behind them."""
    (heads, _, size), position, capacity = new.shape, column[POSITION], column[CAPACITY]
    if scales_line is None:
        rows = _tensor_at(column[line], (heads, capacity, size), new.dtype)
        rows[:, position] = new[:, 0]
        return rows[:, start : position + 1]
    quantized = _tensor_at(column[line], (heads, capacity, size), torch.uint8)
    scales = _tensor_at(column[scales_line], (heads, capacity, 1), torch.uint8)
    new_codes, scales[:, position : position + 1] = encode(new)
    quantized[:, position] = new_codes[:, 0].view(torch.uint8)
    visible = slice(start, position + 1)
    return decode(quantized[:, visible].view(CODE_DTYPE), scales[:, visible], new.dtype)


def _tensor_at(address: int, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """A view of the memory at `address`, which its slot keeps alive."""
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
