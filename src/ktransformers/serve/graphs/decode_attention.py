"""New tokens, one a sequence, over slots that are known by their addresses: attention that a CUDA graph can hold.

What a step differs in from the last one is a table, int64 `[FIRST + 2 L, R]` on the device, a column for each row of
the batch: its token, its position, the capacity of its slot, whether anybody asked for it, its adapter (`mixture.py`;
0: none), and then where its keys and its values of every layer begin. Slots grow and come and go; for a graph these are
other numbers of the table. A row that nobody asked for touches no slot and attends to nothing: zeros.

query `[heads, R, d]`, key `[kv, R, d]`, value `[kv, R, dv]` -> `[R, heads, dv]`; the new key and value are written into
the slot. On a GPU two kernels do it (`decode_kernels.py`); elsewhere, for tests, torch reads the same addresses.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.serve.engine.attention import AttentionSpec
from ktransformers.triton_modules import import_triton_module

TRITON = "ktransformers.serve.graphs.decode_attention_triton"

TOKEN, POSITION, CAPACITY, ASKED, ADAPTER, FIRST = range(6)  # lines of the table; the rest are addresses


@dataclass(frozen=True)
class CacheLines:
    """Where a layer's addresses stand in a table: the line of its keys and that of its values."""

    keys: int
    values: int


def table_lines(layers: int) -> int:
    return FIRST + 2 * layers


def runs_on(device: torch.device) -> bool:
    return device.type == "cpu" or (device.type == "cuda" and import_triton_module(TRITON) is not None)


def attend_new(
    table: Tensor, places: CacheLines, kind: AttentionSpec, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    kernels = import_triton_module(TRITON) if query.is_cuda else None
    if kernels is None:
        return _plain(table, places, kind, query, key, value)
    found: Tensor = kernels.attend(table, places, kind, query, key, value)
    return found


def _plain(table: Tensor, places: CacheLines, kind: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads, rows, _ = query.shape
    out = query.new_zeros(rows, heads, value.shape[2])
    for row in range(rows):
        column = table[:, row].tolist()
        if not column[ASKED]:
            continue
        keys, values = (
            _at(column[line], like.shape[0], column[CAPACITY], like)
            for line, like in ((places.keys, key), (places.values, value))
        )
        position = column[POSITION]
        keys[:, position], values[:, position] = key[:, row], value[:, row]
        start = 0 if kind.window is None else max(0, position + 1 - kind.window)
        seen = slice(start, position + 1)
        grouped = query[:, row].reshape(keys.shape[0], -1, query.shape[2]).float()
        scores = grouped @ keys[:, seen].float().transpose(1, 2) * kind.scale
        if kind.softcap:
            scores = kind.softcap * torch.tanh(scores / kind.softcap)
        if kind.sinks is not None:
            scores = torch.cat([scores, kind.sinks.float().reshape(*scores.shape[:2], 1)], dim=-1)
        shares = scores.softmax(-1)[..., : position + 1 - start]
        out[row] = (shares @ values[:, seen].float()).reshape(heads, -1)
    return out


def _at(address: int, heads: int, capacity: int, like: Tensor) -> Tensor:
    """The memory `[heads, capacity, d]` there; whoever gave the address keeps it alive."""
    count = heads * capacity * like.shape[2]
    memory = (ctypes.c_char * (count * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).view(heads, capacity, like.shape[2])
