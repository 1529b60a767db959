"""Decode steps of the server, replayed from CUDA graphs: every sequence has one new token, and no Python runs between
kernels. ARCHITECTURE.md has the life of such a step, docs/serve-speed.md what is not captured.

Steps come in a few sizes R; rows between two sizes are computed and thrown away. What differs from step to step is a
table (`step_table.py`), int64 `[lines, R]`: tokens, positions, adapters, addresses of KV cache slots. It is
written into pinned memory and copied to the device before the graph; the graph leaves the most likely tokens in
`_latest` on the device, from which they are copied to the host. Logits `[R, V]` stay on the device, in memory that the
next step overwrites. Attention is `decode_attention.py`'s, experts are `place/host_callback.py`'s, LoRA is
`adapter_set.py`'s, everything else is the stock model, called under capture as it is called otherwise.

Overlap: if every sequence of a step is greedy and wants another token (`Chunk.continues`), the next step is launched
before the host waits for this one: same slots, next positions, tokens from `_latest`. So the GPU computes while the
host detokenises, delivers and builds the next batch. A step launched ahead is used only if the next batch has nothing
else than its rows, with the same slots, positions and tokens; rows of sequences that have ended meanwhile are ignored.
Otherwise it is waited for and forgotten: what it wrote, keys and values of the next position, is written again. That
is not so for convolution and recurrent states, and errors of host callbacks belong to a step, so models with states
and steps with experts on the CPU are not launched ahead. At most one step is ahead of the one that is waited for.

A graph is captured for a size and a set of adapters, and serves every mixture of these and of the base: a step takes
the smallest set that has all adapters of its rows, and steps of the base alone take the graph without LoRA. A few sets
are kept, least recently used ones are evicted first; unloading an adapter evicts its sets once no request uses it.

Before a capture a step is rehearsed: computed outside of a graph as it would be inside, which allocates what has to
exist before, and then once more with torch raising on every synchronisation, so that what a graph cannot hold fails
where it does no harm. All of that happens in the middle of an answer: a step that is rehearsed, captured and replayed
writes the same keys to the same places each time; convolution and recurrent states, which each time would advance, are
restored (`state_arena.py`). Everything else (prompts, scored prompts, families whose keys are selected by an index)
runs eagerly, including batch sizes and adapter sets whose capture failed.

Reallocating the residents invalidates captured graphs; they are captured again.
"""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ktransformers.experts.backend import packed_experts
from ktransformers.experts.contract import expert_modules
from ktransformers.experts.interface import use_padding_mask
from ktransformers.ground import env
from ktransformers.ground.errors import InputError
from ktransformers.modeling.cuda_graphs import GraphCache, GraphPool, Refusal, capture_stream
from ktransformers.place.gpu.multi_lora import LoraCacheFull
from ktransformers.place.placement import Placement
from ktransformers.plan.modes import MAX_CAPTURED_TOKENS
from ktransformers.serve.attention.attention import AttentionSpec, use_attention
from ktransformers.serve.attention.windows import CHUNK_ATTRIBUTE
from ktransformers.serve.cache.kv_cache import Owner
from ktransformers.serve.cache.recurrent_states import use_batch_states
from ktransformers.serve.flags import Launch
from ktransformers.serve.graphs import decode_attention
from ktransformers.serve.graphs.adapter_set import Adapters, AdapterSet, RowLoraFn, sort_adapters
from ktransformers.serve.graphs.decode_attention import attend_latents, attend_new_tokens
from ktransformers.serve.graphs.decode_step import Compute, DecodeStep, LaunchedStep, StepRow
from ktransformers.serve.graphs.latent_inputs import FUSED_LATENTS, fused_latents
from ktransformers.serve.graphs.state_arena import ArenaRows, StateArena
from ktransformers.serve.graphs.step_table import ACTIVE, ADAPTER, POSITION, STATES, TOKEN, CacheLines, table_lines
from ktransformers.serve.scheduler.forward import Chunk, Forward, ForwardResult, SequentialForward
from ktransformers.serve.scheduler.lora import DEVICE_COPY_LOCK

NAME = "decode steps"
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, MAX_CAPTURED_TOKENS)  # rows
MAX_ADAPTER_SETS = 4
MAX_SET_BYTES = 1 << 30  # of the factors that sets of adapters have copied

Record = Callable[[Compute], Compute]  # one that does the same without Python


class StepKey(NamedTuple):
    rows: int
    adapters: Adapters  # that rows may have

    @property
    def description(self) -> str:
        names = ", ".join(adapter.name or "LoRA" for adapter in self.adapters)
        return f"{NAME} of {self.rows} rows" + (f" with {names}" if names else "")


