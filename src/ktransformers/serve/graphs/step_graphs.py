"""Steps of the server, replayed from CUDA graphs: no Python runs between kernels. ARCHITECTURE.md has the life of such
a step, docs/serve-speed.md what is not captured.

Steps come in a few sizes R; rows between two sizes are computed and thrown away. In a step of new tokens every row is a
sequence of its own; a step with prompt chunks has rows of some sequences, one after the other, and is captured where
nothing in it depends on the host: every expert is on the GPU, and no layer keeps a state or latents. What differs from
step to step is one run of numbers (`captured_step.py`): tokens, positions, adapters, blocks of the KV cache. It is
written into pinned memory and copied to the device before the graph; the graph leaves the most likely token of each
sequence in `_latest` on the device, from which they are copied to the host. Logits `[S, V]` stay on the device, in
memory that the next step overwrites. Attention is `paged_attention.py`'s, experts are `place/host_callback.py`'s, LoRA
is `adapter_set.py`'s, everything else is the stock model, called under capture as it is called otherwise.

Overlap: if every sequence of a step of new tokens is greedy and wants another token (`Chunk.continues`), the next step
is launched before the host waits for this one: same slots, next positions, tokens from `_latest`. So the GPU computes
while the host detokenises, delivers and builds the next batch. A step launched ahead is used only if the next batch has
nothing else than its rows, with the same slots, positions and tokens; rows of sequences that have ended meanwhile are
ignored. Otherwise it is waited for and forgotten: what it wrote, keys and values of the next position, is written
again. That is not so for convolution and recurrent states, and errors of host callbacks belong to a step, so models
with states and steps with experts on the CPU are not launched ahead. At most one step is ahead of the one that is
waited for.

A graph is captured for a size and a set of adapters, and serves every mixture of these and of the base: a step takes
the smallest set that has all adapters of its rows, and steps of the base alone take the graph without LoRA. A few sets
are kept, least recently used ones are evicted first; unloading an adapter evicts its sets once no request uses it.

Before a capture a step is rehearsed: computed outside of a graph as it would be inside, which allocates what has to
exist before, and then once more with torch raising on every synchronisation, so that what a graph cannot hold fails
where it does no harm. All of that happens in the middle of an answer: a step that is rehearsed, captured and replayed
writes the same keys to the same places each time; convolution and recurrent states, which each time would advance, are
restored (`state_arena.py`). Everything else (scored prompts, families whose keys are selected by an index) runs
eagerly, including batch sizes and adapter sets whose capture failed.

Reallocating the residents invalidates captured graphs; they are captured again.
"""

from __future__ import annotations

import functools
import inspect
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
from ktransformers.serve.attention.attention import use_attention
from ktransformers.serve.attention.latent import LATENT_ATTRIBUTE
from ktransformers.serve.attention.spec import AttentionSpec
from ktransformers.serve.attention.step import TILE_ROWS, DeviceStep
from ktransformers.serve.cache.kv_cache import BlockMemory, Owner
from ktransformers.serve.cache.recurrent_states import use_batch_states
from ktransformers.serve.flags import Launch
from ktransformers.serve.graphs import paged_attention
from ktransformers.serve.graphs.adapter_set import Adapters, AdapterSet, RowLoraFn, sort_adapters
from ktransformers.serve.graphs.captured_step import (
    ACTIVE,
    ADAPTER,
    ROW_POSITION,
    STATES,
    TOKEN,
    CapturedStep,
    Compute,
    LaunchedStep,
    StepInputs,
    StepRow,
)
from ktransformers.serve.graphs.latent_inputs import FUSED_LATENTS, fused_latents
from ktransformers.serve.graphs.state_arena import ArenaRows, StateArena
from ktransformers.serve.scheduler.forward import Chunk, Forward, ForwardResult, SequentialForward
from ktransformers.serve.scheduler.lora import DEVICE_COPY_LOCK

