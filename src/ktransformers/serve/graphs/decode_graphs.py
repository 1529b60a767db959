"""Decode steps of the server, in which every sequence has one new token, replayed from CUDA graphs: no Python between
their kernels.

Steps come in a few sizes R; rows between two sizes are computed and thrown away. What differs from step to step is a
table (`step_table.py`), int64 `[lines, R]`: tokens, positions, adapters, addresses of KV cache slots. It is
written into pinned memory; the graph begins with the copy to the device and ends with the copy of the most likely
tokens to the host. Logits `[R, V]` stay on the device, in memory that the next step overwrites. Attention is
`decode_attention.py`'s, experts are `place/host_callback.py`'s, LoRA is `adapter_set.py`'s, everything else is the
stock model, called under capture as it is called otherwise.

A graph is captured for a size and a set of adapters, and serves every mixture of these and of the base: a step takes
the smallest set that has all adapters of its rows, and steps of the base alone take the graph without LoRA. A few sets
are kept, least recently used ones are evicted first; unloading an adapter evicts its sets once no request uses it.

Before a capture a step is rehearsed: computed outside of a graph as it would be inside, which allocates what has to
exist before, and then once more with torch raising on every synchronisation, so that what a graph cannot hold fails
where it does no harm. All of that happens in the middle of an answer: a step that is rehearsed, captured and replayed
writes the same keys to the same places each time; convolution and recurrent states, which each time would advance, are
restored (`state_arena.py`). Everything else (prompts, scored prompts, families whose keys are selected by an index)
goes kernel by kernel, and so does a size or a set of adapters that was refused.

When residents get other memory, graphs would compute the right numbers, but on the CPU; they are captured anew.
"""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ktransformers import env
from ktransformers.errors import InputError
from ktransformers.nn.contract import expert_modules
from ktransformers.nn.cuda_graphs import GraphCache, GraphPool, Refusal, capture_stream
from ktransformers.nn.operator import placed_for
from ktransformers.nn.padding import use_padding_mask
from ktransformers.place.gpu.multi_lora import LoraCacheFull
from ktransformers.place.placement import Placement
from ktransformers.plan.modes import MAX_DECODE_TOKENS
from ktransformers.serve.engine.attention import AttentionSpec, use_attention
from ktransformers.serve.engine.forward import Chunk, Forward, ForwardResult, SequentialForward
from ktransformers.serve.engine.kv_cache import Owner
from ktransformers.serve.engine.lora import DEVICE_COPY_LOCK
from ktransformers.serve.engine.recurrent_states import use_batch_states
from ktransformers.serve.engine.windows import CHUNK_ATTRIBUTE
from ktransformers.serve.graphs import decode_attention
from ktransformers.serve.graphs.adapter_set import Adapters, AdapterSet, RowLoraFn, sort_adapters
from ktransformers.serve.graphs.decode_attention import attend_latents, attend_new_tokens
from ktransformers.serve.graphs.latent_inputs import fuse_latents, fused_latents
from ktransformers.serve.graphs.state_arena import ArenaRows, StateArena
from ktransformers.serve.graphs.step_table import (
    ACTIVE,
    ADAPTER,
    FIRST_ADDRESS,
    POSITION,
    STATES,
    TOKEN,
    CacheLines,
    table_lines,
)

NAME = "decode steps"
SIZES = (1, 2, 4, 8, 16, 24, MAX_DECODE_TOKENS)  # rows
MAX_ADAPTER_SETS = 4
MAX_SET_BYTES = 1 << 30  # of the factors that sets of adapters have copied

Compute = Callable[[], Tensor]  # the logits [R, V] of what the table says
Record = Callable[[Compute], Compute]  # one that does the same without Python


class StepKey(NamedTuple):
    rows: int
    adapters: Adapters  # that rows may have

    @property
    def description(self) -> str:
        names = ", ".join(adapter.name or "LoRA" for adapter in self.adapters)
        return f"{NAME} of {self.rows} rows" + (f" with {names}" if names else "")


