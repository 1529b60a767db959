"""Attention to the keys that an indexer has selected (DeepSeek sparse attention).

An indexer scores all cached tokens of a sequence with small keys of its own and selects k of them for every query
(`indexer.py`). Sequences of at most k tokens have nothing to select and take the ordinary path of `attention.py`. For
the others there are two ways. *Gathered*: the selected keys of every query are copied together, so a new token reads k
of n keys. *Masked*: all keys are read once for all queries of a chunk, and those that a query has not selected are
masked. A chunk takes the way that is estimated to be cheaper; new tokens are always gathered. On the CPU the native
core attends to gathered keys (`native`: it supports their sizes and dtype): torch's masked product in 16 bits is slow
there.

query `[heads, rows, d]`, keys `[kv_heads, n, d]`, selected `[rows, k]` -> `[heads, rows, dv]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ktransformers import _core
from ktransformers.ground.pool import default_pool
from ktransformers.serve.attention.latent import LatentProjection
from ktransformers.serve.cache.kv_cache import BLOCK_TOKENS
from ktransformers.serve.scheduler.lora import LinearLora

MAX_GATHERED = 1 << 24  # numbers of keys that are gathered at a time
GATHER_COST = 2  # of a gathered key, relative to one that is read in order (estimated)


@dataclass(frozen=True)
class Selection:
    """The keys that rows of a batch attend to; rows that are not listed attend to all keys of their sequence."""

    of_rows: Mapping[int, Tensor]  # first row of a span -> [rows, k] positions in its sequence, int64

    def selects(self, first: int) -> bool:
        return first in self.of_rows


@dataclass(frozen=True)
class SelectedRows:
    """Consecutive queries of a sequence, with all of its keys up to the last query."""

    first: int  # row of the batch
    position: int  # of that row in its sequence
    keys: Tensor  # [kv_heads, n, d]
    values: Tensor | None  # [kv_heads, n, dv]; None: the beginning of the keys
    selected: Tensor  # [rows, k]
    lora: LinearLora | None = None  # of the projection of latents

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.selected.shape[0])

    def mask(self) -> Tensor:
        """bool `[rows, n]`. A query at the beginning of a chunk may have fewer than k keys before it: the rest of its
        selection lies after it and does not count."""
        rows, n = self.selected.shape[0], self.keys.shape[1]
        chosen = torch.zeros(rows, n, dtype=torch.bool, device=self.keys.device).scatter_(1, self.selected, True)
        positions = torch.arange(self.position, self.position + rows, device=self.keys.device)
        return chosen & (torch.arange(n, device=self.keys.device) <= positions[:, None])


def attend_gathered(
    query: Tensor,
    spans: Sequence[SelectedRows],
    scale: float,
    value_size: int,
    sinks: Tensor | None = None,
    *,
    native: bool = False,
) -> Tensor:
    """`query` has the rows of `spans`, one span after the other."""
    heads, _, size = query.shape
    if native and all(span.position + 1 >= span.selected.shape[1] for span in spans):  # every selected key counts
        return _attend_in_core(query, spans, scale, value_size)
    outputs, first = [], 0
    for block in _blocks(spans):
        rows = sum(span.selected.shape[0] for span in block)
        keys = torch.cat([span.keys[:, span.selected].transpose(0, 1) for span in block])  # [rows, kv_heads, k, d]
        values = keys[..., :value_size]
        if block[0].values is not None:
            values = torch.cat([_values_of(span)[:, span.selected].transpose(0, 1) for span in block])
        of_rows = query[:, first : first + rows].transpose(0, 1).reshape(rows, keys.shape[1], -1, size)
        mask = torch.cat([span.selected <= _positions(span) for span in block])[:, None, None]
        if sinks is not None:
            keys, values, mask = _append_sinks(keys, values, mask, sinks.to(query.dtype))
        output = scaled_dot_product_attention(of_rows, keys, values, attn_mask=mask, scale=scale)
        outputs.append(output.reshape(rows, heads, value_size))
        first += rows
    return torch.cat(outputs).transpose(0, 1)


def _attend_in_core(query: Tensor, spans: Sequence[SelectedRows], scale: float, value_size: int) -> Tensor:
    """Every row attends to its own copy of the keys that it has selected, in blocks of its own. The core stores the new
    key of a row behind the others: the last of the copies, which is there already."""
    counts = [span.selected.shape[1] for span in spans for _ in span.selected]
    blocks = [-(-count // BLOCK_TOKENS) for count in counts]
    table = np.zeros((len(counts), max(blocks)), np.int32)
    for line, first, count in zip(table, np.cumsum([0, *blocks[:-1]]), blocks, strict=True):
        line[:count] = np.arange(first, first + count)
    sequences = _core.StepSequences(np.arange(len(counts), dtype=np.int32), np.array(counts, np.int32) - 1, table)
    chosen = [(span, row) for span in spans for row in span.selected]
    keys = _in_blocks([span.keys.index_select(1, row) for span, row in chosen])
    cache = keys, keys[..., :value_size]
    if spans[0].values is not None:
        cache = keys, _in_blocks([_values_of(span).index_select(1, row) for span, row in chosen])
    last = [(table[row, count // BLOCK_TOKENS], count % BLOCK_TOKENS) for row, count in enumerate(np.array(counts) - 1)]
    last_keys, last_values = (torch.stack([held[at] for at in _places(last)], dim=1) for held in cache)
    out = query.new_empty(len(counts), query.shape[0], value_size)
    default_pool().attend(query, last_keys, last_values, out, cache, sequences, scale=scale)
    return out.transpose(0, 1)


def _places(last: Sequence[tuple[int, int]]) -> list[tuple[int, slice, int]]:
    return [(int(block), slice(None), int(offset)) for block, offset in last]


def _in_blocks(rows: Sequence[Tensor]) -> Tensor:
    """`[kv_heads, k, d]` of each row, in blocks `[blocks, kv_heads, BLOCK_TOKENS, d]`."""
    padded = [pad(one, (0, 0, 0, -one.shape[1] % BLOCK_TOKENS)) for one in rows]
    return torch.cat([one.view(len(one), -1, BLOCK_TOKENS, one.shape[2]).transpose(0, 1) for one in padded])


def _values_of(span: SelectedRows) -> Tensor:
    assert span.values is not None
    return span.values


def _positions(span: SelectedRows) -> Tensor:
    rows = span.selected.shape[0]
    return torch.arange(span.position, span.position + rows, device=span.selected.device)[:, None]


def _append_sinks(keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A key of zeros whose score is the sink of the head, and a value of zeros."""
    kv_heads = keys.shape[1]
    bias = torch.zeros(mask.shape, dtype=keys.dtype, device=keys.device).masked_fill_(~mask, -torch.inf)
    bias = bias.expand(-1, kv_heads, sinks.shape[0] // kv_heads, -1)
    sink = sinks.view(1, kv_heads, -1, 1).expand(bias.shape[0], -1, -1, 1)
    padded = [torch.cat([rows, torch.zeros_like(rows[..., :1, :])], dim=-2) for rows in (keys, values)]
    return padded[0], padded[1], torch.cat([bias, sink], dim=-1)


def _blocks(spans: Sequence[SelectedRows]) -> list[list[SelectedRows]]:
    """The same rows in the same order, at most MAX_GATHERED numbers in a block; all spans of a block have one k."""
    blocks: list[list[SelectedRows]] = []
    free, k = 0, -1
    for span in spans:
        row_size = span.selected.shape[1] * span.keys.shape[0] * span.keys.shape[2]
        step = max(1, MAX_GATHERED // row_size)
        for at in range(0, span.selected.shape[0], step):
            selected = span.selected[at : at + step]
            piece = SelectedRows(span.first + at, span.position + at, span.keys, span.values, selected, span.lora)
            if selected.shape[0] * row_size > free or selected.shape[1] != k:
                blocks.append([])
                free, k = MAX_GATHERED, selected.shape[1]
            blocks[-1].append(piece)
            free -= selected.shape[0] * row_size
    return blocks


def attend_masked(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    output = scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
    )
    return output[0]


def attend_selected(
    spans: Sequence[SelectedRows],
    query: Tensor,
    out: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    *,
    native: bool = False,
) -> None:
    """Writes the rows of `spans`; query `[heads, T, d]`, out `[T, heads, dv]`."""
    gathered = [span for span in spans if sinks is not None or _prefers_gathered(span)]
    if gathered:
        rows = _row_indices(gathered, query.device)
        output = attend_gathered(query[:, rows], gathered, scale, out.shape[2], sinks, native=native)
        out[rows] = output.transpose(0, 1)
    for span in (span for span in spans if sinks is None and not _prefers_gathered(span)):
        output = attend_masked(query[:, span.rows], span.keys, _values_of(span), span.mask(), scale)
        out[span.rows] = output.transpose(0, 1)


def attend_selected_latents(
    latent: LatentProjection,
    spans: Sequence[SelectedRows],
    query: Tensor,
    out: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    *,
    native: bool = False,
) -> None:
    """The same over latents, absorbed where keys are gathered and expanded where they are masked."""
    gathered = [span for span in spans if sinks is not None or _prefers_absorbed(latent, span)]
    if gathered:
        rows = _row_indices(gathered, query.device)
        loras, at = [], 0
        for span in gathered:
            if span.lora is not None:
                loras.append((slice(at, at + span.selected.shape[0]), span.lora))
            at += span.selected.shape[0]
        absorbed = latent.absorb(query[:, rows], loras)
        sums = attend_gathered(absorbed, gathered, scale, latent.rank, sinks, native=native)
        out[rows] = latent.values_of(sums, loras).transpose(0, 1)
    for span in (span for span in spans if sinks is None and not _prefers_absorbed(latent, span)):
        mask = span.mask()
        for first, last in latent.head_groups(span.keys.shape[1]):
            keys, values = latent.expand(span.keys[0], first, last, span.lora)
            output = attend_masked(query[first:last, span.rows], keys, values, mask, scale)
            out[span.rows, first:last] = output.transpose(0, 1)


def _row_indices(spans: Sequence[SelectedRows], device: torch.device) -> Tensor:
    return torch.tensor([row for span in spans for row in range(span.rows.start, span.rows.stop)], device=device)


def _prefers_gathered(span: SelectedRows) -> bool:
    rows, k = span.selected.shape
    return rows == 1 or GATHER_COST * rows * k <= span.keys.shape[1]


def _prefers_absorbed(latent: LatentProjection, span: SelectedRows) -> bool:
    (rows, k), n = span.selected.shape, span.keys.shape[1]
    projection = latent.rank * (latent.nope + latent.value)
    gathered = rows * (projection + GATHER_COST * k * (2 * latent.rank + latent.rope))
    return rows == 1 or gathered < n * (projection + rows * (latent.nope + latent.rope + latent.value))
