"""Attention over the blocks of the KV cache, registered as an attention function of stock transformers.

The engine calls a model with one row `[1, T]` of tokens, the chunks of many sequences one after the other.
`attend_to_slots(step)` tells which rows belong to which slot and position: keys and values of a span are written into
the blocks of its slot, and its queries attend to that slot only. There is no padding, prompt chunks and new tokens
share a batch, and the attention of a sequence is the same bit for bit in every batch. Models are called with
`use_cache=False`, because their own cache knows nothing of slots.

A layer's attention is one call for all sequences of the step: on a GPU of Triton kernels for any mixture of prompt
chunks and new tokens (`graphs/paged_attention.py`), on the CPU of the native core for new tokens. What the kernels read
of the step, its positions and block tables, is made once and shared by all layers (`BatchStep`). Slots of multi-head
latent attention hold latents (`latent.py`). Prompt chunks on the CPU, those of latents, and rows for which an indexer
has selected keys (`selection.py`) use torch, chunk by chunk.

query `[1, heads, T, d]`, key `[1, kv_heads, T, d]`, value `[1, kv_heads, T, dv]` -> `[1, T, heads, dv]`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ktransformers.ground.errors import InputError, KTError
from ktransformers.ground.pool import default_pool
from ktransformers.serve.attention.latent import LATENT_ATTRIBUTE, LatentProjection
from ktransformers.serve.attention.query_scales import SCALED_ATTRIBUTE, scale_queries
from ktransformers.serve.attention.selection import SelectedRows, Selection, attend_selected, attend_selected_latents
from ktransformers.serve.attention.spec import AttentionSpec
from ktransformers.serve.attention.step import BatchStep, Span, current_step, use_step
from ktransformers.serve.attention.windows import CHUNK_ATTRIBUTE, WINDOW_ATTRIBUTE
from ktransformers.serve.graphs import paged_attention
from ktransformers.serve.scheduler.lora import LinearLora

ATTENTION_NAME = "kt_slots"
CORE_DTYPES = (torch.bfloat16, torch.float32)  # of keys and values that the core supports
# Scores that are computed at once where torch has no fused kernel for them.
MOST_SCORES = 2**26
HEAD_SIZE_MULTIPLE = 16  # of d and dv that the core supports
# Arguments that models pass and that change nothing here. Any other argument that is set is refused, because ignoring
# it would give wrong results.
IGNORED_ARGUMENTS = {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "output_hidden_states"}
IGNORED_ARGUMENTS |= {
    "cache_position",
    "output_router_logits",
    "return_dict",
    "num_items_in_batch",
    "position_embeddings",
}


AttentionFn = Callable[
    [AttentionSpec, Tensor, Tensor, Tensor], Tensor
]  # [heads, T, d], [kv, T, d], [kv, T, dv] -> [T, heads, dv]
# Keys and values, and of FP8 their scales.
Cache = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]
_attention_fn: ContextVar[AttentionFn | None] = ContextVar("kt_attention_fn", default=None)


class NoMask:
    """In the place of the mask in modules that cut theirs for an indexer; a served model has none."""

    def __getitem__(self, index: Any) -> NoMask:
        return self


NO_MASK = NoMask()


@contextmanager
def use_attention(attention: AttentionFn) -> Iterator[None]:
    """Sets the function that computes attention while the stock model is called.

    A ContextVar carries it past the model's forward, which has no argument for it. The function holds what the model
    does not know: the slot and position of every row of the batch."""
    token = _attention_fn.set(attention)
    try:
        yield
    finally:
        _attention_fn.reset(token)


def current_attention() -> AttentionFn | None:
    """The function that was set; None: the model is not being served."""
    return _attention_fn.get()


@contextmanager
def attend_to_slots(step: BatchStep) -> Iterator[None]:
    """While the model is called, rows attend to the slots of this step, which covers the batch."""
    with use_step(step), use_attention(functools.partial(_attend_step, step)):
        yield


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | NoMask | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Selection | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Called by the layers of the model, as transformers calls any attention function."""
    attention = _attention_fn.get()
    if attention is None:
        raise KTError("the model was called directly while it is served; submit requests to its engine")
    unsupported = [name for name, value in rest.items() if value is not None and name not in IGNORED_ARGUMENTS]
    if unsupported or isinstance(attention_mask, Tensor):
        name = type(module).__name__
        raise InputError(name, f"attention with {unsupported or ['a mask']}", "causal attention", "it cannot be served")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = getattr(module, WINDOW_ATTRIBUTE, sliding_window)  # that of the stock mask, where it was read
    latent = getattr(module, LATENT_ATTRIBUTE, None)
    chunk = getattr(module, CHUNK_ATTRIBUTE, None)
    spec = AttentionSpec(_layer_index(module), scale, window, softcap, s_aux, latent, indices, chunk)
    if getattr(module, SCALED_ATTRIBUTE, False):
        query = scale_queries(module, query, _positions(query.device))
    sinks_of_latents = latent is not None and s_aux is not None and indices is None
    limited = window is not None or chunk is not None
    if (latent is not None or indices is not None) and (limited or softcap or sinks_of_latents):
        given = "latent attention with a window, a score cap or sinks"
        raise InputError(type(module).__name__, given, "without", "it cannot be served")
    return attention(spec, query[0], key[0], value[0])[None], None