class DecodeGraphs:
    """The graphs of a model on one device. `placement` has its experts, None where it has none. `record` stands in for
    the capture in tests without a GPU. Without `overlap` no step is launched ahead."""

    def __init__(
        self,
        model: nn.Module,
        placement: Placement | None,
        record: Record | None = None,
        max_rows: int = MAX_CAPTURED_TOKENS,
        overlap: bool = True,
    ) -> None:
        self._model: Any = model
        self._placement = placement
        self.device = next(model.parameters()).device
        self._record = record
        self._sizes = [*(size for size in SIZES if size < max_rows), min(max_rows, MAX_CAPTURED_TOKENS)]
        self.max_rows = self._sizes[-1]
        self.graphs: GraphCache[StepKey, DecodeStep] = GraphCache(NAME, GraphPool(self.device))
        self._base = AdapterSet((), self.device)
        self.sets: OrderedDict[Adapters, AdapterSet] = OrderedDict()  # least recently used first; without the base
        self._fused: int | None = None  # modules of latent attention with fused steps, after the first capture
        self._generation = self._current_generation()
        self._layers: tuple[int, ...] = ()
        self._fp8 = False  # slots are FP8
        self._arena: StateArena | None = None  # of a model with convolution or recurrent states
        self._overlap = overlap
        self._ahead: LaunchedStep | None = None
        self._launches = 0
        cuda = self.device.type == "cuda"
        self._latest = torch.zeros(self.max_rows, dtype=torch.int64, device=self.device)  # tokens in, then argmax out
        self._argmax = torch.zeros(2, self.max_rows, dtype=torch.int64, pin_memory=cuda)
        self._events = [torch.cuda.Event() if cuda else None for _ in range(2)]  # type: ignore[no-untyped-call]
        self.replayed = 0  # steps
        self.overlapped = 0  # of these, launched ahead
        self.discarded = 0  # steps launched ahead for another batch than the next one

    def run(self, chunks: Sequence[Chunk]) -> list[ForwardResult | None] | None:
        """As `Forward.run`, or None if this step runs eagerly. Logits are valid until the next step."""
        launched, rows = self._launched_for(chunks)
        if launched is None:
            return None
        ahead = self._ahead = self._launch_ahead(launched.step, chunks, rows)
        tokens = launched.wait()
        if self._placement is not None:
            self._placement.raise_pending(launched.step.size)
        self.replayed += 1
        if ahead is not None:
            self._ahead = replace(ahead, inputs=[tokens[row.token] for row in ahead.rows])
        return [
            ForwardResult(None if ahead is not None else launched.logits[row], tokens[row] if chunk.greedy else None)
            if chunk.wants_logits
            else None
            for row, chunk in zip(rows, chunks, strict=True)
        ]

    def _launched_for(self, chunks: Sequence[Chunk]) -> tuple[LaunchedStep | None, list[int]]:
        """The launch that computes these chunks and the row of each: the step ahead, or a new one; None: no graph."""
        if self._current_generation() != self._generation:
            self.clear()
            self._generation = self._current_generation()
        if self._ahead is not None:
            rows = self._ahead.rows_of(chunks)
            if rows is not None:
                launched, self._ahead = self._ahead, None
                self.overlapped += 1
                return launched, rows
            self.drop_ahead()
        size = self._size(chunks)
        if size is None:
            return None, []
        key = self._key(size, chunks)
        step = self.graphs.get(key)
        if step is None and self.graphs.due(key):
            make = functools.partial(self._capture, key, chunks)
            step = self.graphs.capture(key, make, key.description, self._on_failure)
        if step is None:
            return None, []
        if key.adapters:
            self.sets.move_to_end(key.adapters)
        return self._launch(step, self._rows(chunks)), list(range(len(chunks)))

    def _launch_ahead(self, step: DecodeStep, chunks: Sequence[Chunk], rows: Sequence[int]) -> LaunchedStep | None:
        """Queue the step after the one that computes `chunks` in `rows`; None: it cannot be known yet."""
        continues = self._overlap and self._arena is None and all(chunk.continues for chunk in chunks)
        if not continues or step.uses_host:
            return None
        size = next(size for size in self._sizes if len(chunks) <= size)
        following = self.graphs.get(self._key(size, chunks))
        if following is None:
            return None
        return self._launch(
            following,
            [
                StepRow(chunk.slot, row, chunk.position + 1, chunk.adapter, chunk.slot.capacity)
                for row, chunk in zip(rows, chunks, strict=True)
            ],
            ahead=True,
        )

    def _launch(self, step: DecodeStep, rows: Sequence[StepRow], *, ahead: bool = False) -> LaunchedStep:
        """Queue a step. When a launch uses a pinned buffer, the last launch but one, which used it before, has been
        waited for."""
        which, size = self._launches % 2, step.size
        argmax, finished = self._argmax[which, :size], self._events[which]
        self._launches += 1
        with nullcontext() if finished is None else torch.cuda.device(self.device):
            self._load(step, which, rows, ahead=ahead)
            logits = step.replay()
            argmax.copy_(self._latest[:size], non_blocking=True)
            if finished is not None:
                finished.record(torch.cuda.current_stream(self.device))
        return LaunchedStep(step, rows, logits, argmax, finished)

    def _load(self, step: DecodeStep, which: int, rows: Sequence[StepRow], *, ahead: bool = False) -> None:
        """Queue what a replay reads: the table, and the tokens in `_latest`."""
        step.copy_table(which, rows)
        if not ahead:
            self._latest[: step.size].copy_(step.device_table[TOKEN])
        elif any(row.token != index for index, row in enumerate(rows)):  # sequences have left
            self._latest[: len(rows)] = self._latest[step.device_table[TOKEN, : len(rows)]]

    def drop_ahead(self) -> None:
        """Wait for a step that was launched ahead, and forget it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self.discarded += 1
            ahead.wait()

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

    def _rows(self, chunks: Sequence[Chunk]) -> list[StepRow]:
        """The rows that compute these chunks."""
        states = [0] * len(chunks) if self._arena is None else self._arena.place([chunk.slot for chunk in chunks])
        return [
            StepRow(chunk.slot, chunk.tokens[0], chunk.position, chunk.adapter, chunk.slot.capacity, state_row)
            for chunk, state_row in zip(chunks, states, strict=True)
        ]

    def _key(self, size: int, chunks: Sequence[Chunk]) -> StepKey:
        wanted = {chunk.adapter for chunk in chunks if chunk.adapter is not None}
        if not wanted:
            return StepKey(size, ())
        keys = [StepKey(size, adapters) for adapters in self.sets if wanted <= set(adapters)]
        allowed = [key.adapters for key in keys if key not in self.graphs.refused]
        return StepKey(size, min(allowed, key=len, default=sort_adapters(wanted)))

    def forget(self, owner: Owner) -> None:
        """An adapter was unloaded, and no request uses it any more. Others that were refused may fit now."""
        self.drop_ahead()
        self._drop([adapters for adapters in self.sets if any(adapter.owner == owner for adapter in adapters)])
        self.graphs.reset(lambda key: bool(key.adapters))

    def clear(self) -> None:
        self.drop_ahead()
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
            used = {
                tuple(layer.adapters) for adapter_set in self.sets.values() for layer in adapter_set.layers.values()
            }
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
            self._fused = FUSED_LATENTS.apply(self._model)
        adapter_set = self._base
        if key.adapters:
            adapter_set = self.sets.get(key.adapters) or AdapterSet(key.adapters, self.device)
        if adapter_set.bytes > MAX_SET_BYTES:
            given = f"copies of {adapter_set.bytes} bytes for linear layers"
            raise InputError("CUDA graph", given, f"{MAX_SET_BYTES} at most")
        lines = table_lines(len(self._layers), fp8=self._fp8)
        tables = torch.zeros(2, lines, key.rows, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        device_table = torch.zeros(lines, key.rows, dtype=torch.int64, device=self.device)
        compute = functools.partial(self._compute, adapter_set, device_table)
        uses_host = self._placement is not None and not self._placement.all_resident
        step = DecodeStep(tables, device_table, adapter_set, uses_host, compute)
        rows = self._rows(chunks)
        load = functools.partial(self._load, step, 0, rows)
        load()
        with (
            nullcontext() if self._placement is None else self._placement.capture_warmup(recaptured=True),
            nullcontext() if self._arena is None else self._arena.preserved([row.states for row in rows]),
        ):
            record = self._record or functools.partial(self._record_on_device, load)
            step = replace(step, replay=record(compute))
        if key.adapters:
            self.sets[key.adapters] = adapter_set
            self._evict_sets()
        return step

    def _compute(self, adapter_set: AdapterSet, device_table: Tensor) -> Tensor:
        arena, tokens = self._arena, self._latest[: device_table.shape[1]]
        words = {"input_ids": tokens[None], "position_ids": device_table[POSITION][None], "use_cache": False}
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
            torch.argmax(logits, -1, out=tokens)
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

    def _record_on_device(self, load: Callable[[], None], compute: Compute) -> Compute:
        def rehearse() -> None:
            stream = capture_stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                compute()
                load()  # a step overwrites its tokens
                with _synchronisation_refused():
                    compute()

        with torch.cuda.device(self.device):
            return self.graphs.pool.record(compute, rehearse)


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
    layers = {name: packed_experts(module) for name, module in expert_modules(model).items()}
    missing = [name for name, kt in layers.items() if kt is None or not kt.is_placed_on(device)]
    return f"no engine has the experts of {len(missing)} layers, {missing[0]} the first" if missing else ""


def attach_graphs(forward: Forward | SequentialForward, placement: Placement | None, launch: Launch) -> str:
    """Let decode steps be graphs unless the launch line or the model says otherwise; returns the line to log."""
    off = "--disable-cuda-graph" if launch.disable_cuda_graph else ""
    off = off or ("--attention-backend torch" if launch.attention_backend == "torch" else "")
    reason = off or why_not(forward, placement)
    if reason:
        return f"decode without CUDA graphs: {reason}"
    max_rows = min(launch.cuda_graph_max_bs, launch.max_running_requests or launch.cuda_graph_max_bs)
    overlap = not launch.disable_overlap_schedule
    served: Any = forward
    served.graphs = DecodeGraphs(forward.model, placement, max_rows=max_rows, overlap=overlap)
    return f"decode in CUDA graphs, batches of up to {served.graphs.max_rows} sequences"
