"""One forward pass for many sequences: their chunks, one after the other in a single row of tokens.

Chunks of the same adapter are adjacent, so that the rows of an adapter are one slice. The result of a chunk is the
logits of its last row, in the model's dtype; for greedy chunks the argmax of all is computed in one call. Logits of
every row are passed to a reader some rows at a time (`head.py`). What a layer keeps between tokens is in the slots:
keys and values (`attention.py`), keys of indexers (`indexer.py`), convolution and recurrent states
(`recurrent_states.py`). `SequentialForward` computes models of another kind (position embeddings that depend on the
longest sequence of the batch, attention with a bias of positions) one sequence at a time, each with transformers' own
cache. On a GPU, steps of new tokens only may be replayed from CUDA graphs (`graphs/step_graphs.py`), which are tried
first. `check_against_stock` computes two sequences in chunks, across the edge of every sliding window, and compares the
logits with the stock model: a family for which they differ is refused by name before the server starts. Experts that
tie in a router are no difference. With FP8 keys and values (`cache_codes.py`) the two sequences are computed twice
more, in FP8 slots and in slots of values that are rounded to FP8: these may differ no more than that, and the
difference from the stock model, which is what 8 bits cost, is bounded loosely and logged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ktransformers.adapters.logit_error import ComputeLogits, ForwardPass, logit_error
from ktransformers.adapters.router_choices import token_numbers
from ktransformers.experts.backend import packed_experts
from ktransformers.experts.contract import expert_modules
from ktransformers.experts.lora import use_mixed_lora
from ktransformers.experts.store import round_weights
from ktransformers.ground.errors import InputError
from ktransformers.ground.pool import default_pool
from ktransformers.modeling.delta_rule import DELTA_RULE
from ktransformers.modeling.linear import linears
from ktransformers.modeling.norm import NORMS
from ktransformers.modeling.router import ROUTERS
from ktransformers.modeling.substitute import Restore, Substitution
from ktransformers.serve.attention.attention import ATTENTION_NAME, attend_to_slots
from ktransformers.serve.attention.decode_layer import DECODE_LAYERS
from ktransformers.serve.attention.decode_stack import DecodeStack
from ktransformers.serve.attention.fused_attention import FUSED_ATTENTION
from ktransformers.serve.attention.indexer import (
    INDEX_LAYER_TYPE,
    compared_selections,
    has_indexers,
    reduce_topk,
    use_indexers,
)
from ktransformers.serve.attention.latent import use_latents
from ktransformers.serve.attention.query_scales import use_position_scales
from ktransformers.serve.attention.step import BatchStep, Span
from ktransformers.serve.attention.windows import read_windows, reduce_windows, require_reduced
from ktransformers.serve.cache.cache_blocks import BlockLayout
from ktransformers.serve.cache.kv_cache import BLOCK_TOKENS, KVSlot
from ktransformers.serve.cache.recurrent_states import serve_states, use_states
from ktransformers.serve.cache.snapshots import state_bytes
from ktransformers.serve.scheduler.head import LogitsHead, LogitsReader, ScoredRows, collect_rows
from ktransformers.serve.scheduler.lora import AdapterRows, LoadedAdapter, adapter_rows, apply_linear_lora, expert_lora

if TYPE_CHECKING:
    from ktransformers.serve.graphs.step_graphs import StepGraphs

# Layer types that `Forward` computes.
BATCHED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
BATCHED_LAYER_TYPES |= {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # with states
BATCHED_LAYER_TYPES |= {"moe", "mlp"}  # without anything between tokens
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}  # rope types that depend on the longest sequence of a batch
# In this order: latent attention and decoder layers ask which norms were replaced.
FASTER: tuple[Substitution[Any, Any], ...] = (linears(), NORMS, DELTA_RULE, ROUTERS, FUSED_ATTENTION, DECODE_LAYERS)
MAX_LOGIT_ERROR = {torch.float32: 1e-3}  # relative, between served and stock logits
MAX_LOGIT_ERROR_16_BIT = 0.1  # in bfloat16 and float16
MAX_LOGIT_ERROR_FP8 = 0.5  # with FP8 keys and values; other experts may be chosen


@dataclass(frozen=True)
class Chunk:
    slot: KVSlot
    tokens: Sequence[int]
    position: int
    adapter: LoadedAdapter | None
    logits_reader: LogitsReader | None = None  # receives the logits of every row, some at a time
    wants_logits: bool = True  # of the last row; not in the middle of a prompt
    greedy: bool = False  # the argmax of the last row is the next token
    takes_snapshot: bool = False  # states after its last row are kept
    continues: bool = False  # greedy, its logits are not read, and unless its token ends the sequence another follows


@dataclass(frozen=True)
class ForwardResult:
    logits: Tensor | None  # [V], of the chunk's last row; None: the next step was launched, which overwrites them
    token: int | None = None  # argmax, where the chunk is greedy


class Forward:
    batched = True
    reason = ""  # why sequences are not computed together

    def __init__(self, model: PreTrainedModel, *, fp8_cache: bool = False) -> None:
        self.model: Any = model
        self.fp8_cache = fp8_cache  # slots are FP8
        self.fp8_error = 0.0  # of logits with FP8, relative to the stock model's, after `check_against_stock`
        self.bytes_per_sequence = 0  # of convolution and recurrent states, after `check_against_stock`
        nn.Module.eval(model)
        self.device = next(model.parameters()).device
        self.stock_attention = model.config._attn_implementation
        self._head = LogitsHead(model)
        self._decode_stack = DecodeStack(model)
        self.graphs: StepGraphs | None = None  # replays steps of new tokens only
        self.block_layout: BlockLayout | None = None  # of lower cache tiers, after `check_against_stock`
        with Restore() as restore:
            self.states = serve_states(model, restore)  # modules that keep a state of each sequence
            use_latents(self._is_served).apply(model, restore)
            self.indexers = use_indexers(self._is_served).apply(model, restore)
            self.position_scales = use_position_scales(self._is_served).apply(model, restore)
            self.windows = read_windows(model)  # by attention module; the model's masks are never made again
            restore.put_attention(model, ATTENTION_NAME)
            if model.config.get_text_config(decoder=True)._attn_implementation != ATTENTION_NAME:
                raise InputError(
                    model.config.model_type,
                    "a model with its own attention code",
                    "one that uses transformers' attention interface",
                )
            self.restore = restore.pop_all()  # of all but what is faster alone; after a refusal it is done at once

    def _is_served(self) -> bool:
        return bool(self.model.config._attn_implementation == ATTENTION_NAME)

    def run(self, chunks: Sequence[Chunk]) -> list[ForwardResult | None]:
        """The result of each chunk; None: its logits are not wanted. Logits are valid until the next call."""
        results = None if self.graphs is None else self.graphs.run(chunks)
        if results is None:
            results = self._run_eager(chunks)
        for chunk in chunks:
            chunk.slot.tokens[chunk.position :] = chunk.tokens
        return results

    def _run_eager(self, chunks: Sequence[Chunk]) -> list[ForwardResult | None]:
        """Without a CUDA graph."""
        order = sorted(range(len(chunks)), key=lambda index: _adapter_sort_key(chunks[index].adapter))
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        last_rows: dict[int, int] = {}  # index of a chunk -> its last row
        scored: list[ScoredRows] = []
        for index in order:
            chunk, first = chunks[index], len(tokens)
            tokens += chunk.tokens
            positions += range(chunk.position, chunk.position + len(chunk.tokens))
            spans.append(Span(chunk.slot, first, len(tokens), chunk.position, chunk.adapter))
            if chunk.logits_reader is not None:
                scored.append(ScoredRows(first, len(tokens), chunk.logits_reader))
            if chunk.wants_logits:
                last_rows[index] = len(tokens) - 1
        rows = list(last_rows.values())
        decodes = not scored and len(rows) == len(tokens)
        step = BatchStep(spans)
        stock = functools.partial(self._call_model, tokens, positions, step, rows, scored)
        logits = self._decode_stack.logits(tokens, positions, step, stock) if decodes else stock()
        logit_rows = {index: row for row, index in enumerate(last_rows)}
        greedy = [index for index in last_rows if chunks[index].greedy]
        argmax_tokens = dict(zip(greedy, argmax_of_rows(logits, [logit_rows[index] for index in greedy]), strict=True))
        results: list[ForwardResult | None] = [None] * len(chunks)
        for index, row in logit_rows.items():
            results[index] = ForwardResult(logits[row], argmax_tokens.get(index))
        return results

    def _call_model(
        self, tokens: list[int], positions: list[int], step: BatchStep, logit_rows: list[int], scored: list[ScoredRows]
    ) -> Tensor:
        inputs = {
            "input_ids": torch.tensor([tokens], device=self.device),
            "position_ids": torch.tensor([positions], device=self.device),
            "use_cache": False,
        }
        lora_rows = adapter_rows((span.adapter, span.rows) for span in step.spans)
        layers = expert_lora(lora_rows, len(tokens))
        with (
            torch.inference_mode(),
            attend_to_slots(step),
            use_states(step.spans, self.device),
            apply_linear_lora(lora_rows, len(tokens)),
            use_mixed_lora(layers),
        ):
            return self._head.logits(logit_rows, scored, inputs)

    def check_against_stock(self) -> int:
        """Compare with the stock model; returns the bytes of keys and values per token."""
        try:
            with Restore() as restore:
                reduce_windows(self.model, restore)
                reduce_topk(self.model, restore)
                require_reduced(self.model.config.model_type, read_windows(self.model))
                slot = _check_chunks(self)
                if self.fp8_cache:
                    self.fp8_error, slot = _check_codes(self)
        finally:
            read_windows(self.model)
        self.bytes_per_sequence = state_bytes(slot.states)
        self.block_layout = BlockLayout.of_memory(slot.memory, slot.states)
        return max(1, slot.memory.block_bytes // BLOCK_TOKENS)

    def stock(self) -> AbstractContextManager[Any]:
        """The model with its stock attention."""
        restore = Restore()
        restore.put_attention(self.model, self.stock_attention)
        return restore


class SequentialForward:
    """Computes one sequence at a time, its state in a cache of transformers."""

    batched = False
    fp8_cache, fp8_error = False, 0.0  # transformers' cache holds what the model computes
    bytes_per_sequence = 0
    states: Mapping[str, bool] = MappingProxyType({})
    graphs: StepGraphs | None = None
    indexers = 0  # that select keys of slots
    position_scales = 0  # layers whose queries are scaled by position
    block_layout: BlockLayout | None = None  # slots hold caches of transformers, which have no blocks

    def __init__(self, model: PreTrainedModel, reason: str = "") -> None:
        self.model: Any = model
        self.reason = reason  # why sequences are not computed together
        nn.Module.eval(model)
        self.device = next(model.parameters()).device
        self._head = LogitsHead(model)

    def run(self, chunks: Sequence[Chunk]) -> list[ForwardResult | None]:
        return [self._run_chunk(chunk) for chunk in chunks]

    def _run_chunk(self, chunk: Chunk) -> ForwardResult | None:
        slot, count = chunk.slot, len(chunk.tokens)
        if slot.hf_cache is None or not chunk.position:
            slot.hf_cache = DynamicCache(config=self.model.config)
        lora_rows = [] if chunk.adapter is None else [AdapterRows(chunk.adapter, 0, count)]
        positions = torch.arange(chunk.position, chunk.position + count, device=self.device)[None]
        inputs = {
            "input_ids": torch.tensor([list(chunk.tokens)], device=self.device),
            "position_ids": positions,
            "past_key_values": slot.hf_cache,
            "use_cache": True,
        }
        scored = [] if chunk.logits_reader is None else [ScoredRows(0, count, chunk.logits_reader)]
        with torch.inference_mode(), apply_linear_lora(lora_rows, count), use_mixed_lora(expert_lora(lora_rows, count)):
            logits = self._head.logits([count - 1], scored, inputs)
        slot.tokens[chunk.position :] = chunk.tokens
        return (
            ForwardResult(logits[0], *argmax_of_rows(logits, [0] if chunk.greedy else []))
            if chunk.wants_logits
            else None
        )

    def check_against_stock(self) -> int:
        with Restore() as restore:
            reduce_windows(self.model, restore)
            slot = _check_chunks(self)
        tensors = [getattr(layer, name, None) for layer in slot.hf_cache.layers for name in ("keys", "values")]
        size = sum(int(tensor.numel() * tensor.element_size()) for tensor in tensors if tensor is not None)
        return max(1, size // slot.length)

    def stock(self) -> AbstractContextManager[Any]:
        """The model is the stock one."""
        return nullcontext()


def make_forward(model: PreTrainedModel, *, fp8_cache: bool = False) -> Forward | SequentialForward:
    """Chosen by the model's configuration and attention; `check_against_stock` verifies the choice."""
    for substitution in FASTER:
        substitution.apply(model)
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    rope_settings = [rope, *(settings for settings in rope.values() if isinstance(settings, dict))]
    depends_on_length = any(settings.get("rope_type") in LENGTH_DEPENDENT_ROPE for settings in rope_settings)
    layer_types = BATCHED_LAYER_TYPES | ({INDEX_LAYER_TYPE} if has_indexers(model) else set())
    other_types = sorted(set(getattr(config, "layer_types", None) or []) - layer_types)
    reason = f"it has layers of the type {other_types[0]}" if other_types else ""
    if depends_on_length:
        reason = "its position embeddings depend on the longest sequence of a batch"
    if not reason:
        try:
            return Forward(model, fp8_cache=fp8_cache)
        except InputError as error:  # of its attention, masks or states
            reason = str(error)
    if fp8_cache:
        given = f"fp8 with {config.model_type}, which is computed one sequence at a time: {reason}"
        raise InputError("kv-cache-dtype", given, "auto or bf16")
    return SequentialForward(model, reason)