def _attend_step(step: BatchStep, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    chosen = () if spec.selection is None else spec.selection.of_rows
    if chosen:
        selecting = [span for span in step.spans if span.first in chosen]
        step = BatchStep([span for span in step.spans if span.first not in chosen])
    if not step.spans:
        assert spec.selection is not None
        size = value.shape[2] if spec.latent is None else spec.latent.value
        out = query.new_empty(query.shape[1], query.shape[0], size)
    elif spec.latent is not None:
        out = _attend_latents(spec.latent, step, spec, query, key)
    else:
        out = _attend_keys(step, spec, query, key, value)
    if chosen:
        _attend_selecting(selecting, spec, query, key, value, out)
    return out


def _attend_selecting(
    spans: Sequence[Span], spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, out: Tensor
) -> None:
    """Rows for which an indexer has selected keys."""
    assert spec.selection is not None
    selected = []
    for span in spans:
        lora = None if spec.latent is None or span.adapter is None else span.adapter.linears.get(spec.latent.linear)
        selected.append(_selected_rows(span, spec, key, None if spec.latent is not None else value, lora))
    if spec.latent is None:
        native = _core_decodes(query, value, None) and spec.sinks is None
        attend_selected(selected, query, out, spec.scale, spec.sinks, native=native)
    else:
        native = _core_decodes(key, key[..., : spec.latent.rank], None) and spec.sinks is None
        attend_selected_latents(spec.latent, selected, query, out, spec.scale, spec.sinks, native=native)


def _selected_rows(
    span: Span, spec: AttentionSpec, key: Tensor, value: Tensor | None, lora: LinearLora | None
) -> SelectedRows:
    """Stores the span's keys and values. Of a decode token over FP8, only what it has selected is dequantized."""
    assert spec.selection is not None
    chosen, rows, slot = spec.selection.of_rows[span.first], slice(span.first, span.last), span.slot
    parts = {"keys": key} | ({} if value is None else {"values": value})
    for part, new in parts.items():
        slot.store(part, spec.layer, span.position, new[:, rows])
    position, end = span.position, span.position + span.rows
    if slot.memory.fp8 and span.rows == 1:
        held = [slot.select(part, spec.layer, chosen[0], new.dtype) for part, new in parts.items()]
        position, chosen = chosen.shape[1] - 1, torch.arange(chosen.shape[1], device=chosen.device)[None]
    else:
        held = [slot.read(part, spec.layer, 0, end, new.dtype) for part, new in parts.items()]
    return SelectedRows(span.first, position, held[0], held[1] if len(held) > 1 else None, chosen, lora)


def _attend_keys(step: BatchStep, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    memory = step.memory
    if query.is_cuda and not memory.rounded and paged_attention.has_kernels():
        held = memory.of_layer(spec.layer, key, value)
        return paged_attention.attend(step.on_device(query.device), held, spec, query, key, value)
    out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
    native = _core_decodes(query, value, spec.softcap) and not memory.rounded
    if native and step.decoding:
        cache = by_blocks(memory.of_layer(spec.layer, key, value))
        limits = {"window": spec.window or 0, "chunk": spec.chunk or 0}
        default_pool().attend(
            query, key, value, out, cache, step.sequences, scale=spec.scale, sinks=spec.core_sinks, **limits
        )
    spans: Sequence[Span] = [span for span in step.spans if span.rows > 1] if native else step.spans
    if spec.chunk is not None:
        spans = [piece for span in spans for piece in _cut_at_chunks(span, spec.chunk)]
    for span in spans:
        rows = slice(span.first, span.last)
        start = spec.first_key(span.position)
        keys = span.slot.write("keys", spec.layer, span.position, key[:, rows], start)
        values = span.slot.write("values", spec.layer, span.position, value[:, rows], start)
        window = (span.position - start, spec.window)
        out[rows] = _attend_in_torch(spec, query[:, rows], keys, values, *window, spec.sinks).transpose(0, 1)
    return out


def _attend_latents(
    latent: LatentProjection, step: BatchStep, spec: AttentionSpec, query: Tensor, key: Tensor
) -> Tensor:
    """query `[heads, T, nope + rope]`, key `[1, T, rank + rope]` -> `[T, heads, value]`."""
    out = query.new_empty(query.shape[1], latent.heads, latent.value)
    loras = {
        span.first: lora
        for span in step.spans
        if span.adapter is not None and (lora := span.adapter.linears.get(latent.linear)) is not None
    }
    if step.decoding:
        rows = torch.tensor([span.first for span in step.decoding], device=query.device)
        of_rows = [
            (slice(row, row + 1), loras[span.first]) for row, span in enumerate(step.decoding) if span.first in loras
        ]
        absorbed = latent.absorb(query[:, rows], of_rows)
        sums = _decode_latents(latent, step.alone, spec, absorbed, key[:, rows])
        out[rows] = latent.values_of(sums, of_rows).transpose(0, 1)
    for span in step.spans:
        if span.rows > 1:
            rows_of_span = slice(span.first, span.last)
            keys = span.slot.write("keys", spec.layer, span.position, key[:, rows_of_span])
            lora = loras.get(span.first)
            out[rows_of_span] = _attend_chunk(latent, span, spec, query[:, rows_of_span], keys, lora).transpose(0, 1)
    return out


def _decode_latents(
    latent: LatentProjection, step: BatchStep, spec: AttentionSpec, query: Tensor, key: Tensor
) -> Tensor:
    """One new token of each sequence: queries `[heads, n, rank + rope]` over latents -> weighted sums of latents
    `[heads, n, rank]`."""
    memory, value = step.memory, key[..., : latent.rank]
    if query.is_cuda and not memory.rounded and spec.sinks is None and paged_attention.has_kernels():
        held = memory.of_layer(spec.layer, key)
        return paged_attention.attend_latents(step.on_device(query.device), held, spec, query, key).transpose(0, 1)
    if not _core_decodes(query, value, None) or memory.rounded:
        sums = []
        for row, span in enumerate(step.spans):
            rows = slice(row, row + 1)
            keys = span.slot.write("keys", spec.layer, span.position, key[:, rows])
            latents = keys[..., : latent.rank]
            sums.append(_attend_in_torch(spec, query[:, rows], keys, latents, span.position, None, spec.sinks))
        return torch.cat(sums, dim=1)
    cache = by_blocks(memory.of_layer(spec.layer, key), latent.rank)
    out = query.new_empty(query.shape[1], latent.heads, latent.rank)
    default_pool().attend(query, key, value, out, cache, step.sequences, scale=spec.scale, sinks=spec.core_sinks)
    return out.transpose(0, 1)


def _attend_chunk(
    latent: LatentProjection, span: Span, spec: AttentionSpec, query: Tensor, keys: Tensor, lora: LinearLora | None
) -> Tensor:
    """Several tokens of a sequence: `[heads, n, nope + rope]` over `[1, keys, rank + rope]` -> `[heads, n, value]`."""
    if latent.prefers_absorbed(span.rows, keys.shape[1]):
        loras = [] if lora is None else [(slice(None), lora)]
        absorbed = latent.absorb(query, loras)
        sums = _attend_in_torch(spec, absorbed, keys, keys[..., : latent.rank], span.position, None, spec.sinks)
        return latent.values_of(sums, loras)
    out = query.new_empty(latent.heads, span.rows, latent.value)
    for first, last in latent.head_groups(keys.shape[1]):
        expanded = latent.expand(keys[0], first, last, lora)
        sinks = None if spec.sinks is None else spec.sinks[first:last]
        out[first:last] = _attend_in_torch(spec, query[first:last], *expanded, span.position, None, sinks)
    return out


def _attend_in_torch(
    spec: AttentionSpec,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    offset: int,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    if sinks is None and not spec.softcap:
        return _sdpa(query, keys, values, spec.scale, offset, window)
    rows, block = query.shape[1], max(1, MOST_SCORES // (query.shape[0] * keys.shape[1]))
    parts = []
    for start in range(0, rows, block):
        # A block of queries needs no keys behind its last one.
        end = min(start + block, rows)
        seen = slice(0, offset + end)
        parts.append(
            _attention_with_softcap_or_sinks(
                query[:, start:end],
                keys[:, seen],
                values[:, seen],
                spec.scale,
                offset + start,
                window,
                spec.softcap,
                sinks,
            )
        )
    return torch.cat(parts, dim=1)


def _core_decodes(query: Tensor, value: Tensor, softcap: float | None) -> bool:
    """Whether the core computes the attention of new tokens."""
    fits = query.shape[-1] % HEAD_SIZE_MULTIPLE == 0 and value.shape[-1] % HEAD_SIZE_MULTIPLE == 0
    return fits and query.device.type == "cpu" and query.dtype in CORE_DTYPES and not softcap


def by_blocks(cache: Sequence[Tensor], rank: int | None = None) -> Cache:
    """The tensors of a layer, `[blocks, heads, BLOCK_TOKENS, d]`, as the core takes them; of latents, whose values are
    the first `rank` numbers of the keys."""
    keys, values, *scales = (tensor.transpose(0, 1) for tensor in cache)
    values = values if rank is None else values[..., :rank]
    return (keys, values, scales[0], scales[1]) if scales else (keys, values)


def _cut_at_chunks(span: Span, chunk: int) -> Iterator[Span]:
    """The rows of a span, chunk by chunk."""
    first, position = span.first, span.position
    while first < span.last:
        last = min(span.last, first + chunk - position % chunk)
        yield Span(span.slot, first, last, position, span.adapter)
        first, position = last, position + last - first


def _positions(device: torch.device) -> Tensor:
    """int64 `[T]`, of the tokens of the batch."""
    step = current_step()
    assert step is not None
    return torch.cat([torch.arange(span.position, span.position + span.rows, device=device) for span in step.spans])


def _layer_index(module: nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise InputError(type(module).__name__, "attention without layer_idx", "a layer's number")
    return layer


def _causal_mask(queries: int, keys: int, offset: int, window: int | None, device: torch.device) -> Tensor | None:
    """bool `[queries, keys]`: query i is at position offset + i of the keys and attends up to there; None: to all."""
    if queries == 1:
        return None
    query_positions = torch.arange(offset, offset + queries, device=device)[:, None]
    key_positions = torch.arange(keys, device=device)[None]
    mask = key_positions <= query_positions
    return mask if window is None else mask & (key_positions > query_positions - window)


def _sdpa(query: Tensor, keys: Tensor, values: Tensor, scale: float, offset: int, window: int | None) -> Tensor:
    heads, rows, size = query.shape
    if rows == 1:  # query heads of a group become rows of one product, so that keys are not repeated
        grouped = query.reshape(1, keys.shape[0], heads // keys.shape[0], size)
        output = scaled_dot_product_attention(grouped, keys[None], values[None], scale=scale)
        return output.reshape(heads, 1, -1)
    causal = offset == 0 and (window is None or rows <= window)
    mask = None if causal else _causal_mask(rows, keys.shape[1], offset, window, query.device)
    output = scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )
    return output[0]


def _attention_with_softcap_or_sinks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    offset: int,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """With capped scores, or with one sink logit per head that enters the softmax and has no value."""
    heads, rows, size = query.shape
    groups = query.reshape(keys.shape[0], -1, size)  # [kv_heads, group * rows, d]
    scores = (groups @ keys.transpose(1, 2)).float().reshape(heads, rows, -1) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    mask = _causal_mask(rows, keys.shape[1], offset, window, query.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().reshape(heads, 1, 1).expand(heads, rows, 1)], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]].to(values.dtype)
    return (weights.reshape(keys.shape[0], -1, keys.shape[1]) @ values).reshape(heads, rows, -1)


AttentionInterface.register(ATTENTION_NAME, attention_forward)
