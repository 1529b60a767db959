"""Small inference batches through a layer without synchronising the host on expert ids, so that a CUDA graph can hold
the step.

Hidden states `[T, H]`, ids and routing weights `[T, k]` are copied into pinned buffers on a side stream. One host
callback submits every expert that is not resident (`skip`) to the core's threads, a second one waits for them, and the
result is copied to the device. Meanwhile the current stream computes the resident experts from the ids in device memory
(`place/gpu/resident_decode.py`); then the two results are added. Since the host never sees the ids, rows are counted on
the device and fetched by `add_counts`. Without residents everything is queued on the current stream; if all experts
are resident the CPU has no share.

In CUDA graphs the rows of a batch may use different LoRA adapters, or none: int32 `[T]` on the device names the adapter
of each row and is copied down with the ids, so one graph serves every mixture of the adapters that it was captured
with. The CPU reads packed factors; the residents' kernels read factors through a table of device addresses.

Lifetimes: buffers belong to a batch size and are shared by all layers, whose calls run one after another on the stream;
prepared calls belong to a layer and its adapters, resident tables to a layer. A host callback holds raw addresses, so
the device is synchronised before any of these is freed, and everything that a captured graph uses, its store included,
is kept as long as this object, or, with adapters, until `release_unused_adapters`. When residents change, the tables of
captured calls are cleared (the core reads `skip` at every call): an older graph still computes correct results, with
all experts of that layer on the CPU, until it is captured again. If all experts are resident it has the CPU's share for
that reason alone; a graph of which its owner says that it is not replayed once `generation` has changed (`recaptured`)
has none.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktransformers import _core
from ktransformers.experts.backend import ExpertBatch
from ktransformers.experts.lora import MixedLora
from ktransformers.experts.store import ExpertStore
from ktransformers.ground.errors import InputError
from ktransformers.place.gpu import resident_batch, resident_decode
from ktransformers.place.gpu.executor import GpuExecutor, LayerOnDevice
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.gpu.multi_lora import LoraPointers
from ktransformers.place.gpu.resident_decode import DeviceRouting
from ktransformers.place.host_call import HostCall
from ktransformers.plan.modes import MAX_CAPTURED_TOKENS, MAX_DECODE_TOKENS, STREAM, STREAM_ALL

Size = tuple[tuple[int, ...], int, tuple[torch.dtype, ...]]  # shape of hidden; k; dtypes of hidden, ids and weights
Adapters = tuple[_core.Adapter, ...]  # packed adapters of one layer; rows name them by index


@dataclass(frozen=True)
class PinnedBuffers:
    """Buffers for batches of one size, in pinned host memory except for `share`."""

    hidden: Tensor
    ids: Tensor
    weights: Tensor
    adapters: Tensor  # int32 [T]: index into the adapters of the call, or -1
    out: Tensor
    share: Tensor  # the CPU's result on the device


@dataclass(frozen=True)
class ResidentTable:
    """Which experts of a layer are resident, as the device and the core read it."""

    cache: ExpertCache
    slot_of: Tensor  # int32 [E] on the device: slot of each expert, or -1
    skip: Tensor  # bool [E] in host memory: experts that the core leaves out
    complete: bool  # all experts are resident


@dataclass(frozen=True)
class PreparedCall:
    """A layer's call into the core over the buffers of one batch size, with these adapters."""

    call: HostCall
    buffers: PinnedBuffers
    residents: ResidentTable | None
    adapters: Adapters = ()
    lora_pointers: LoraPointers | None = None  # factors of the residents


def _size(hidden: Tensor, ids: Tensor, weights: Tensor) -> Size:
    return tuple(hidden.shape), ids.shape[1], (hidden.dtype, ids.dtype, weights.dtype)


