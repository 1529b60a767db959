"""A layer's part of a batch on the GPU, recorded once and replayed: no Python between its kernels.

A few thousand tokens keep a GPU busy for two milliseconds a layer, and Python takes longer than that to ask for fifty
kernels. Where all experts of a layer are decoded at once, nothing that is asked for depends on the routing, which the
device itself reads, but numbers: who is wanted, and where each expert lies. So there is one recording for each
direction and size of batch, for all layers; what differs is copied into its buffers before it is replayed. It is two
CUDA graphs: when the first has decoded, other experts may come into the slots. Batches are filled up to a size. A graph
knows one buffer of packed experts by its address; where an expert lies is a distance from there, so that residents,
which have memory of their own in every layer, are as good as streamed ones. The surprising decision: rows that are
nobody's here (the CPU's experts', those of tokens that only fill) are sorted behind all others and computed all the
same, from whatever memory held, and added nowhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktransformers import log
from ktransformers.nn.cuda_graphs import capture
from ktransformers.nn.lora_factors import LoraFactors
from ktransformers.nn.transfer import side_streams
from ktransformers.place.gpu import grouped_mlp
from ktransformers.place.gpu.dequantize import decode
from ktransformers.place.gpu.device_lora import empty_like_factors, parts_of
from ktransformers.place.gpu.epilogue import SILU
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.gpu.grouped_mlp import ALIGN, Decoded, GroupedRows, GroupLora, StackedLora
from ktransformers.place.gpu.layout import NOWHERE
from ktransformers.place.gpu.zero_copy import ZeroCopyReader
from ktransformers.triton_modules import import_triton_module

if TYPE_CHECKING:
    from ktransformers.place.gpu.executor import ExpertBatch, LayerOnDevice

STEP = 64  # tokens; from 1024 on an eighth of the batch or less
SEEN = 2  # passes over the layers before one like them is recorded: a size that comes once is not worth it
MOST = 48  # recordings; more kinds than that go kernel by kernel
# Where torch's grouped product is one kernel; elsewhere it asks the device for the groups, which no graph can hold.
CAPABLE = (9, 10)
Key = tuple[Any, ...]
_log = log.logger(__name__)


@dataclass(frozen=True)
class SlotRefs:
    """Experts in the slots of one room: the one that is streamed through, or residents'."""

    room: ExpertCache
    experts: Sequence[int]
    slots: Sequence[int]

    def distances(self, name: str, base: Tensor) -> NDArray[np.int64]:
        """In bytes from `base` to "first" or "down" of each expert."""
        packed: Tensor = getattr(self.room, name)
        return packed.data_ptr() - base.data_ptr() + np.array(self.slots, np.int64) * packed.shape[1]


def numbers_of(experts: int, seats: Sequence[SlotRefs], room: ExpertCache) -> NDArray[np.int64]:
    """Of every expert, and of ids that are none: its place, the last one if nobody wants it; and how far its two
    matrices are from those of `room`, or NOWHERE."""
    found = np.full(3 * experts + 1, NOWHERE, np.int64)
    place, first, down = np.split(found, (experts + 1, 2 * experts + 1))
    place[:] = experts
    for seat in seats:
        mine = list(seat.experts)
        place[mine] = mine
        first[mine], down[mine] = seat.distances("first", room.first), seat.distances("down", room.down)
    return found


