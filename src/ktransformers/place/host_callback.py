"""A few tokens through a layer without Python between the device and the CPU: what can be captured in a CUDA graph.

Hidden `[T, H]`, ids and routing weights `[T, k]` are copied into pinned buffers on a stream of its own; a host function
then has the core compute every expert that is no resident (`skip`), a second one waits for it, and the result is copied
up. Meanwhile the current stream computes the residents from the ids on the device (`gpu/routes.py`); then both are
added. The thread that queues this waits for nothing, so the host never learns who was asked for: rows are counted on
the device and fetched when somebody asks (`add_counts`). Where nothing is resident all of it is on the current stream.

In graphs rows may have adapters, several and none: who wants which is int32 `[T]` on the device and comes down with the
ids, so a graph serves any mixture of the adapters that it was captured with. The CPU has them packed, residents find
their factors by a table of addresses.

Who owns what: buffers belong to a size of batch and are shared by all layers, whose calls follow each other on the
stream; prepared calls belong to a layer and its adapters, the tables of residents to a layer. A host function holds
bare addresses, so none of these may go while work is queued: whoever drops them waits for the device first, and what a
graph has captured is kept, its store included, as long as this object; with adapters, until nobody uses these any more
(`retain`). When residents change in their room, the tables are written anew (the core reads `skip` at every call), and
graphs go on. When they get another room, tables of captured calls are set to "nobody is resident": a graph from before
computes the right numbers, all of that layer on the CPU, until it is captured again.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktransformers import _core
from ktransformers.errors import InputError
from ktransformers.nn.expert_call import ExpertCall
from ktransformers.nn.store import ExpertStore
from ktransformers.place.gpu import resident_decode
from ktransformers.place.gpu.cuda_driver import call_on_host
from ktransformers.place.gpu.executor import ExpertBatch, GpuExecutor, LayerOnDevice
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.gpu.multi_lora import LoraPointers, MultiLora
from ktransformers.plan.modes import MAX_DECODE_TOKENS, STREAM, STREAM_ALL

Size = tuple[tuple[int, ...], int, tuple[torch.dtype, ...]]  # of hidden; k; dtypes of hidden, ids and weights
Adapters = tuple[_core.Adapter, ...]  # of one layer, in the order by which rows name them


@dataclass(frozen=True)
class PinnedBuffers:
    """For batches of one size: pinned, but for the last."""

    hidden: Tensor
    ids: Tensor
    weights: Tensor
    adapters: Tensor  # int32 [T]: a place among the adapters of the call, or -1
    out: Tensor
    share: Tensor  # what the CPU has computed, on the device


@dataclass(frozen=True)
class ResidentTable:
    room: ExpertCache
    place: Tensor  # int32 [E] on the device: an expert's slot, or -1
    skip: Tensor  # bool [E] in host memory: whom the core leaves out


@dataclass(frozen=True)
class PreparedCall:
    """One layer's call over the buffers of a size, with these adapters."""

    call: ExpertCall
    buffers: PinnedBuffers
    residents: ResidentTable | None
    adapters: Adapters = ()
    terms: LoraPointers | None = None  # of the residents


def _size(hidden: Tensor, ids: Tensor, weights: Tensor) -> Size:
    return tuple(hidden.shape), ids.shape[1], (hidden.dtype, ids.dtype, weights.dtype)