def _check_prompts(model: Any) -> list[list[int]]:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return [
        [(7 * index + 3) % vocabulary for index in range(24)],
        [(5 * index + 11) % vocabulary for index in range(13)],
    ]


def _stock_logits(forward: Forward | SequentialForward, forward_pass: ForwardPass) -> list[Tensor]:
    prompts, logits = _check_prompts(forward.model), []
    numbers = token_numbers([len(prompt) for prompt in prompts])
    with torch.inference_mode(), forward.stock():
        for prompt, tokens in zip(prompts, numbers, strict=True):
            with forward_pass(tokens):
                ids = torch.tensor([prompt], device=forward.device)
                logits.append(forward.model(input_ids=ids, use_cache=False).logits[0].float())
    if not all(bool(rows.isfinite().all()) for rows in logits):
        given = f"{forward.model.config.model_type}, whose logits are NaN or infinite"
        remedy = "its files are damaged (`kt model verify` compares their hashes), or --dtype overflows"
        raise InputError("model", given, "finite ones", remedy)
    return logits


def _chunk_logits(
    forward: Forward | SequentialForward, slots: Sequence[KVSlot], forward_pass: ForwardPass
) -> list[Tensor]:
    """Of two sequences in uneven chunks, which `slots` hold afterwards."""
    kind, prompts = forward.model.config.model_type, _check_prompts(forward.model)
    numbers = token_numbers([len(prompt) for prompt in prompts])
    logits: list[list[Tensor]] = [[], []]
    steps = (  # chunks, a chunk with a new token, new tokens of both, a chunk
        ((0, 0, 7), (1, 0, 4)),
        ((0, 7, 8), (1, 4, 12)),
        ((0, 8, 9), (1, 12, 13)),
        ((0, 9, 24),),
    )
    try:
        for step in steps:
            chunks = [
                Chunk(slots[index], prompts[index][a:b], a, None, collect_rows(logits[index])) for index, a, b in step
            ]
            with forward_pass(torch.cat([numbers[index][a:b] for index, a, b in step])):
                forward.run(chunks)
    except (InputError, RuntimeError, ValueError, AttributeError, TypeError) as error:
        raise InputError("model", f"{kind} ({error})", "a family that can be computed in chunks") from error
    return [torch.cat(rows).float() for rows in logits]