@dataclass(frozen=True)
class DecodeStep:
    """One captured step. A graph knows the tensors by their addresses alone: they live as long as it does."""

    table: Tensor  # int64 [lines, R], pinned
    device_table: Tensor  # the same on the device
    tokens: Tensor  # int64 [R], pinned: the most likely ones
    adapter_set: AdapterSet
    replay: Compute

    def fill(self, chunks: Sequence[Chunk], state_rows: Sequence[int]) -> None:
        table = self.table.numpy()
        table[:] = 0
        for row, (chunk, states) in enumerate(zip(chunks, state_rows, strict=True)):
            adapter = 0 if chunk.adapter is None else self.adapter_set.indices[chunk.adapter]
            table[:FIRST_ADDRESS, row] = chunk.tokens[0], chunk.position, chunk.slot.capacity, 1, adapter, states
            table[FIRST_ADDRESS:, row] = chunk.slot.addresses()


class DecodeGraphs:
    """The graphs of a model on one device. `placement` has its experts, None where it has none. `record` stands in for
    the capture in tests without a GPU."""

    def __init__(
        self,
        model: nn.Module,
        placement: Placement | None,
        record: Record | None = None,
        max_rows: int = MAX_DECODE_TOKENS,
    ) -> None:
        self._model: Any = model
        self._placement = placement
        self.device = next(model.parameters()).device
        self._record = record
        self._sizes = [*(size for size in SIZES if size < max_rows), min(max_rows, MAX_DECODE_TOKENS)]
        self.max_rows = self._sizes[-1]
        self.graphs: GraphCache[StepKey, DecodeStep] = GraphCache(NAME, GraphPool(self.device))
        self._base = AdapterSet((), self.device)
        self.sets: OrderedDict[Adapters, AdapterSet] = OrderedDict()  # least recently used first; without the base
        self._fused: int | None = None  # modules of latent attention with fused steps, after the first capture
        self._generation = self._current_generation()
        self._layers: tuple[int, ...] = ()
        self._fp8 = False  # slots hold codes
        self._arena: StateArena | None = None  # of a model with convolution or recurrent states
        self.replayed = 0  # steps

    def run(self, chunks: Sequence[Chunk]) -> list[ForwardResult | None] | None:
        """As `Forward.run`; None: this step goes kernel by kernel. Logits are valid until the next step."""
        size = self._size(chunks)
        if size is None:
            return None
        if self._current_generation() != self._generation:
            self.clear()
            self._generation = self._current_generation()
        key = self._key(size, chunks)
        step = self.graphs.get(key)
        if step is None and self.graphs.due(key):
            make = functools.partial(self._capture, key, chunks)
            step = self.graphs.capture(key, make, key.description, self._on_failure)
        if step is None:
            return None
        step.fill(chunks, self._state_rows(chunks))
        if key.adapters:
            self.sets.move_to_end(key.adapters)
        logits = step.replay()
        if self._placement is not None:
            self._placement.raise_pending(size)
        self.replayed += 1
        tokens = step.tokens.tolist()
        return [
            ForwardResult(logits[row], tokens[row] if chunk.greedy else None) if chunk.wants_logits else None
            for row, chunk in enumerate(chunks)
        ]

    def _current_generation(self) -> int:
        return 0 if self._placement is None else self._placement.generation

    def _size(self, chunks: Sequence[Chunk]) -> int | None:
        size = next((size for size in self._sizes if len(chunks) <= size), None)
        if size is None or self.graphs.closed:
            return None
        if not self._layers:
            self._layers, self._fp8 = tuple(sorted(chunks[0].slot.keys)), chunks[0].slot.fp8
            self._arena = StateArena(self.max_rows) if chunks[0].slot.states else None
        layers, states = len(self._layers), self._arena is not None
        fits = (
            len(chunk.tokens) == 1
            and chunk.logits_reader is None
            and len(chunk.slot.keys) == layers
            and bool(chunk.slot.states) == states
            and chunk.slot.fp8 == self._fp8
            for chunk in chunks
        )
        return size if layers and all(fits) else None

    def _state_rows(self, chunks: Sequence[Chunk]) -> list[int]:
        """Rows of the arena that hold the states of these chunks."""
        return [0] * len(chunks) if self._arena is None else self._arena.place([chunk.slot for chunk in chunks])

    def _key(self, size: int, chunks: Sequence[Chunk]) -> StepKey:
        wanted = {chunk.adapter for chunk in chunks if chunk.adapter is not None}
        if not wanted:
            return StepKey(size, ())
        keys = [StepKey(size, adapters) for adapters in self.sets if wanted <= set(adapters)]
        allowed = [key.adapters for key in keys if key not in self.graphs.refused]
        return StepKey(size, min(allowed, key=len, default=sort_adapters(wanted)))

    def forget(self, owner: Owner) -> None:
        """An adapter was unloaded, and no request uses it any more. Others that were refused may fit now."""
        self._drop([adapters for adapters in self.sets if any(adapter.owner == owner for adapter in adapters)])
        self.graphs.reset(lambda key: bool(key.adapters))

    def clear(self) -> None:
        self.graphs.evict()
        self.graphs.reset()
        self._drop(list(self.sets))
        if self._placement is not None:
            self._placement.release_graphs()

    def _drop(self, sets: Sequence[Adapters]) -> None:
        """Evict graphs of these sets and what else was made for adapters that are in no set. Every step was waited for,
        so no replay is reading what is freed."""
        for adapters in sets:
            del self.sets[adapters]
        self.graphs.evict(lambda key: bool(key.adapters) and key.adapters not in self.sets)
        if self._placement is not None:
            used = {layer.adapters for adapter_set in self.sets.values() for layer in adapter_set.layers.values()}
            self._placement.release_unused_adapters(used)

    def _evict_sets(self) -> None:
        while len(self.sets) > MAX_ADAPTER_SETS or sum(one.bytes for one in self.sets.values()) > MAX_SET_BYTES:
            self._drop([next(iter(self.sets))])

    def _on_failure(self, key: StepKey, error: Exception) -> Refusal:
        """Without memory for a set of adapters another set is evicted; if there is none left, this one is too large.
        What is refused as an input is a property of this size and set; any other error is one of all steps."""
        others = [adapters for adapters in self.sets if adapters != key.adapters]
        no_memory = isinstance(error, (LoraCacheFull, torch.OutOfMemoryError))
        if no_memory and key.adapters and others:
            self._drop(others[:1])
            return Refusal.RETRY
        if key.adapters if no_memory else isinstance(error, InputError):
            self._drop([])
            return Refusal.KEY
        self.clear()
        return Refusal.CACHE

    def _capture(self, key: StepKey, chunks: Sequence[Chunk]) -> DecodeStep:
        if self._fused is None:
            self._fused = fuse_latents(self._model)
        adapter_set = self._base
        if key.adapters:
            adapter_set = self.sets.get(key.adapters) or AdapterSet(key.adapters, self.device)
        if adapter_set.bytes > MAX_SET_BYTES:
            given = f"copies of {adapter_set.bytes} bytes for linear layers"
            raise InputError("CUDA graph", given, f"{MAX_SET_BYTES} at most")
        pinned = self.device.type == "cuda"
        lines = table_lines(len(self._layers), fp8=self._fp8)
        table = torch.zeros(lines, key.rows, dtype=torch.int64, pin_memory=pinned)
        tokens = torch.zeros(key.rows, dtype=torch.int64, pin_memory=pinned)
        device_table = torch.zeros(table.shape, dtype=table.dtype, device=self.device)
        compute = functools.partial(self._compute, adapter_set, table, device_table, tokens)
        step = DecodeStep(table, device_table, tokens, adapter_set, compute)
        rows = self._state_rows(chunks)
        step.fill(chunks, rows)
        with (
            nullcontext() if self._placement is None else self._placement.capture_warmup(recaptured=True),
            nullcontext() if self._arena is None else self._arena.preserved(rows),
        ):
            step = replace(step, replay=(self._record or self._record_on_device)(compute))
        if key.adapters:
            self.sets[key.adapters] = adapter_set
            self._evict_sets()
        return step

    def _compute(self, adapter_set: AdapterSet, table: Tensor, device_table: Tensor, tokens: Tensor) -> Tensor:
        device_table.copy_(table, non_blocking=True)
        arena = self._arena
        position_ids = device_table[POSITION][None]
        words = {"input_ids": device_table[TOKEN][None], "position_ids": position_ids, "use_cache": False}
        with (
            torch.inference_mode(),
            use_padding_mask(device_table[ACTIVE] != 0),
            adapter_set.applied(device_table[ADAPTER]) as lora_of,
            use_attention(functools.partial(self._attend, device_table, lora_of)),
            fused_latents(
                functools.partial(self._attend_latents, device_table), lambda linear: lora_of(linear) is not None
            ),
            nullcontext() if arena is None else use_batch_states(ArenaRows(arena, device_table[STATES])),
        ):
            logits: Tensor = self._model(**words).logits[0]
            tokens.copy_(logits.argmax(-1), non_blocking=True)
        return logits

    def _attend(
        self, table: Tensor, lora_of: RowLoraFn, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        if spec.latent is None:
            return attend_new_tokens(table, self._lines(spec), spec, query, key, value)
        lora = lora_of(spec.latent.linear)
        loras = [] if lora is None else [(slice(None), lora)]
        sums = self._attend_latents(table, spec, spec.latent.absorb(query, loras), key)
        return spec.latent.values_of(sums.transpose(0, 1), loras).transpose(0, 1)

    def _attend_latents(self, table: Tensor, spec: AttentionSpec, query: Tensor, key: Tensor) -> Tensor:
        return attend_latents(table, self._lines(spec), spec, query, key)

    def _lines(self, spec: AttentionSpec) -> CacheLines:
        return CacheLines.of_layer(self._layers.index(spec.layer), len(self._layers), fp8=self._fp8)

    def _record_on_device(self, compute: Compute) -> Compute:
        device = self.device

        def rehearse() -> None:
            stream = capture_stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                compute()
                with _synchronisation_refused():
                    compute()

        with torch.cuda.device(device):
            replay = self.graphs.pool.record(compute, rehearse)

        def replay_and_wait() -> Tensor:  # without `self`: graphs are freed with the last reference, not by a cycle
            logits = replay()
            torch.cuda.current_stream(device).synchronize()
            return logits

        return replay_and_wait


@contextmanager
def _synchronisation_refused() -> Iterator[None]:
    """A synchronisation would break a capture; here it is an error like any other. torch raises in all threads, so no
    adapter may be loading meanwhile."""
    warnings.filterwarnings("ignore", message="Synchronization debug mode")  # that it does not know of every wait
    with DEVICE_COPY_LOCK:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def uncaptured_family(forward: Forward | SequentialForward) -> str:
    """What keeps the steps of a model's family out of graphs on every machine; empty: nothing."""
    if not forward.batched:
        return f"sequences of {forward.model.config.model_type} are computed one at a time"
    if forward.indexers:
        return "keys are selected by an index"
    chunked = any(getattr(module, CHUNK_ATTRIBUTE, None) for module in forward.model.modules())
    return "attention depends on chunks of positions" if chunked or forward.position_scales else ""


def why_not(forward: Forward | SequentialForward, placement: Placement | None) -> str:
    """What keeps a model's steps out of graphs; empty: nothing that is known before they are tried."""
    if not env.graphs_enabled("decode"):
        return "KT_GRAPHS does not name decode"
    model = forward.model
    if reason := uncaptured_family(forward):
        return reason
    devices = {parameter.device for name, parameter in model.named_parameters() if ".experts." not in name}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return f"the model is on {', '.join(sorted(map(str, devices)))}, not on one GPU"
    device = next(iter(devices))
    if not decode_attention.is_supported(device):
        return "there is no Triton"
    if placement is not None and placement.defers:
        return "deferred experts come by way of Python"
    stores = {name: getattr(module, "kt_store", None) for name, module in expert_modules(model).items()}
    missing = [name for name, store in stores.items() if store is None or placed_for(store, device) is None]
    return f"no engine has the experts of {len(missing)} layers, {missing[0]} the first" if missing else ""
