"""Attention over slots, as an attention function of stock transformers.

The engine calls a model with one row `[1, T]` that holds the tokens of many sequences one after the other, and says by
`spans(...)` which rows belong to which slot and position. Everything but attention treats tokens alone; here each
sequence's keys and values are written into its slot and its queries meet that slot and nothing else. So no padding
exists, chunks of prompts and single new tokens share a batch, and a sequence's attention is the same bit for bit
whoever else is in the batch. Models are called without a cache: their own would know nothing of slots.

On the CPU new tokens are the core's, all sequences in one call: torch would be asked for each of them, and takes longer
to set its threads to work than they take. Pieces of prompts, and what caps scores or has sinks, are torch's. A step
that is replayed from a CUDA graph attends another way, which finds slots by their addresses (`attending`, `decode.py`).

query `[1, heads, T, d]`, key `[1, kv_heads, T, d]`, value `[1, kv_heads, T, dv]` -> `[1, T, heads, dv]`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ktransformers.errors import InputError, KTError
from ktransformers.nn.pool import default_pool
from ktransformers.serve.engine.kv_cache import KVSlot

NAME = "kt_slots"
TYPES = (torch.bfloat16, torch.float32)  # of keys and values that the core attends to
MULTIPLE = 16  # of the sizes of heads
# What models pass along that changes nothing here. Anything else that is set would be computed wrongly, so it is
# refused.
HARMLESS = {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "output_hidden_states"}
HARMLESS |= {"cache_position", "output_router_logits", "return_dict", "num_items_in_batch", "position_embeddings"}


@dataclass(frozen=True)
class Span:
    slot: KVSlot
    first: int  # rows of the batch
    last: int
    position: int  # of the first row in its sequence

    @property
    def rows(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class AttentionSpec:
    """How a layer attends."""

    layer: int
    scale: float
    window: int | None  # keys that a query sees, its own the last of them
    softcap: float | None
    sinks: Tensor | None  # [heads]


Attend = Callable[
    [AttentionSpec, Tensor, Tensor, Tensor], Tensor
]  # [heads, T, d], [kv, T, d], [kv, T, dv] -> [T, heads, dv]
_active: ContextVar[Attend | None] = ContextVar("attending", default=None)


@contextmanager
def attending(by: Attend) -> Iterator[None]:
    """While the model is called, this attends; it knows whose rows they are."""
    token = _active.set(by)
    try:
        yield
    finally:
        _active.reset(token)


def spans(rows: Sequence[Span]) -> AbstractContextManager[None]:
    return attending(functools.partial(_over_spans, rows))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    by = _active.get()
    if by is None:
        raise KTError("this model is being served: call the engine, not the model")
    odd = [name for name, value in rest.items() if value is not None and name not in HARMLESS]
    if odd or attention_mask is not None:
        name = type(module).__name__
        raise InputError(name, f"attention with {odd or ['a mask']}", "causal attention", "it cannot be served")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    kind = AttentionSpec(_layer(module), scale, sliding_window, softcap, s_aux)
    return by(kind, query[0], key[0], value[0])[None], None


def _over_spans(rows: Sequence[Span], kind: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
    native = _native(query, value, kind.softcap, kind.sinks)
    new = [span for span in rows if native and span.rows == 1]
    if new:
        _decode(kind, new, query, key, value, out)
    for span in (span for span in rows if not native or span.rows > 1):
        part = slice(span.first, span.last)
        keys, values = span.slot.write(kind.layer, span.position, key[:, part], value[:, part])
        start = 0
        if kind.window is not None:
            start = max(0, span.position + 1 - kind.window)
            keys, values = keys[:, start:], values[:, start:]
        window = (span.position - start, kind.window)
        if kind.sinks is None and not kind.softcap:
            found = _plain(query[:, part], keys, values, kind.scale, *window)
        else:
            found = _spelled_out(query[:, part], keys, values, kind.scale, *window, kind.softcap, kind.sinks)
        out[part] = found.transpose(0, 1)
    return out


def _native(query: Tensor, value: Tensor, softcap: float | None, sinks: Tensor | None) -> bool:
    """Whether the core computes new tokens."""
    fits = query.shape[-1] % MULTIPLE == 0 and value.shape[-1] % MULTIPLE == 0
    return fits and query.device.type == "cpu" and query.dtype in TYPES and not softcap and sinks is None


def _decode(kind: AttentionSpec, rows: Sequence[Span], query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    places: list[tuple[int, int, int, Tensor, Tensor]] = []
    for span in rows:
        end = span.position + 1
        start = 0 if kind.window is None else max(0, end - kind.window)
        places.append((span.first, start, end, *span.slot.room(kind.layer, key, value)))
    default_pool().attend(query, key, value, out, places, kind.scale)


def _layer(module: nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise InputError(type(module).__name__, "attention without layer_idx", "a layer's number")
    return layer


def _allowed(queries: int, keys: int, offset: int, window: int | None, device: torch.device) -> Tensor | None:
    """`[queries, keys]`, True where query i, at place offset + i among the keys, may look; None: everywhere."""
    if queries == 1:
        return None
    at = torch.arange(offset, offset + queries, device=device)[:, None]
    to = torch.arange(keys, device=device)[None]
    mask = to <= at
    return mask if window is None else mask & (to > at - window)


def _plain(query: Tensor, keys: Tensor, values: Tensor, scale: float, offset: int, window: int | None) -> Tensor:
    heads, rows, size = query.shape
    if rows == 1:  # heads of a group ask the same keys: as rows of one product nothing has to be repeated
        grouped = query.reshape(1, keys.shape[0], heads // keys.shape[0], size)
        found = scaled_dot_product_attention(grouped, keys[None], values[None], scale=scale)
        return found.reshape(heads, 1, -1)
    whole = offset == 0 and (window is None or rows <= window)
    mask = None if whole else _allowed(rows, keys.shape[1], offset, window, query.device)
    found = scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=True
    )
    return found[0]


def _spelled_out(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    offset: int,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """With a cap on the scores, or a sink per head that takes part in the softmax and holds nothing."""
    heads, rows, size = query.shape
    groups = query.reshape(keys.shape[0], -1, size)  # [kv_heads, group * rows, d]
    scores = (groups @ keys.transpose(1, 2)).float().reshape(heads, rows, -1) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    mask = _allowed(rows, keys.shape[1], offset, window, query.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().reshape(heads, 1, 1).expand(heads, rows, 1)], dim=-1)
    shares = scores.softmax(-1)[..., : keys.shape[1]].to(values.dtype)
    return (shares.reshape(keys.shape[0], -1, keys.shape[1]) @ values).reshape(heads, rows, -1)


AttentionInterface.register(NAME, attend)