def _check_chunks(forward: Forward | SequentialForward) -> KVSlot:
    """Compare two sequences in chunks with the stock model; returns a slot that holds one of them.

    Quantised experts round their weights where an expert has many rows, as in a whole prompt, and not where it has few,
    as in a chunk (docs/formats.md). Logits that differ by more than the limit are compared once more with all weights
    rounded, so that only what chunks change is left.
    """
    limit = MAX_LOGIT_ERROR.get(forward.model.dtype, MAX_LOGIT_ERROR_16_BIT)
    error, slot = _chunk_error(forward, limit)
    if not error <= limit and _has_quantised_experts(forward.model):
        with round_weights():
            error, slot = _chunk_error(forward, limit)
    if not error <= limit:
        kind = forward.model.config.model_type
        given = f"{kind}, whose logits differ by {error:.2g} when it is computed in chunks"
        raise InputError("model", given, f"at most {limit:g}", "this family cannot be served")
    return slot


def _check_codes(forward: Forward) -> tuple[float, KVSlot]:
    """Compare FP8 slots with slots of rounded values; returns the difference of their logits from the stock
    model's, and an FP8 slot."""
    prompts, kind = _check_prompts(forward.model), forward.model.config.model_type
    coded = KVSlot.together(len(prompts), 24, fp8=True)
    rounded = KVSlot.together(len(prompts), 24, rounded=True)

    def difference(expected: ComputeLogits, limit: float) -> float:
        return logit_error(
            forward.model, prompts, expected, lambda passes: _chunk_logits(forward, coded, passes), limit
        )

    limit = MAX_LOGIT_ERROR.get(forward.model.dtype, MAX_LOGIT_ERROR_16_BIT)
    error = difference(lambda passes: _chunk_logits(forward, rounded, passes), limit)
    from_stock = difference(lambda passes: _stock_logits(forward, passes), math.inf)
    if not error <= limit or not from_stock <= MAX_LOGIT_ERROR_FP8:
        given = f"fp8 with {kind}, whose logits differ by {error:.2g}, from the stock model's by {from_stock:.2g}"
        raise InputError("kv-cache-dtype", given, f"at most {limit:g} and {MAX_LOGIT_ERROR_FP8:g}", "use auto")
    return from_stock, coded[0]


