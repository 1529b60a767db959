"""The GPU's share of a batch: experts in groups, each fetched, decoded into one bf16 buffer, and multiplied.

Groups are cut by bytes and by rows, so that neither the buffer nor the rows' intermediates grow with the batch. Copies
are queued a few groups ahead of the products; everything else is in the order of the current stream. Rows are sorted
once, by the place of their expert in the walk, so a group's rows are a slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktransformers.nn.gate import Gate
from ktransformers.nn.lora_factors import LoraFactors
from ktransformers.nn.store import Dropout
from ktransformers.place.gpu import grouped_mlp
from ktransformers.place.gpu.dequantize import decode
from ktransformers.place.gpu.device_lora import DeviceFactors, FactorGradients, chosen
from ktransformers.place.gpu.epilogue import DropoutMask
from ktransformers.place.gpu.expert_cache import ExpertCache, Key, LayerBytes
from ktransformers.place.gpu.expert_graphs import ExpertGraphs, GraphInputs, PassKey, SlotRefs, can_capture, slot_table
from ktransformers.place.gpu.grouped_mlp import Decoded, GroupedRows, GroupLora, StackedLora
from ktransformers.place.gpu.layout import Geometry
from ktransformers.place.gpu.multi_lora import LoraCache, MultiLora, shelf_bytes

GROUP_BYTES = 576 << 20  # of bf16 weights that are decoded at a time; a whole layer's
ROOM_BYTES = 2 << 30  # where these, with the packed bytes in the slots, hold it
GROUP_ROWS = 16384  # closes a group, with two more for each token: intermediates of a row are 20 to 40 kB
SOON_BYTES = 64 << 20  # that are missing and a group is not worth: Python takes as long for one as they do
AHEAD = 2  # groups whose copies are queued before the first of them is multiplied


@dataclass(frozen=True)
class LayerOnDevice:
    """One layer as a device needs it."""

    index: int
    geometry: Geometry
    gate: Gate
    source: LayerBytes
    biases: tuple[Tensor | None, Tensor | None]  # float32 [E, 2I or I] and [E, H] on the device


@dataclass(frozen=True)
class ExpertBatch:
    hidden: Tensor  # [T, H]
    ids: Tensor  # [T, k]
    weights: Tensor  # [T, k]
    factors: LoraFactors | None
    dropout: Dropout
    several: MultiLora | None = None  # adapters of a batch whose rows differ in them
    learns: bool = False  # the CPU's weights are those of a backward pass


@dataclass(frozen=True)
class ExpertGroup:
    experts: tuple[int, ...]
    begin: int  # of its rows among all
    ends: tuple[int, ...]  # from `begin` on
    room: ExpertCache


class GpuExecutor:
    def __init__(self, device: torch.device, cache: ExpertCache) -> None:
        self.device, self.cache = device, cache
        self.residents: dict[int, ExpertCache] = {}  # by layer: slots of their own that are filled once
        self._lora = DeviceFactors(device)
        self.shelf = LoraCache(device, shelf_bytes(device))
        self._buffers: dict[tuple[str, int, int], Tensor] = {}
        self._recorder = ExpertGraphs(device)
        self._finished: torch.cuda.Event | None = None

    @property
    def geometry(self) -> Geometry:
        return self.cache.geometry

    def resident_experts(self, layer: int) -> frozenset[int]:
        cache = self.residents.get(layer)
        return frozenset() if cache is None else cache.present(layer)

    def _bulk(self, geometry: Geometry) -> int:
        """Experts that are decoded at a time: Python's time goes by groups, memory by experts."""
        whole = geometry.experts * geometry.decoded_bytes
        return max(1, (whole if self.cache.bytes + whole <= ROOM_BYTES else GROUP_BYTES) // geometry.decoded_bytes)

    def working_bytes(self, geometry: Geometry) -> int:
        """That layers of these sizes take when they first compute: decoded weights and rows of a group."""
        rows = GROUP_ROWS * (6 * geometry.hidden + 14 * geometry.intermediate)
        return self._bulk(geometry) * geometry.decoded_bytes + rows

    def _groups(
        self, layer: LayerOnDevice, experts: Sequence[int], counts: NDArray[np.int64], tokens: int
    ) -> list[ExpertGroup]:
        """Residents first, then what is here, then what has to come: in two groups, so that the first is multiplied
        while the second arrives; a few that are missing come with the others."""
        rooms = self.residents.get(layer.index)
        resident = self.resident_experts(layer.index)
        here = self.cache.present(layer.index) - resident
        bulk = self._bulk(layer.geometry)
        coming = sorted(e for e in experts if e not in resident and e not in here)
        there = [e for e in experts if e not in resident and e in here]
        fits = len(there) + len(coming) <= self.cache.count
        most = bulk if fits else max(1, min(bulk, self.cache.count // (AHEAD + 1)))
        if there and len(coming) * self.cache.expert_bytes <= SOON_BYTES:
            there, coming = sorted(there + coming), []
        parts = [(there, self.cache, most), (coming, self.cache, min(most, max(1, -(-len(coming) // 2))))]
        if rooms is not None:
            parts.insert(0, ([e for e in experts if e in resident], rooms, bulk))
        groups, begin, rows = [], 0, GROUP_ROWS + 2 * tokens
        for wanted, room, most in parts:
            for part in cut(wanted, counts, most, rows):
                ends = np.cumsum(counts[part])
                groups.append(ExpertGroup(tuple(part), begin, tuple(ends.tolist()), room))
                begin += int(ends[-1])
        return groups

    def _fetch(self, layer: LayerOnDevice, groups: Sequence[ExpertGroup], at: int) -> list[int]:
        """Slots of group `at`; those behind it are put on their way."""
        near: frozenset[Key] = frozenset((layer.index, e) for g in groups[at : at + AHEAD + 1] for e in g.experts)
        found = groups[at].room.fetch(layer.index, layer.source, groups[at].experts, near)
        for group in groups[at + 1 : at + AHEAD + 1]:
            group.room.fetch(layer.index, layer.source, group.experts, near)
        if len(found) < len(groups[at].experts):
            raise RuntimeError(
                f"room for {groups[at].room.count} experts, {len(groups[at].experts)} are wanted at once"
            )
        return found

    def _buffer(self, name: str, count: int, rows: int, columns: int, bulk: int) -> Tensor:
        found = self._buffers.get((name, rows, columns))
        if found is None or found.shape[0] < count:
            found = torch.empty(max(count, bulk), rows, columns, dtype=torch.bfloat16, device=self.device)
            self._buffers[name, rows, columns] = found
        return found[:count]

    def _decoded(self, layer: LayerOnDevice, group: ExpertGroup, slots: Sequence[int], experts: Tensor) -> Decoded:
        geometry, count = layer.geometry, len(group.experts)
        bulk = self._bulk(geometry)
        first = self._buffer("first", count, geometry.first.out_rows, geometry.hidden, bulk)
        down = self._buffer("down", count, geometry.hidden, geometry.intermediate, bulk)
        group.room.await_ready(slots)
        where = on_device(np.array(slots, np.int32), self.device)
        decode(group.room.first, slots, where, geometry.first, first)
        decode(group.room.down, slots, where, geometry.down, down)
        group.room.done_reading(slots)
        if layer.biases == (None, None):
            return Decoded(first, down)
        return Decoded(first, down, *(None if bias is None else bias[experts] for bias in layer.biases))

    def _numbers(self, layer: LayerOnDevice, groups: Sequence[ExpertGroup]) -> tuple[Tensor, Tensor, Tensor]:
        """In one copy: the place of every expert in the walk (one more: of ids that are none), the experts in that
        order, and the ends of their rows within their group."""
        experts = [expert for group in groups for expert in group.experts]
        place = np.full(layer.geometry.experts + 1, len(experts), np.int32)
        place[experts] = np.arange(len(experts))
        ends = [end for group in groups for end in group.ends]
        whole = on_device(np.concatenate((place, np.array(experts + ends, np.int32))), self.device)
        found = whole.split((len(place), len(experts), len(ends)))  # type: ignore[no-untyped-call]
        return found[0], found[1], found[2]

    def _walk(
        self,
        layer: LayerOnDevice,
        batch: ExpertBatch,
        groups: Sequence[ExpertGroup],
        numbers: tuple[Tensor, Tensor, Tensor],
    ) -> Iterator[tuple[GroupedRows, Decoded, GroupLora | None, DropoutMask | None, Tensor]]:
        """Everything that a group's products need; the last are the places token * k + slot of its rows."""
        place, experts, ends = numbers
        ids, none = batch.ids.reshape(-1), layer.geometry.experts
        if groups[-1].begin + groups[-1].ends[-1] < ids.numel():  # otherwise all are somebody's
            ids = torch.where((ids < 0) | (ids >= none), none, ids)
        several = batch.several
        keys = place[ids] if several is None else several.keys(place[ids], batch.ids.shape[1])
        keys, order = torch.sort(keys, stable=True)
        tokens, weights = order // batch.ids.shape[1], batch.weights.reshape(-1).float()[order]
        share, seed = batch.dropout.rate, batch.dropout.seed
        pairs: dict[str, StackedLora] = {}
        if batch.factors is not None:
            pairs = self._lora.of(batch.factors, layer.geometry.first.out_rows)
        first = 0
        for at, group in enumerate(groups):
            slots = self._fetch(layer, groups, at)
            rows, mine = slice(group.begin, group.begin + group.ends[-1]), slice(first, first + len(group.experts))
            thin = DropoutMask(share, seed, order[rows]) if share and pairs else None
            weighed = GroupedRows(tokens[rows], weights[rows], ends[mine])
            decoded = self._decoded(layer, group, slots, experts[mine])
            lora = chosen(pairs, experts[mine], ends[mine]) if pairs else None
            if several is not None:
                lora = several.chosen(self.shelf, layer.geometry.first.out_rows, experts[mine], keys[rows], first)
            first = mine.stop
            yield weighed, decoded, lora, thin, order[rows]

    def _kind(self, layer: LayerOnDevice, batch: ExpertBatch, streamed: int, learns: bool | None) -> PassKey | None:
        """Of a pass with so many streamed experts that may be recorded; None: it has to go group by group. `learns`
        None: forward."""
        bulk, most = self._bulk(layer.geometry), GROUP_ROWS + 2 * batch.hidden.shape[0]
        if bulk < layer.geometry.experts or batch.ids.numel() > most or streamed > self.cache.count:
            return None
        return self._recorder.key(layer, batch, learns) if can_capture(layer, batch) else None

    def replays(self, layer: LayerOnDevice, batch: ExpertBatch, learns: bool | None) -> bool:
        """Whether this pass with all of its experts is recorded: then its `counts` need not be known."""
        streamed = layer.geometry.experts - len(self.resident_experts(layer.index))
        kind = self._kind(layer, batch, streamed, learns)
        return kind is not None and self._recorder.is_captured(kind)

    def _in_one(
        self, layer: LayerOnDevice, batch: ExpertBatch, experts: Sequence[int], learns: bool | None
    ) -> tuple[PassKey, GraphInputs] | None:
        """Everything for a replay; None: group by group."""
        geometry, bulk = layer.geometry, self._bulk(layer.geometry)
        rooms = self.residents.get(layer.index)
        resident = self.resident_experts(layer.index)
        streamed = [e for e in experts if e not in resident]
        kind = self._kind(layer, batch, len(streamed), learns)
        if kind is None or not self._recorder.is_due(kind, layer.index):
            return None
        seats = []
        for room, mine in ((rooms, [e for e in experts if e in resident]), (self.cache, streamed)):
            if room is not None and mine:
                slots = room.fetch(layer.index, layer.source, mine, frozenset((layer.index, e) for e in mine))
                room.await_ready(slots)
                seats.append(SlotRefs(room, mine, slots))
        first = self._buffer("first", geometry.experts, geometry.first.out_rows, geometry.hidden, bulk)
        down = self._buffer("down", geometry.experts, geometry.hidden, geometry.intermediate, bulk)
        pairs = self._lora.of(batch.factors, geometry.first.out_rows) if batch.factors is not None else {}
        numbers = slot_table(geometry.experts, seats, self.cache)
        return kind, GraphInputs(layer, batch, self.cache, seats, Decoded(first, down), numbers, pairs)

    def forward(
        self, layer: LayerOnDevice, batch: ExpertBatch, experts: Sequence[int], counts: NDArray[np.int64] | None
    ) -> Tensor:
        """float32 [T, H], to be read before the next call. `counts` None: nobody knows them, and `replays` said so."""
        self._open()
        if (one := self._in_one(layer, batch, experts, None)) is not None:
            replayed = self._recorder.forward(*one)
            if replayed is not None:
                self.close()
                return replayed
        assert counts is not None
        out = torch.zeros(batch.hidden.shape, dtype=torch.float32, device=self.device)
        groups = self._groups(layer, experts, counts, batch.hidden.shape[0])
        for rows, weights, lora, thin, _ in self._walk(layer, batch, groups, self._numbers(layer, groups)):
            grouped_mlp.forward(batch.hidden, rows, weights, layer.gate, out, lora, thin)
        self.close()
        return out

    def backward(
        self,
        layer: LayerOnDevice,
        batch: ExpertBatch,
        grad_out: Tensor,
        experts: Sequence[int],
        counts: NDArray[np.int64] | None,
        learns: bool,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """float32 [T, H] and [T, k], zeros where the CPU computes; with `learns` the factors' gradients. To be read, or
        on their way, before the next call."""
        self._open()
        if (one := self._in_one(layer, batch, experts, learns)) is not None:
            replayed = self._recorder.backward(*one, grad_out)
            if replayed is not None:
                self.close()
                return replayed
        assert counts is not None
        grad_hidden = torch.zeros(batch.hidden.shape, dtype=torch.float32, device=self.device)
        grad_weights = torch.zeros(batch.ids.numel(), dtype=torch.float32, device=self.device)
        groups = self._groups(layer, experts, counts, batch.hidden.shape[0])
        numbers = self._numbers(layer, groups)
        gradients = FactorGradients(batch.factors)
        for rows, weights, lora, thin, places in self._walk(layer, batch, groups, numbers):
            grad_rows, grads = grouped_mlp.backward(
                grad_out, batch.hidden, rows, weights, layer.gate, grad_hidden, lora, thin, learns
            )
            grad_weights.index_copy_(0, places, grad_rows)
            gradients.add(grads)
        laid = gradients.lay(numbers[1].long()) if learns else []
        self.close()
        return grad_hidden, grad_weights.view(batch.ids.shape), laid

    def _open(self) -> None:
        """The buffers belong to all calls, whatever stream they come on."""
        if self._finished is not None:
            torch.cuda.current_stream(self.device).wait_event(self._finished)

    def close(self) -> None:
        """Whoever calls on another stream waits for what the current one was given so far: the work, and once results
        have been read, that too."""
        if self.device.type == "cuda":
            self._finished = torch.cuda.current_stream(self.device).record_event()


def cut(experts: Sequence[int], counts: NDArray[np.int64], most: int, enough: int) -> Iterator[list[int]]:
    """Pieces of at most so many experts, closed when they have rows enough."""
    piece: list[int] = []
    rows = 0
    for expert in experts:
        piece.append(expert)
        rows += int(counts[expert])
        if len(piece) == most or rows >= enough:
            yield piece
            piece, rows = [], 0
    if piece:
        yield piece


def on_device(numbers: NDArray[np.generic], device: torch.device) -> Tensor:
    """A few numbers, without waiting for the device: so few go with the commands, past the copy engine and its queue,
    as long as their memory is not pinned."""
    return torch.from_numpy(numbers).to(device, non_blocking=True)
