"""Decode attention over slots that are found by address, so that a CUDA graph can replay it.

The inputs of a step are a table on the device (`step_table.py`). When slots grow or change, the table changes and the
graph stays. An inactive row reads and writes no slot; its output is zero.

query `[heads, R, d]`, key `[kv, R, d]`, value `[kv, R, dv]` -> `[R, heads, dv]`; the new key and value are written into
the slot. Of latents (`engine/latent.py`) there is one head of keys, whose beginning is the value. On a GPU Triton
kernels compute it (`decode_attention_triton.py`, `decode_latents_triton.py`); on the CPU, for tests, torch reads the
same addresses.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ktransformers.serve.engine.attention import AttentionSpec
from ktransformers.serve.graphs.step_table import ACTIVE, CAPACITY, POSITION, CacheLines
from ktransformers.triton_modules import import_triton_module

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


def attend_latents(table: Tensor, line: int, spec: AttentionSpec, query: Tensor, key: Tensor) -> Tensor:
    """Absorbed queries `[heads, R, rank + rope]` and new latents `[1, R, rank + rope]` -> weighted sums of latents
    `[R, heads, rank]`. `line`: of the addresses."""
    assert spec.latent is not None
    kernels = import_triton_module(TRITON_LATENTS) if query.is_cuda else None
    if kernels is None:
        return _attend_in_torch(table, CacheLines(line, line), spec, query, key, key)[..., : spec.latent.rank]
    output: Tensor = kernels.attend(table, line, spec, query, key)
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
        keys, values = (
            _tensor_at(column[line], like.shape[0], column[CAPACITY], like)
            for line, like in ((lines.keys, key), (lines.values, value))
        )
        position = column[POSITION]
        keys[:, position], values[:, position] = key[:, row], value[:, row]
        start = 0 if spec.window is None else max(0, position + 1 - spec.window)
        visible = slice(start, position + 1)
        grouped = query[:, row].reshape(keys.shape[0], -1, query.shape[2]).float()
        scores = grouped @ keys[:, visible].float().transpose(1, 2) * spec.scale
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if spec.sinks is not None:
            scores = torch.cat([scores, spec.sinks.float().reshape(*scores.shape[:2], 1)], dim=-1)
        weights = scores.softmax(-1)[..., : position + 1 - start]
        out[row] = (weights @ values[:, visible].float()).reshape(heads, -1)
    return out


def _tensor_at(address: int, heads: int, capacity: int, like: Tensor) -> Tensor:
    """A view `[heads, capacity, d]` of the memory at `address`, which its slot keeps alive."""
    count = heads * capacity * like.shape[2]
    memory = (ctypes.c_char * (count * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).view(heads, capacity, like.shape[2])