class HostCallbackPath:
    def __init__(self, device: torch.device, executor: GpuExecutor) -> None:
        self.device, self.executor = device, executor
        self.rehearsing = False  # outside of a capture, but taken and refused as in one; what a graph needs is made
        self.generation = 0  # of rooms for residents: graphs of another one leave whole layers to the CPU
        self._cuda = device.type == "cuda"
        self._buffers: dict[Size, PinnedBuffers] = {}
        self._residents: dict[int, ResidentTable | None] = {}  # by layer
        self._ready: dict[tuple[int, Size, Adapters], PreparedCall] = {}
        self._terms: dict[tuple[int, Adapters], LoraPointers] = {}
        self._counts: dict[int, Tensor] = {}
        self._captured: dict[int, list[tuple[PreparedCall, ExpertStore]]] = {}
        self._stream: torch.cuda.Stream | None = None
        self._last_stream = -1
        _living.add(self)

    # Which batches.

    @property
    def capturing(self) -> bool:
        """Whether the current call is captured in a CUDA graph, or rehearses that."""
        return self.rehearsing or self._stream_captures()

    def refusal(self, layer: LayerOnDevice, batch: ExpertBatch, mode: str) -> str:
        """Why this batch cannot go through host callbacks; empty: it can."""
        tokens = batch.ids.shape[0]
        if batch.factors is not None or (batch.several is not None and not self.capturing):
            return "LoRA on experts"
        if batch.several is not None and batch.several.lora.rows.device != self.device:
            return "LoRA on experts for rows that the host knows"
        if mode in (STREAM, STREAM_ALL):
            return "experts that are streamed"
        if not 0 < tokens <= MAX_DECODE_TOKENS:
            return f"a batch of {tokens} tokens"
        if not resident_decode.runs_on(self.device):
            return "no Triton"
        rows = 0 if self.capturing else batch.ids.numel()
        if layer.index in self.executor.residents and not resident_decode.knows(layer.geometry, rows, self.device):
            return f"residents in {layer.geometry.first.formats[1].spec} and {tokens} tokens"
        return ""

    def check(self, layer: LayerOnDevice, batch: ExpertBatch, mode: str) -> None:
        """Refuse what a CUDA graph cannot hold."""
        if reason := self.refusal(layer, batch, mode):
            limits = (
                f"no training's LoRA, 1 to {MAX_DECODE_TOKENS} tokens, residents that Triton decodes, no policy stream"
            )
            raise InputError("CUDA graph", reason, limits, "run this step outside of the graph")

    def prepared(self, layer: LayerOnDevice, batch: ExpertBatch) -> bool:
        """Whether buffers and calls for this batch size exist, which a first call outside of a graph allocates."""
        key = layer.index, _size(batch.hidden, batch.ids, batch.weights), ()
        return key in self._ready and self._is_current(layer.index)

    def _stream_captures(self) -> bool:
        return self._cuda and torch.cuda.is_current_stream_capturing()

    # One batch.

    def forward(self, layer: LayerOnDevice, store: ExpertStore, batch: ExpertBatch) -> Tensor:
        """In hidden's dtype, on the device, in the order of the current stream."""
        given = tuple(tensor.detach().contiguous() for tensor in (batch.hidden, batch.ids, batch.weights))
        if batch.several is not None:
            given = (*given, batch.several.lora.rows.contiguous())
        if not self._cuda:
            return self._forward(layer, self._find(layer, store, given, batch.several), given)
        with torch.cuda.device(self.device):  # host functions want the stream's context
            ready = self._find(layer, store, given, batch.several)
            if self._stream_captures():
                self._captured.setdefault(layer.index, []).append((ready, store))
            return self._forward(layer, ready, given)

    def _forward(self, layer: LayerOnDevice, ready: PreparedCall, given: tuple[Tensor, ...]) -> Tensor:
        hidden, ids, weights, *adapters = given
        residents, share = ready.residents, ready.buffers.share
        lora = None if ready.terms is None else (adapters[0], ready.terms)
        if residents is None:
            out = torch.empty_like(hidden)
            self._cpu(ready, given, out)
            resident_decode.count(ids, self._counts[layer.index])
            return out
        arrived = self._beside(ready, given) if self._cuda else None
        resident_decode.count(ids, self._counts[layer.index])
        part = resident_decode.forward(layer, residents.room, residents.place, hidden, ids, weights, lora)
        if arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(arrived)
        else:
            self._cpu(ready, given, share)
        return torch.add(part, share, out=torch.empty_like(hidden))

    def _beside(self, ready: PreparedCall, given: tuple[Tensor, ...]) -> torch.cuda.Event:
        """The CPU's share on a stream of its own. The current one waits for the event before it goes on, so inputs and
        buffers are in its order, as if there were one stream."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._cpu(ready, given, ready.buffers.share)
            arrived: torch.cuda.Event = self._stream.record_event()
        return arrived

    def _cpu(self, ready: PreparedCall, given: tuple[Tensor, ...], target: Tensor) -> None:
        buffers = ready.buffers
        buffered = (buffers.hidden, buffers.ids, buffers.weights, buffers.adapters)
        for source, pinned in zip(given, buffered, strict=False):  # the last where there are adapters
            pinned.copy_(source, non_blocking=True)
        if self._cuda:
            stream, callbacks = torch.cuda.current_stream(self.device).cuda_stream, _core.host_callbacks()
            call_on_host(stream, callbacks["submit"], ready.call.address)
            call_on_host(stream, callbacks["wait"], ready.call.address)
        else:
            ready.call.submit()
            ready.call.wait()
        target.copy_(buffers.out, non_blocking=True)

    # What is made once.

    def _find(
        self, layer: LayerOnDevice, store: ExpertStore, given: tuple[Tensor, ...], several: MultiLora | None
    ) -> PreparedCall:
        hidden, ids, weights, *_ = given
        size, adapters = _size(hidden, ids, weights), () if several is None else tuple(several.lora.adapters)
        found = self._ready.get((layer.index, size, adapters))
        capturing = self._stream_captures()
        if found is not None and self._is_current(layer.index):
            if not capturing:
                self._settle(found)
            return found
        if capturing:
            words = f"a batch of {hidden.shape[0]} tokens that was not computed before"
            raise InputError("CUDA graph", words, "a first call outside of it", "run the step once, then capture it")
        if not self._is_current(layer.index):
            self.retire(layer.index)
        with torch.inference_mode(False):  # what is made here is written to in other modes too
            return self._make(layer, store, given, size, several)

    def _is_current(self, index: int) -> bool:
        held = self._residents.get(index)
        return self.executor.residents.get(index) is (None if held is None else held.room)

    def _settle(self, ready: PreparedCall) -> None:
        """Buffers follow one stream: another one begins when the last is through. An error of a host function is told
        here, at the next call of its layer."""
        stream = self._current_stream()
        if stream != self._last_stream:
            _synchronize(self.device)
            self._last_stream = stream
        if ready.call.done:
            ready.call.wait()

    def _current_stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self._cuda else -1

    def _make(
        self, layer: LayerOnDevice, store: ExpertStore, given: tuple[Tensor, ...], size: Size, several: MultiLora | None
    ) -> PreparedCall:
        buffers = self._buffers.get(size)
        if buffers is None:
            hidden, ids, weights, out = (
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._cuda)
                for tensor in (*given[:3], given[0])
            )
            rows = torch.full(hidden.shape[:1], -1, dtype=torch.int32, pin_memory=self._cuda)
            share = torch.empty_like(out, device=self.device, pin_memory=False)
            buffers = self._buffers[size] = PinnedBuffers(hidden, ids, weights, rows, out, share)
        if layer.index not in self._residents:
            self._residents[layer.index] = self._bind(layer)
        if layer.index not in self._counts:
            self._counts[layer.index] = torch.zeros(layer.geometry.experts, dtype=torch.int32, device=self.device)
            # Nobody may free a layer's weights under a call that is queued.
            weakref.finalize(store, _synchronize, self.device).atexit = False
        residents = self._residents[layer.index]
        skip = None if residents is None else residents.skip
        inputs = (buffers.hidden, buffers.ids, buffers.weights)
        if several is None:
            ready = PreparedCall(store.prepare(*inputs, out=buffers.out, skip=skip), buffers, residents)
        else:
            adapters = tuple(several.lora.adapters)
            terms = None if residents is None else self._lay(layer, several, adapters)
            _synchronize(self.device)  # calls before this one read the buffer,
            buffers.adapters.fill_(-1)  # which may name adapters of theirs that this one has not
            call = store.prepare(*inputs, out=buffers.out, skip=skip, adapter=buffers.adapters, adapters=adapters)
            ready = PreparedCall(call, buffers, residents, adapters, terms)
        self._ready[layer.index, size, ready.adapters] = ready
        _synchronize(self.device)  # tables and residents are there for whatever stream comes
        self._last_stream = self._current_stream()
        return ready

    def _lay(self, layer: LayerOnDevice, several: MultiLora, adapters: Adapters) -> LoraPointers:
        found = self._terms.get((layer.index, adapters))
        if found is None:
            wide = layer.geometry.first.out_rows
            found = LoraPointers.hold(self.executor.shelf, several.lora.factors, wide, self.device)
            self._terms[layer.index, adapters] = found
        return found

    def retain(self, used: Collection[Adapters]) -> None:
        """Calls with other adapters than these go, and what was kept for graphs of theirs, which nobody may replay from
        now on; and so do their factors on the device."""
        _synchronize(self.device)

        def goes(adapters: Adapters) -> bool:
            return bool(adapters) and adapters not in used

        for key in [key for key in self._ready if goes(key[2])]:
            del self._ready[key]
        for index, kept in self._captured.items():
            self._captured[index] = [one for one in kept if not goes(one[0].adapters)]
        for where in [where for where in self._terms if goes(where[1])]:
            self._terms.pop(where).release(self.executor.shelf)

    def forget_graphs(self) -> None:
        """Nobody replays what was captured so far: rooms of residents that are gone, and stores, need not be kept."""
        _synchronize(self.device)
        self._captured.clear()

    def _bind(self, layer: LayerOnDevice) -> ResidentTable | None:
        room = self.executor.residents.get(layer.index)
        if room is None:
            return None
        place = _places(layer, room)
        return ResidentTable(room, place.to(self.device), place >= 0)

    def exchange(self, layer: LayerOnDevice, change: Callable[[], None]) -> None:
        """Other residents in the same room, brought by `change`: tables are written where they lie, so calls and graphs
        go on with them."""
        held = self._residents.get(layer.index)
        if held is None or not self._is_current(layer.index):
            self.retire(layer.index)
            change()
            return
        _synchronize(self.device)
        held.skip.zero_()  # if the change fails, nobody is resident
        held.place.fill_(-1)
        change()
        place = _places(layer, held.room)
        held.place.copy_(place)
        held.skip.copy_(place >= 0)
        _synchronize(self.device)

    def retire(self, index: int) -> None:
        """Before a layer's residents get another room. Its calls are made anew; those in graphs leave nobody out from
        now on."""
        held = self._residents.pop(index, None)
        mine = [key for key in self._ready if key[0] == index]
        if not mine:
            return
        self.generation += 1
        _synchronize(self.device)
        for key in mine:
            del self._ready[key]
        if held is not None and index in self._captured:
            held.skip.zero_()
            held.place.fill_(-1)
            _synchronize(self.device)

    def raise_pending(self, tokens: int) -> None:
        """Raise what a host function could not, of replayed batches of so many tokens that the stream is through with.
        Outside of graphs the next call of a layer does it."""
        for (_, size, _), ready in self._ready.items():
            if size[0][0] == tokens and ready.call.done:
                ready.call.wait()

    def drop_counts(self) -> None:
        """Rows that were counted so far belong to no model's routing."""
        for counts in self._counts.values():
            counts.zero_()

    def add_counts(self, index: int, counts: NDArray[np.int64]) -> None:
        """Adds a layer's rows of each expert since the last time to `counts` [E]."""
        here = self._counts.get(index)
        if here is not None:
            _synchronize(self.device)
            seen = here.to("cpu", copy=True)
            here -= seen.to(self.device)
            counts += seen.numpy()


def _places(layer: LayerOnDevice, room: ExpertCache) -> Tensor:
    """int32 [E]: an expert's slot, or -1; the current stream is behind their copies."""
    experts = sorted(room.present(layer.index))
    place = torch.full((layer.geometry.experts,), -1, dtype=torch.int32)
    place[experts] = torch.tensor(room.fetch(layer.index, layer.source, experts), dtype=torch.int32)
    room.await_ready(range(room.count))
    return place


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)


_living: weakref.WeakSet[HostCallbackPath] = weakref.WeakSet()


@atexit.register
def _wait_for_all() -> None:
    """A host function that is still queued must find the threads: this is registered later than the pool's farewell
    (`nn/pool.py`, which `nn/store.py` imports), so it comes before. Nothing is replayed after it: what graphs kept may
    go, or stores, which know their engine, would be there for ever."""
    for few in list(_living):
        _synchronize(few.device)
        few._captured.clear()