# Rows of steps of new tokens, and of steps with prompt chunks.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, MAX_CAPTURED_TOKENS)
CHUNK_SIZES = (64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
# Sequences of steps with prompt chunks.
CHUNK_COLUMNS = (8, 64, MAX_CAPTURED_TOKENS)
MAX_GRAPHS = 128
MAX_ADAPTER_SETS = 4
MAX_SET_BYTES = 1 << 30  # of the factors that sets of adapters have copied

Record = Callable[[Compute], Compute]  # one that does the same without Python


class StepKey(NamedTuple):
    rows: int
    adapters: Adapters  # that rows may have
    columns: int = 0  # sequences of a step with prompt chunks; 0: every row is a new token

    @property
    def description(self) -> str:
        names = ", ".join(adapter.name or "LoRA" for adapter in self.adapters)
        kind = "prompt" if self.columns else "decode"
        return f"{kind} steps of {self.rows} rows" + (f" with {names}" if names else "")

    @property
    def tiles(self) -> int:
        """At most so many tiles of prompt rows."""
        return self.rows // TILE_ROWS + self.columns if self.columns else 0


class StepGraphs:
    """The graphs of a model on one device. `placement` has its experts, None where it has none. `record` stands in for
    the capture in tests without a GPU. Without `overlap` no step is launched ahead."""

    def __init__(
        self,
        model: nn.Module,
        placement: Placement | None,
        record: Record | None = None,
        max_rows: int = MAX_CAPTURED_TOKENS,
        max_chunk_rows: int = 0,
        overlap: bool = True,
    ) -> None:
        self._model: Any = model
        self._placement = placement
        self.device = next(model.parameters()).device
        self._record = record
        self._sizes = [*(size for size in SIZES if size < max_rows), min(max_rows, MAX_CAPTURED_TOKENS)]
        self.max_rows = self._sizes[-1]
        self._chunk_sizes = self._sizes_of_chunks(max_chunk_rows)
        self.graphs: GraphCache[StepKey, CapturedStep] = GraphCache(
            "decode steps", GraphPool(self.device), max_graphs=MAX_GRAPHS
        )
        self._base = AdapterSet((), self.device)
        self.sets: OrderedDict[Adapters, AdapterSet] = OrderedDict()  # least recently used first; without the base
        self._fused: int | None = None  # modules of latent attention with fused steps, after the first capture
        self._generation = self._current_generation()
        self._memory: BlockMemory | None = None
        self._arena: StateArena | None = None  # of a model with convolution or recurrent states
        self._overlap = overlap
        self._ahead: LaunchedStep | None = None
        self._launches = 0
        cuda = self.device.type == "cuda"
        self._latest = torch.zeros(
            MAX_CAPTURED_TOKENS, dtype=torch.int64, device=self.device
        )  # tokens in, then argmax out
        self._argmax = torch.zeros(2, MAX_CAPTURED_TOKENS, dtype=torch.int64, pin_memory=cuda)
        self._events = [torch.cuda.Event() if cuda else None for _ in range(2)]  # type: ignore[no-untyped-call]
        self.replayed = 0  # steps
        self.overlapped = 0  # of these, launched ahead
        self.discarded = 0  # steps launched ahead for another batch than the next one

    def _sizes_of_chunks(self, most: int) -> list[int]:
        """Rows of steps with prompt chunks, at most so many; none: they are not captured."""
        model = self._model
        latents = any(hasattr(module, LATENT_ATTRIBUTE) for module in model.modules())
        if latents or "logits_to_keep" not in inspect.signature(type(model).forward).parameters:
            return []
        return [size for size in CHUNK_SIZES if size < most] + [most] * bool(most)

    def run(self, chunks: Sequence[Chunk]) -> list[ForwardResult | None] | None:
        """As `Forward.run`, or None if this step runs eagerly. Logits are valid until the next step."""
        if self._memory is not chunks[0].slot.memory:
            self.clear()
            self._memory = chunks[0].slot.memory
        if any(len(chunk.tokens) > 1 for chunk in chunks):
            return self._run_chunks(chunks)
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
        logits = None if ahead is not None else launched.logits
        return _results(chunks, rows, tokens, logits)

    def _run_chunks(self, chunks: Sequence[Chunk]) -> list[ForwardResult | None] | None:
        """A step with prompt chunks."""
        self.drop_ahead()
        self._check_generation()
        count = sum(len(chunk.tokens) for chunk in chunks)
        size = next((size for size in self._chunk_sizes if count <= size), None)
        columns = next((columns for columns in CHUNK_COLUMNS if len(chunks) <= columns), None)
        resident = self._placement is None or self._placement.all_resident
        if size is None or columns is None or not resident or not self._fits(chunks) or chunks[0].slot.states:
            return None
        step = self._captured(self._key(size, chunks, columns), chunks)
        if step is None:
            return None
        launched = self._launch(step, lambda which: self._load_chunks(step, which, chunks))
        tokens = launched.wait() if any(chunk.wants_logits for chunk in chunks) else [0] * step.columns
        self.replayed += 1
        return _results(chunks, range(len(chunks)), tokens, launched.logits)

    def _check_generation(self) -> None:
        """Graphs that were captured with other residents are gone."""
        if self._current_generation() != self._generation:
            self.clear()
            self._generation = self._current_generation()

    def _launched_for(self, chunks: Sequence[Chunk]) -> tuple[LaunchedStep | None, list[int]]:
        """The launch that computes these chunks and the row of each: the step ahead, or a new one; None: no graph."""
        self._check_generation()
        if self._ahead is not None:
            rows = self._ahead.rows_of(chunks)
            if rows is not None:
                launched, self._ahead = self._ahead, None
                self.overlapped += 1
                return launched, rows
            self.drop_ahead()
        size = next((size for size in self._sizes if len(chunks) <= size), None)
        if size is None or not self._fits(chunks):
            return None, []
        step = self._captured(self._key(size, chunks), chunks)
        if step is None:
            return None, []
        return self._launch_rows(step, self._rows(chunks)), list(range(len(chunks)))

    def _captured(self, key: StepKey, chunks: Sequence[Chunk]) -> CapturedStep | None:
        """The graph, captured if it is time to."""
        step = self.graphs.get(key)
        if step is None and self.graphs.due(key):
            make = functools.partial(self._capture, key, chunks)
            step = self.graphs.capture(key, make, key.description, self._on_failure)
        if step is not None and key.adapters:
            self.sets.move_to_end(key.adapters)
        return step

    def _launch_ahead(self, step: CapturedStep, chunks: Sequence[Chunk], rows: Sequence[int]) -> LaunchedStep | None:
        """Queue the step after the one that computes `chunks` in `rows`; None: it cannot be known yet."""
        continues = self._overlap and self._arena is None and all(chunk.continues for chunk in chunks)
        if not continues or step.uses_host:
            return None
        size = next(size for size in self._sizes if len(chunks) <= size)
        following = self.graphs.get(self._key(size, chunks))
        if following is None:
            return None
        ahead = [
            StepRow(chunk.slot, row, chunk.position + 1, chunk.adapter) for row, chunk in zip(rows, chunks, strict=True)
        ]
        return self._launch_rows(following, ahead, ahead=True)

    def _launch_rows(self, step: CapturedStep, rows: Sequence[StepRow], *, ahead: bool = False) -> LaunchedStep:
        launched = self._launch(step, lambda which: self._load(step, which, rows, ahead=ahead))
        return replace(launched, rows=rows)

    def _launch(self, step: CapturedStep, load: Callable[[int], None]) -> LaunchedStep:
        """Queue a step whose inputs `load` writes. When a launch uses a pinned buffer, the last launch but one, which
        used it before, has been waited for."""
        which, count = self._launches % 2, step.columns
        argmax, finished = self._argmax[which, :count], self._events[which]
        self._launches += 1
        with nullcontext() if finished is None else torch.cuda.device(self.device):
            if finished is not None:
                finished.synchronize()
            load(which)
            logits = step.replay()
            argmax.copy_(self._latest[:count], non_blocking=True)
            if finished is not None:
                finished.record(torch.cuda.current_stream(self.device))
        return LaunchedStep(step, (), logits, argmax, finished)

    def _load(self, step: CapturedStep, which: int, rows: Sequence[StepRow], *, ahead: bool = False) -> None:
        """Queue what a replay of new tokens reads: the inputs, and the tokens in `_latest`."""
        step.load(which, rows)
        tokens = step.inputs.rows[TOKEN]
        if not ahead:
            self._latest[: step.size].copy_(tokens)
        elif any(row.token != index for index, row in enumerate(rows)):  # sequences have left
            self._latest[: len(rows)] = self._latest[tokens[: len(rows)]]

    def _load_chunks(self, step: CapturedStep, which: int, chunks: Sequence[Chunk]) -> None:
        step.load_chunks(which, chunks)

    def drop_ahead(self) -> None:
        """Wait for a step that was launched ahead, and forget it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self.discarded += 1
            ahead.wait()

    def _current_generation(self) -> int:
        return 0 if self._placement is None else self._placement.generation

    def _fits(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the rows of these chunks can be those of a graph."""
        assert self._memory is not None
        if self.graphs.closed or not self._memory.layers:
            return False
        if self._arena is None and chunks[0].slot.states:
            self._arena = StateArena(self.max_rows)
        states = self._arena is not None
        return all(chunk.logits_reader is None and bool(chunk.slot.states) == states for chunk in chunks)

    def _rows(self, chunks: Sequence[Chunk]) -> list[StepRow]:
        """The rows that compute these chunks."""
        states = [0] * len(chunks) if self._arena is None else self._arena.place([chunk.slot for chunk in chunks])
        return [
            StepRow(chunk.slot, chunk.tokens[0], chunk.position, chunk.adapter, state_row)
            for chunk, state_row in zip(chunks, states, strict=True)
        ]

    def _key(self, rows: int, chunks: Sequence[Chunk], columns: int = 0) -> StepKey:
        wanted = {chunk.adapter for chunk in chunks if chunk.adapter is not None}
        if not wanted:
            return StepKey(rows, (), columns)
        keys = [StepKey(rows, adapters, columns) for adapters in self.sets if wanted <= set(adapters)]
        allowed = [key.adapters for key in keys if key not in self.graphs.refused]
        return StepKey(rows, min(allowed, key=len, default=sort_adapters(wanted)), columns)

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

    def _capture(self, key: StepKey, chunks: Sequence[Chunk]) -> CapturedStep:
        if self._fused is None:
            self._fused = FUSED_LATENTS.apply(self._model)
        adapter_set = self._base
        if key.adapters:
            adapter_set = self.sets.get(key.adapters) or AdapterSet(key.adapters, self.device)
        if adapter_set.bytes > MAX_SET_BYTES:
            given = f"copies of {adapter_set.bytes} bytes for linear layers"
            raise InputError("CUDA graph", given, f"{MAX_SET_BYTES} at most")
        assert self._memory is not None
        sizes = key.rows, key.columns or key.rows, key.tiles, self._memory.longest
        pinned = [StepInputs.allocate(*sizes, pin_memory=self.device.type == "cuda") for _ in range(2)]
        inputs = StepInputs.allocate(*sizes, device=self.device)
        uses_host = self._placement is not None and not self._placement.all_resident
        step = CapturedStep((pinned[0], pinned[1]), inputs, adapter_set, uses_host, lambda: torch.empty(0))
        compute = functools.partial(self._compute, step)
        if key.columns:
            states = list[int]()
            load = functools.partial(self._load_chunks, step, 0, chunks)
        else:
            rows = self._rows(chunks)
            states = [row.states for row in rows]
            load = functools.partial(self._load, step, 0, rows)
        load()
        with (
            nullcontext() if self._placement is None else self._placement.capture_warmup(recaptured=True),
            nullcontext() if self._arena is None else self._arena.preserved(states),
        ):
            record = self._record or functools.partial(self._record_on_device, load)
            step = replace(step, replay=record(compute))
        if key.adapters:
            self.sets[key.adapters] = adapter_set
            self._evict_sets()
        return step

    def _compute(self, step: CapturedStep) -> Tensor:
        arena, rows, adapter_set = self._arena, step.inputs.rows, step.adapter_set
        latest = self._latest[: step.columns]
        tokens = latest if step.decodes else rows[TOKEN]
        words = {"input_ids": tokens[None], "position_ids": rows[ROW_POSITION][None], "use_cache": False}
        if not step.decodes:
            words["logits_to_keep"] = step.inputs.kept
        attention = step.attention()
        with (
            torch.inference_mode(),
            use_padding_mask(rows[ACTIVE] != 0),
            adapter_set.applied(rows[ADAPTER]) as lora_of,
            use_attention(functools.partial(self._attend, attention, lora_of)),
            fused_latents(
                functools.partial(self._attend_latents, attention), lambda linear: lora_of(linear) is not None
            ),
            nullcontext() if arena is None else use_batch_states(ArenaRows(arena, rows[STATES])),
        ):
            logits: Tensor = self._model(**words).logits[0]
            torch.argmax(logits, -1, out=latest)
        return logits

    def _attend(
        self, step: DeviceStep, lora_of: RowLoraFn, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        assert self._memory is not None
        if spec.latent is None:
            cache = self._memory.of_layer(spec.layer, key, value)
            return paged_attention.attend(step, cache, spec, query, key, value)
        lora = lora_of(spec.latent.linear)
        loras = [] if lora is None else [(slice(None), lora)]
        sums = self._attend_latents(step, spec, spec.latent.absorb(query, loras), key)
        return spec.latent.values_of(sums.transpose(0, 1), loras).transpose(0, 1)

    def _attend_latents(self, step: DeviceStep, spec: AttentionSpec, query: Tensor, key: Tensor) -> Tensor:
        assert self._memory is not None
        return paged_attention.attend_latents(step, self._memory.of_layer(spec.layer, key), spec, query, key)

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


def _results(
    chunks: Sequence[Chunk], rows: Sequence[int], tokens: Sequence[int], logits: Tensor | None
) -> list[ForwardResult | None]:
    """Of chunks whose last rows have these columns; without `logits` the next step has overwritten them."""
    return [
        ForwardResult(None if logits is None else logits[row], tokens[row] if chunk.greedy else None)
        if chunk.wants_logits
        else None
        for row, chunk in zip(rows, chunks, strict=True)
    ]


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
    return "queries are scaled by their positions" if forward.position_scales else ""


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
    if not paged_attention.is_supported(device):
        return "there is no Triton"
    layers = {name: packed_experts(module) for name, module in expert_modules(model).items()}
    missing = [name for name, kt in layers.items() if kt is None or not kt.is_placed_on(device)]
    return f"no engine has the experts of {len(missing)} layers, {missing[0]} the first" if missing else ""


def attach_graphs(
    forward: Forward | SequentialForward, placement: Placement | None, launch: Launch, max_chunk_rows: int = 0
) -> str:
    """Let steps be graphs unless the launch line or the model says otherwise; returns the line to log."""
    off = "--disable-cuda-graph" if launch.disable_cuda_graph else ""
    off = off or ("--attention-backend torch" if launch.attention_backend == "torch" else "")
    reason = off or why_not(forward, placement)
    if reason:
        return f"decode without CUDA graphs: {reason}"
    max_rows = min(launch.cuda_graph_max_bs, launch.max_running_requests or launch.cuda_graph_max_bs)
    overlap = not launch.disable_overlap_schedule
    served: Any = forward
    served.graphs = StepGraphs(
        forward.model, placement, max_rows=max_rows, max_chunk_rows=max_chunk_rows, overlap=overlap
    )
    return f"decode in CUDA graphs, batches of up to {served.graphs.max_rows} sequences"