def size_of(tokens: int) -> int:
    """Of the batch that so many tokens are filled up to."""
    step = max(STEP, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


@dataclass(frozen=True)
class GraphInputs:
    """What a replay needs of one layer and batch."""

    layer: LayerOnDevice
    batch: ExpertBatch
    room: ExpertCache
    seats: Sequence[SlotRefs]
    decoded: Decoded  # buffers for all experts
    numbers: NDArray[np.int64]
    pairs: Mapping[str, StackedLora]  # LoRA of all experts


@dataclass(frozen=True)
class StaticBuffers:
    """Buffers of all recordings, for as many tokens as any of them has had."""

    hidden: Tensor  # [T, H]
    rising: Tensor  # the output's gradient
    ids: Tensor  # [T, k]
    weights: Tensor  # float32
    out: Tensor  # float32 [T, H]
    grad_weights: Tensor  # float32 [T, k]

    def fits(self, batch: ExpertBatch) -> bool:
        return self.hidden.dtype == batch.hidden.dtype and self.ids.shape[1] == batch.ids.shape[1]


@dataclass(frozen=True)
class ExpertGraph:
    opening: torch.cuda.CUDAGraph  # reads packed experts
    graph: torch.cuda.CUDAGraph  # all the rest
    desk: StaticBuffers
    numbers: Tensor
    pairs: dict[str, StackedLora]
    laid: list[Tensor]  # gradients of the factors, with their strides

    def fill(self, work: GraphInputs, tokens: int, rising: Tensor | None, puller: ZeroCopyReader) -> None:
        """This batch into the buffers; places up to `tokens` that it leaves are nobody's."""
        desk, batch, count = self.desk, work.batch, work.batch.ids.shape[0]
        puller.fill(self.numbers, torch.from_numpy(work.numbers))  # past the copies that are queued
        targets, sources = [desk.hidden[:count], desk.weights[:count]], [batch.hidden, batch.weights]
        if rising is not None:
            targets.append(desk.rising[:count])
            sources.append(rising)
        for name, pair in work.pairs.items():
            targets += [self.pairs[name].a, self.pairs[name].b]
            sources += [pair.a, pair.b]
        torch._foreach_copy_(targets, sources)
        desk.ids[:count].copy_(batch.ids)
        if count < tokens:
            desk.ids[count:tokens].fill_(-1)

    def replay(self, work: GraphInputs) -> None:
        self.opening.replay()
        for seat in work.seats:
            seat.room.done_reading(seat.slots)
        self.graph.replay()


@functools.cache
def _capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in CAPABLE


def suits(layer: LayerOnDevice, batch: ExpertBatch) -> bool:
    """Whether everything that such a pass asks for can be recorded."""
    geometry, kernels = layer.geometry, import_triton_module("ktransformers.place.gpu.dequantize_triton")
    return (
        batch.hidden.is_cuda
        and kernels is not None
        and _capable(batch.hidden.device)
        and torch.cuda.current_device() == batch.hidden.device.index
        and geometry.hidden % ALIGN == 0 == geometry.intermediate % ALIGN
        and geometry.gated
        and layer.gate == SILU
        and layer.biases == (None, None)
        and batch.hidden.dtype in (torch.bfloat16, torch.float16)  # results leave by a cast: buffers are used again
        and batch.several is None
        and not batch.dropout.share
        and kernels.supports(geometry.first)
        and kernels.supports(geometry.down)
        and not torch.are_deterministic_algorithms_enabled()
        and not torch.cuda.is_current_stream_capturing()
    )


def _layout(factors: LoraFactors | None) -> Key:
    if factors is None:
        return ()
    return factors.roles, factors.scales, *((t.shape, t.stride(), t.dtype) for t in factors.tensors)


class ExpertGraphs:
    """Of one engine, whose layers have the same sizes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._puller = ZeroCopyReader(device)
        self._seen: dict[Key, tuple[int, int]] = {}  # the layer that came first, and how often
        self._known: dict[Key, ExpertGraph] = {}
        self._learned: dict[Key, tuple[dict[str, StackedLora], list[Tensor]]] = {}  # buffers for LoRA, by its layout
        self._desk: StaticBuffers | None = None
        self._pool: Any = None
        self._refused = False

    def key(self, layer: LayerOnDevice, batch: ExpertBatch, learns: bool | None) -> Key:
        """`learns` None: forward."""
        tokens, top_k = batch.ids.shape
        return learns, size_of(tokens), top_k, batch.hidden.dtype, layer.gate, _layout(batch.factors)

    def knows(self, key: Key) -> bool:
        return key in self._known

    def makes(self, key: Key) -> bool:
        """Whether a pass of this kind is not recorded, but may be yet."""
        return not (key in self._known or self._refused or len(self._known) >= MOST or len(self._seen) > 100 * MOST)

    def wants(self, key: Key, layer: int) -> bool:
        """Whether a pass of this kind is replayed, or worth recording by now."""
        if key in self._known:
            return True
        if not self.makes(key):
            return False
        first, passes = self._seen.get(key, (layer, 0))
        passes += first == layer
        self._seen[key] = first, passes
        return passes > SEEN

    def forward(self, key: Key, work: GraphInputs) -> Tensor | None:
        """float32 [T, H], to be read before the next replay; None: there is no memory for a recording."""
        found = self._prepared(key, work)
        if found is None:
            return None
        found.replay(work)
        return found.desk.out[: work.batch.hidden.shape[0]]

    def backward(self, key: Key, work: GraphInputs, rising: Tensor) -> tuple[Tensor, Tensor, list[Tensor]] | None:
        """Gradients of hidden and of the routing weights in float32, and of the factors; the first and the last are to
        be read before the next replay. None as above."""
        found = self._prepared(key, work, rising)
        if found is None:
            return None
        # What the last layer's gradients were copied from is written again.
        torch.cuda.current_stream(self.device).wait_stream(side_streams(self.device).down)
        found.replay(work)
        tokens = work.batch.hidden.shape[0]
        return found.desk.out[:tokens], found.desk.grad_weights[:tokens].clone(), found.laid

    def _prepared(self, key: Key, work: GraphInputs, rising: Tensor | None = None) -> ExpertGraph | None:
        """The recording with this batch in its buffers."""
        fresh = True
        try:
            desk = self._desk_for(key[1], work.batch)  # forgets all recordings when there has to be a larger one
            found = self._known.get(key)
            fresh = found is None
            if found is None:
                found = self._new(desk, work, key)
            found.fill(work, key[1], rising, self._puller)
            if fresh:
                self._record(key, found, work)
        except RuntimeError as error:  # no memory, or something that a graph cannot hold
            if not fresh:
                raise
            self._refuse(error)
            return None
        self._known[key] = found
        return found

    def _desk_for(self, tokens: int, batch: ExpertBatch) -> StaticBuffers:
        desk = self._desk
        if desk is not None and desk.hidden.shape[0] >= tokens and desk.fits(batch):
            return desk
        self._forget()
        with torch.inference_mode(False):  # others may use it outside
            self._desk = _new_desk(tokens, batch)
        return self._desk

    def _forget(self) -> None:
        """A pool without graphs is not taken up again."""
        torch.cuda.synchronize(self.device)
        self._known.clear()
        self._desk = self._pool = None

    def _refuse(self, error: RuntimeError) -> None:
        """From now on everything goes kernel by kernel."""
        self._refused = True
        self._forget()
        self._learned.clear()
        torch.cuda.empty_cache()
        why = "there is no GPU memory left for it" if isinstance(error, torch.OutOfMemoryError) else str(error)
        _log.warning("passes of experts are not recorded, Python launches them kernel by kernel: %s", why)

    def _new(self, desk: StaticBuffers, work: GraphInputs, key: Key) -> ExpertGraph:
        layout = _layout(work.batch.factors)
        with torch.inference_mode(False):
            numbers = torch.empty(len(work.numbers), dtype=torch.int64, device=self.device)
            if layout not in self._learned:
                pairs = {
                    name: StackedLora(torch.empty_like(p.a), torch.empty_like(p.b)) for name, p in work.pairs.items()
                }
                self._learned[layout] = pairs, []
            pairs, laid = self._learned[layout]
            if key[0] and not laid:
                laid += empty_like_factors(work.batch.factors, self.device)
        return ExpertGraph(torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), desk, numbers, pairs, laid if key[0] else [])

    def _record(self, key: Key, found: ExpertGraph, work: GraphInputs) -> None:
        """Once as it is, so that kernels are there and loaded, then into the graph."""
        pieces = (
            (found.opening, _opening(found, work)),
            (found.graph, _pass(found, work, tokens=key[1], learns=key[0])),
        )
        if key[0] is not None:  # gradients of the last layer may still be on their way from the buffers
            torch.cuda.current_stream(self.device).wait_stream(side_streams(self.device).down)
        for _, run in pieces:
            run()
        torch.cuda.synchronize(self.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        for graph, run in pieces:
            capture(graph, run, self.device, self._pool)


def _new_desk(tokens: int, batch: ExpertBatch) -> StaticBuffers:
    hidden, top_k = batch.hidden, batch.ids.shape[1]
    rows = torch.empty(tokens, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    return StaticBuffers(
        rows,
        torch.empty_like(rows),
        torch.empty(tokens, top_k, dtype=torch.int64, device=hidden.device),
        torch.empty(tokens, top_k, dtype=torch.float32, device=hidden.device),
        torch.empty(tokens, hidden.shape[1], dtype=torch.float32, device=hidden.device),
        torch.empty(tokens, top_k, dtype=torch.float32, device=hidden.device),
    )


def _opening(found: ExpertGraph, work: GraphInputs) -> Callable[[], None]:
    geometry, room, decoded = work.layer.geometry, work.room, work.decoded

    def run() -> None:
        first, down = found.numbers[geometry.experts + 1 :].view(2, -1)
        decode(room.first, (), first, geometry.first, decoded.first)
        decode(room.down, (), down, geometry.down, decoded.down)

    return run


def _pass(found: ExpertGraph, work: GraphInputs, tokens: int, learns: bool | None) -> Callable[[], None]:
    """All that is asked of the device for a batch that is in the buffers, and experts that are decoded."""
    desk = found.desk
    geometry, decoded, gate = work.layer.geometry, work.decoded, work.layer.gate
    factors, pairs = work.batch.factors, found.pairs

    def run() -> None:
        rows, order = _rows(desk, found.numbers, geometry.experts, tokens)
        lora = GroupLora(rows.ends, pairs.get("first"), pairs.get("down")) if pairs else None
        out = desk.out[:tokens].zero_()
        if learns is None:
            grouped_mlp.forward(desk.hidden[:tokens], rows, decoded, gate, out, lora)
            return
        grad_rows, grads = grouped_mlp.backward(
            desk.rising[:tokens], desk.hidden[:tokens], rows, decoded, gate, out, lora, None, learns
        )
        assert rows.live is not None
        real = torch.arange(len(grad_rows), device=grad_rows.device) < rows.live
        desk.grad_weights[:tokens].view(-1).index_copy_(0, order, grad_rows.where(real, 0.0))
        if factors is not None and grads:
            seen = rows.ends.diff(prepend=torch.zeros_like(rows.ends[:1])) > 0
            for target, part in zip(found.laid, parts_of(factors, grads), strict=True):
                target.copy_(part.where(seen[:, None, None], 0.0))

    return run


def _rows(desk: StaticBuffers, numbers: Tensor, experts: int, tokens: int) -> tuple[GroupedRows, Tensor]:
    """Rows in the order of their experts, and where they come from: token * k + slot."""
    ids, top_k = desk.ids[:tokens].view(-1), desk.ids.shape[1]
    keys = numbers[torch.where((ids < 0) | (ids >= experts), experts, ids)]
    keys, order = torch.sort(keys, stable=True)
    everybody = torch.arange(experts, device=keys.device)
    ends = torch.searchsorted(keys, everybody, right=True, out_int32=True)
    weights = desk.weights[:tokens].view(-1)[order]
    return GroupedRows(order // top_k, weights, ends, ends[-1:]), order