class HostCallbackPath:
    """Buffers, prepared calls and resident tables of all layers on one device."""

    def __init__(self, device: torch.device, executor: GpuExecutor) -> None:
        self.device, self.executor = device, executor
        self.warming_up = False  # batches are accepted and refused as in a capture, and what a graph needs is allocated
        self.recaptured = False  # graphs captured now are not replayed once `generation` has changed
        self.generation = 0  # counts resident caches that were replaced: older graphs leave such layers to the CPU
        self._cuda = device.type == "cuda"
        self._buffers: dict[Size, PinnedBuffers] = {}
        self._residents: dict[int, ResidentTable | None] = {}  # by layer
        self._prepared: dict[tuple[int, Size, Adapters], PreparedCall] = {}
        self._lora_pointers: dict[tuple[int, Adapters], LoraPointers] = {}
        self._counts: dict[int, Tensor] = {}
        self._captured: dict[int, list[tuple[PreparedCall, ExpertStore]]] = {}
        self._stream: torch.cuda.Stream | None = None
        self._last_stream = -1
        self._launched = False  # calls outside of graphs whose errors were not looked for
        _paths.add(self)

    # Which batches.

    @property
    def capturing(self) -> bool:
        """Whether the current call is captured in a CUDA graph, or warms up for a capture."""
        return self.warming_up or self._stream_captures()

    def refusal(self, layer: LayerOnDevice, batch: ExpertBatch, mode: str) -> str:
        """The reason why this batch cannot go through host callbacks; empty: it can."""
        tokens = batch.ids.shape[0]
        if batch.lora is not None or (batch.mixed is not None and not self.capturing):
            return "LoRA on experts"
        if batch.mixed is not None and batch.mixed.rows.device != self.device:
            return "LoRA on experts with adapter indices in host memory"
        if mode in (STREAM, STREAM_ALL):
            return "experts that are streamed"
        most = MAX_CAPTURED_TOKENS if self.capturing else MAX_DECODE_TOKENS
        if not 0 < tokens <= most and not (self.capturing and self._computes_all(layer, batch)):
            return f"a batch of {tokens} tokens"
        if not resident_decode.runs_on(self.device):
            return "no Triton"
        rows = 0 if self.capturing else batch.ids.numel()
        if layer.index in self.executor.residents and not resident_decode.supports(layer.geometry, rows, self.device):
            return f"residents in {layer.geometry.first.formats[1].spec} and {tokens} tokens"
        return ""

    def _computes_all(self, layer: LayerOnDevice, batch: ExpertBatch) -> bool:
        """Whether a batch of any size is computed without the CPU, in a graph that is captured again when residents
        change."""
        cache = self.executor.residents.get(layer.index)
        complete = cache is not None and len(cache.present(layer.index)) == layer.geometry.experts
        complete = complete and self.executor.decodes_whole_layers
        return complete and self.recaptured and resident_batch.supports(layer, batch)

    def check(self, layer: LayerOnDevice, batch: ExpertBatch, mode: str) -> None:
        """Raise `InputError` for a batch that a CUDA graph cannot hold."""
        if reason := self.refusal(layer, batch, mode):
            limits = f"no LoRA in training, 1 to {MAX_CAPTURED_TOKENS} tokens, residents that Triton decodes"
            raise InputError("CUDA graph", reason, f"{limits}, no policy stream", "run this step outside of the graph")

    def is_prepared(self, layer: LayerOnDevice, batch: ExpertBatch) -> bool:
        """Whether buffers and calls for this batch size exist, which a first call outside of a graph allocates."""
        key = layer.index, _size(batch.hidden, batch.ids, batch.weights), ()
        return key in self._prepared and self._is_current(layer.index)

    def _stream_captures(self) -> bool:
        return self._cuda and torch.cuda.is_current_stream_capturing()

    # One batch.

    def forward(self, layer: LayerOnDevice, store: ExpertStore, batch: ExpertBatch) -> Tensor:
        """The layer's output in hidden's dtype, ordered on the current stream."""
        inputs = tuple(tensor.detach().contiguous() for tensor in (batch.hidden, batch.ids, batch.weights))
        if batch.ids.shape[0] > MAX_CAPTURED_TOKENS:
            return self._forward_all(layer, *inputs)
        if batch.mixed is not None:
            inputs = (*inputs, batch.mixed.rows.contiguous())
        if not self._cuda:
            return self._forward(layer, self._prepare(layer, store, inputs, batch.mixed), inputs)
        with torch.cuda.device(self.device):  # a host callback needs the stream's context to be current
            prepared = self._prepare(layer, store, inputs, batch.mixed)
            if self._stream_captures():
                self._captured.setdefault(layer.index, []).append((prepared, store))
            else:
                self._launched = True
            return self._forward(layer, prepared, inputs)

    def _forward_all(self, layer: LayerOnDevice, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """A batch of any size, all of whose experts are resident."""
        with torch.inference_mode(False):
            residents = self._table(layer)
        assert residents is not None
        routing = DeviceRouting(residents.slot_of, ids, weights, self._counts[layer.index])
        return resident_batch.forward(layer, residents.cache, routing, hidden, self.executor.decoded_buffer)

    def _forward(self, layer: LayerOnDevice, prepared: PreparedCall, inputs: tuple[Tensor, ...]) -> Tensor:
        hidden, ids, weights, *adapters = inputs
        residents, share = prepared.residents, prepared.buffers.share
        lora = None if prepared.lora_pointers is None else (adapters[0], prepared.lora_pointers)
        if residents is None:
            out = torch.empty_like(hidden)
            self._queue_cpu_share(prepared, inputs, out)
            resident_decode.count(ids, self._counts[layer.index])
            return out
        on_device = DeviceRouting(residents.slot_of, ids, weights, self._counts[layer.index])
        if residents.complete and (self.recaptured or not self._stream_captures()):
            return resident_decode.forward(layer, residents.cache, on_device, hidden, hidden.dtype, lora)
        cpu_done = self._start_cpu_share(prepared, inputs) if self._cuda else None
        part = resident_decode.forward(layer, residents.cache, on_device, hidden, torch.float32, lora)
        if cpu_done is not None:
            torch.cuda.current_stream(self.device).wait_event(cpu_done)
        else:
            self._queue_cpu_share(prepared, inputs, share)
        return torch.add(part, share, out=torch.empty_like(hidden))

    def _start_cpu_share(self, prepared: PreparedCall, inputs: tuple[Tensor, ...]) -> torch.cuda.Event:
        """Queue the CPU's share on a side stream; the event behind it. The current stream waits for the event before it
        goes on, so inputs and buffers are used in the order of one stream."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._queue_cpu_share(prepared, inputs, prepared.buffers.share)
            cpu_done: torch.cuda.Event = self._stream.record_event()
        return cpu_done

    def _queue_cpu_share(self, prepared: PreparedCall, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        buffers = prepared.buffers
        buffered = (buffers.hidden, buffers.ids, buffers.weights, buffers.adapters)
        for source, pinned in zip(inputs, buffered, strict=False):  # the last only with adapters
            pinned.copy_(source, non_blocking=True)
        prepared.call.submit()
        prepared.call.wait()
        target.copy_(buffers.out, non_blocking=True)

    # Allocation.

    def _prepare(
        self, layer: LayerOnDevice, store: ExpertStore, inputs: tuple[Tensor, ...], mixed: MixedLora | None
    ) -> PreparedCall:
        hidden, ids, weights, *_ = inputs
        size, adapters = _size(hidden, ids, weights), () if mixed is None else tuple(mixed.adapters)
        prepared = self._prepared.get((layer.index, size, adapters))
        capturing = self._stream_captures()
        if prepared is not None and self._is_current(layer.index):
            if not capturing:
                self._check_previous_call(prepared)
            return prepared
        if capturing:
            given = f"a batch of {hidden.shape[0]} tokens that was not computed before"
            expected = "a batch size that was computed once outside of a capture"
            raise InputError("CUDA graph", given, expected, "run the step once, then capture it")
        if not self._is_current(layer.index):
            self.drop_calls(layer.index)
        with torch.inference_mode(False):  # these buffers are also written outside of inference mode
            return self._allocate(layer, store, inputs, size, mixed)

    def _is_current(self, index: int) -> bool:
        table = self._residents.get(index)
        return self.executor.residents.get(index) is (None if table is None else table.cache)

    def _check_previous_call(self, prepared: PreparedCall) -> None:
        """Buffers are ordered by one stream: when it changes, wait for the previous one. An error of a host callback
        is raised here, at the next call of its layer."""
        stream = self._current_stream()
        if stream != self._last_stream:
            _synchronize(self.device)
            self._last_stream = stream
        prepared.call.raise_error()

    def _current_stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self._cuda else -1

    def _allocate(
        self, layer: LayerOnDevice, store: ExpertStore, inputs: tuple[Tensor, ...], size: Size, mixed: MixedLora | None
    ) -> PreparedCall:
        buffers = self._buffers.get(size)
        if buffers is None:
            hidden, ids, weights, out = (
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._cuda)
                for tensor in (*inputs[:3], inputs[0])
            )
            rows = torch.full(hidden.shape[:1], -1, dtype=torch.int32, pin_memory=self._cuda)
            share = torch.empty_like(out, device=self.device, pin_memory=False)
            buffers = self._buffers[size] = PinnedBuffers(hidden, ids, weights, rows, out, share)
        if layer.index not in self._counts:
            # A layer's weights must outlive the calls that are queued on them.
            weakref.finalize(store, _synchronize, self.device).atexit = False
        residents = self._table(layer)
        adapters: Adapters = ()
        lora_pointers: LoraPointers | None = None
        options: dict[str, Any] = {"out": buffers.out, "skip": None if residents is None else residents.skip}
        if mixed is not None:
            adapters = tuple(mixed.adapters)
            lora_pointers = None if residents is None else self._pointers_for(layer, mixed, adapters)
            # Earlier calls read the buffer, which may hold adapter indices that this call does not have.
            _synchronize(self.device)
            buffers.adapters.fill_(-1)
            options |= {"adapter": buffers.adapters, "adapters": adapters}
        call = store.prepare(buffers.hidden, buffers.ids, buffers.weights, **options)
        prepared = PreparedCall(HostCall(call, self._cuda), buffers, residents, adapters, lora_pointers)
        self._prepared[layer.index, size, prepared.adapters] = prepared
        _synchronize(self.device)  # tables and residents are complete before any stream uses them
        self._last_stream = self._current_stream()
        return prepared

    def _table(self, layer: LayerOnDevice) -> ResidentTable | None:
        """The layer's residents, and zeros for the counts of its rows, when they are asked for first."""
        if not self._is_current(layer.index):
            self.drop_calls(layer.index)
        if layer.index not in self._residents:
            self._residents[layer.index] = self._new_resident_table(layer)
        if layer.index not in self._counts:
            self._counts[layer.index] = torch.zeros(layer.geometry.experts, dtype=torch.int32, device=self.device)
        return self._residents[layer.index]

    def _pointers_for(self, layer: LayerOnDevice, mixed: MixedLora, adapters: Adapters) -> LoraPointers:
        pointers = self._lora_pointers.get((layer.index, adapters))
        if pointers is None:
            gate_up_rows = layer.geometry.first.out_rows
            pointers = LoraPointers.pin(self.executor.lora_cache, mixed.factors, gate_up_rows, self.device)
            self._lora_pointers[layer.index, adapters] = pointers
        return pointers

    def release_unused_adapters(self, used: Collection[Adapters]) -> None:
        """Free calls with adapters outside of `used`, what is kept for graphs captured with them, which must not be
        replayed any more, and their factors on the device."""
        _synchronize(self.device)

        def unused(adapters: Adapters) -> bool:
            return bool(adapters) and adapters not in used

        for key in [key for key in self._prepared if unused(key[2])]:
            del self._prepared[key]
        for index, kept in self._captured.items():
            self._captured[index] = [entry for entry in kept if not unused(entry[0].adapters)]
        for owner in [owner for owner in self._lora_pointers if unused(owner[1])]:
            self._lora_pointers.pop(owner).unpin(self.executor.lora_cache)

    def release_graphs(self) -> None:
        """Free resident caches and stores kept for graphs captured so far; none of the graphs is replayed any more."""
        _synchronize(self.device)
        self._captured.clear()

    def _new_resident_table(self, layer: LayerOnDevice) -> ResidentTable | None:
        cache = self.executor.residents.get(layer.index)
        if cache is None:
            return None
        slot_of = find_resident_slots(layer, cache)
        resident = slot_of >= 0
        return ResidentTable(cache, slot_of.to(self.device), resident, bool(resident.all()))

    def drop_calls(self, index: int) -> None:
        """Drop a layer's prepared calls, before its residents get another cache. In graphs captured before, the CPU
        computes every expert of the layer from now on."""
        table = self._residents.pop(index, None)
        keys = [key for key in self._prepared if key[0] == index]
        if not keys:
            return
        self.generation += 1
        _synchronize(self.device)
        for key in keys:
            del self._prepared[key]
        if table is not None and index in self._captured:
            table.skip.zero_()
            table.slot_of.fill_(-1)
            _synchronize(self.device)

    def raise_pending(self, tokens: int) -> None:
        """Raise errors of host callbacks in finished replays of batches of `tokens` tokens."""
        for (_, size, _), prepared in self._prepared.items():
            if size[0][0] == tokens:
                prepared.call.raise_error()

    def raise_launched(self) -> None:
        """Wait for calls outside of graphs on the current stream and raise their errors. Without it the next call of
        the layer raises them, when results of a damaged expert may have been used."""
        if not self._launched:
            return
        self._launched = False
        torch.cuda.current_stream(self.device).synchronize()
        for prepared in self._prepared.values():
            prepared.call.raise_error()

    def add_counts(self, index: int, counts: NDArray[np.int64]) -> None:
        """Add the rows of each expert of a layer since the last call to `counts` [E]."""
        on_device = self._counts.get(index)
        if on_device is not None:
            _synchronize(self.device)
            rows_so_far = on_device.to("cpu", copy=True)
            on_device -= rows_so_far.to(self.device)
            counts += rows_so_far.numpy()


def find_resident_slots(layer: LayerOnDevice, cache: ExpertCache) -> Tensor:
    """int32 [E]: slot of each resident expert, or -1; the current stream waits for their copies."""
    experts = sorted(cache.present(layer.index))
    slot_of = torch.full((layer.geometry.experts,), -1, dtype=torch.int32)
    slot_of[experts] = torch.tensor(cache.fetch(layer.index, layer.source, experts), dtype=torch.int32)
    cache.wait_for_copies(range(cache.count))
    return slot_of


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)


_paths: weakref.WeakSet[HostCallbackPath] = weakref.WeakSet()


@atexit.register
def _wait_for_all() -> None:
    """Wait for queued host callbacks while the core's threads still run: registered after the pool's own exit handler
    (`ground/pool.py`, imported by `experts/store.py`), so it runs before that. Nothing is replayed afterwards, so what
    graphs kept is dropped; stores refer to their engine and would otherwise never be freed."""
    for path in list(_paths):
        _synchronize(path.device)
        path._captured.clear()