def _has_quantised_experts(model: Any) -> bool:
    layers = filter(None, map(packed_experts, expert_modules(model).values()))
    return any(set(kt.store.formats.values()) - {"bf16"} for kt in layers if kt.store is not None)


def _chunk_error(forward: Forward | SequentialForward, limit: float) -> tuple[float, KVSlot]:
    slots = KVSlot.together(2, 24)
    prompts = _check_prompts(forward.model)
    with compared_selections(slots, [len(prompt) for prompt in prompts], forward.model.dtype):
        error = logit_error(
            forward.model,
            prompts,
            lambda forward_pass: _stock_logits(forward, forward_pass),
            lambda forward_pass: _chunk_logits(forward, slots, forward_pass),
            limit,
        )
    return error, slots[0]


def argmax_of_rows(logits: Tensor, rows: list[int]) -> list[int]:
    """Index of the first maximum of each of these rows. Rounding logits to 16 bits first gives the same."""
    if not rows:
        return []
    picked = logits if rows == list(range(logits.shape[0])) else logits[rows]
    if picked.is_cpu and picked.dtype in (torch.bfloat16, torch.float32):
        return default_pool().argmax(picked)
    tokens: list[int] = picked.argmax(-1).tolist()
    return tokens


def _adapter_sort_key(adapter: LoadedAdapter | None) -> tuple[str, int]:
    return ("", 0) if adapter is None else (adapter.name, adapter.version)
