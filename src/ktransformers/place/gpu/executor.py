"""The GPU's share of a batch: experts in groups, each fetched, dequantised into one bf16 buffer, and multiplied.

Groups are bounded by bytes and by rows, so that neither the buffer nor the intermediates of rows grow with the batch.
Copies are queued a few groups ahead of the products; everything else runs in the order of the current stream. Rows are
sorted once, by the position of their expert in the sweep, so the rows of a group are a slice. A pass whose experts all
fit into one group is captured in a CUDA graph and replayed (`place/gpu/expert_graphs.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktransformers.experts.backend import ExpertBatch
from ktransformers.experts.gate import Gate
from ktransformers.experts.lora import LoraPair
from ktransformers.place.gpu import grouped_mlp
from ktransformers.place.gpu.device_lora import DeviceFactors, FactorGradients, select_experts
from ktransformers.place.gpu.epilogue import DropoutMask
from ktransformers.place.gpu.expert_cache import ExpertCache, Key, LayerBytes
from ktransformers.place.gpu.expert_graphs import ExpertGraphs, GraphInputs, PassKey, SlotRefs, can_capture, slot_table
from ktransformers.place.gpu.grouped_mlp import Decoded, GroupedRows, GroupLora
from ktransformers.place.gpu.multi_lora import LoraCache, adapter_keys, lora_cache_bytes, select_adapters
from ktransformers.plan.memory import ENGINE_LIMITS
from ktransformers.quantized.gpu.dequantize import decode
from ktransformers.quantized.gpu.layout import Geometry

GROUP_BYTES = ENGINE_LIMITS.group_bytes
WHOLE_LAYER_BYTES = ENGINE_LIMITS.whole_layer_bytes
GROUP_ROWS, TOKEN_ROWS = ENGINE_LIMITS.group_rows, ENGINE_LIMITS.token_rows
# Missing experts of fewer bytes join the cached group: launching a group of their own takes as long as copying them.
SMALL_FETCH_BYTES = 64 << 20
# Groups whose copies are queued ahead of the products.
PREFETCHED_GROUPS = 2


@dataclass(frozen=True)
class LayerOnDevice:
    """A layer of experts as the device reads it."""

    index: int
    geometry: Geometry
    gate: Gate
    source: LayerBytes
    biases: tuple[Tensor | None, Tensor | None]  # float32 [E, 2I or I] and [E, H] on the device


@dataclass(frozen=True)
class SlotGroup:
    experts: tuple[int, ...]
    begin: int  # first of its rows in the sorted order
    ends: tuple[int, ...]  # of each expert's rows, counted from `begin`
    cache: ExpertCache


class GpuExecutor:
    """All layers of one geometry on one device."""

    def __init__(self, device: torch.device, cache: ExpertCache) -> None:
        self.device, self.cache = device, cache
        self.residents: dict[int, ExpertCache] = {}  # by layer: a cache of its own that is filled once
        self._lora = DeviceFactors(device, cache.registered)
        self.lora_cache = LoraCache(device, lora_cache_bytes(device))
        self._buffers: dict[tuple[str, int, int], Tensor] = {}
        self._graphs = ExpertGraphs(device)
        self._finished: torch.cuda.Event | None = None
        self.whole_layer_bytes = WHOLE_LAYER_BYTES  # a layer that fits into them with the cache is decoded at once

    @property
    def geometry(self) -> Geometry:
        return self.cache.geometry

    def resident_experts(self, layer: int) -> frozenset[int]:
        cache = self.residents.get(layer)
        return frozenset() if cache is None else cache.present(layer)

    def _experts_per_group(self, geometry: Geometry) -> int:
        """Experts dequantised at a time: launch time grows with the number of groups, memory with their size."""
        layer_bytes = geometry.experts * geometry.decoded_bytes
        return max(
            1,
            (layer_bytes if self.cache.bytes + layer_bytes <= self.whole_layer_bytes else GROUP_BYTES)
            // geometry.decoded_bytes,
        )

    def working_bytes(self, geometry: Geometry) -> int:
        """Bytes that layers of this geometry allocate at their first pass: dequantised weights and rows of a group."""
        rows = GROUP_ROWS * (6 * geometry.hidden + 14 * geometry.intermediate)
        return self._experts_per_group(geometry) * geometry.decoded_bytes + rows

    def _groups(
        self, layer: LayerOnDevice, experts: Sequence[int], counts: NDArray[np.int64], tokens: int
    ) -> list[SlotGroup]:
        """Residents first, then experts in the cache, then missing ones: in two groups, so that the first is multiplied
        while the second is copied; a few missing experts join the cached ones."""
        resident_cache = self.residents.get(layer.index)
        resident = self.resident_experts(layer.index)
        in_cache = self.cache.present(layer.index) - resident
        per_group = self._experts_per_group(layer.geometry)
        missing = sorted(e for e in experts if e not in resident and e not in in_cache)
        cached = [e for e in experts if e not in resident and e in in_cache]
        fits = len(cached) + len(missing) <= self.cache.count
        max_experts = per_group if fits else max(1, min(per_group, self.cache.count // (PREFETCHED_GROUPS + 1)))
        if cached and len(missing) * self.cache.expert_bytes <= SMALL_FETCH_BYTES:
            cached, missing = sorted(cached + missing), []
        parts = [
            (cached, self.cache, max_experts),
            (missing, self.cache, min(max_experts, max(1, -(-len(missing) // 2)))),
        ]
        if resident_cache is not None:
            parts.insert(0, ([e for e in experts if e in resident], resident_cache, per_group))
        groups, begin, rows = [], 0, GROUP_ROWS + TOKEN_ROWS * tokens
        for wanted, cache, max_experts in parts:
            for part in cut(wanted, counts, max_experts, rows):
                ends = np.cumsum(counts[part])
                groups.append(SlotGroup(tuple(part), begin, tuple(ends.tolist()), cache))
                begin += int(ends[-1])
        return groups

    def _fetch(self, layer: LayerOnDevice, groups: Sequence[SlotGroup], at: int) -> list[int]:
        """Slots of group `at`; copies for the groups after it are queued."""
        keep: frozenset[Key] = frozenset(
            (layer.index, e) for g in groups[at : at + PREFETCHED_GROUPS + 1] for e in g.experts
        )
        slots = groups[at].cache.fetch(layer.index, layer.source, groups[at].experts, keep)
        for group in groups[at + 1 : at + PREFETCHED_GROUPS + 1]:
            group.cache.fetch(layer.index, layer.source, group.experts, keep)
        if len(slots) < len(groups[at].experts):
            raise RuntimeError(
                f"a cache of {groups[at].cache.count} experts cannot hold a group of {len(groups[at].experts)}"
            )
        return slots

    def _buffer(self, name: str, count: int, rows: int, columns: int, per_group: int) -> Tensor:
        buffer = self._buffers.get((name, rows, columns))
        if buffer is None or buffer.shape[0] < count:
            buffer = torch.empty(max(count, per_group), rows, columns, dtype=torch.bfloat16, device=self.device)
            self._buffers[name, rows, columns] = buffer
        return buffer[:count]

    @property
    def decodes_whole_layers(self) -> bool:
        """Whether there is memory for all decoded experts of a layer."""
        return self._experts_per_group(self.geometry) >= self.geometry.experts

    def decoded_buffer(self, name: str, count: int, rows: int, columns: int) -> Tensor:
        """For decoded matrices of `count` experts, which all layers share."""
        return self._buffer(name, count, rows, columns, count)

    def _decoded(self, layer: LayerOnDevice, group: SlotGroup, slots: Sequence[int], experts: Tensor) -> Decoded:
        geometry, count = layer.geometry, len(group.experts)
        per_group = self._experts_per_group(geometry)
        first = self._buffer("first", count, geometry.first.out_rows, geometry.hidden, per_group)
        down = self._buffer("down", count, geometry.hidden, geometry.intermediate, per_group)
        group.cache.wait_for_copies(slots)
        slots_on_device = on_device(np.array(slots, np.int32), self.device)
        decode(group.cache.first, slots, slots_on_device, geometry.first, first)
        decode(group.cache.down, slots, slots_on_device, geometry.down, down)
        group.cache.mark_read(slots)
        if layer.biases == (None, None):
            return Decoded(first, down)
        return Decoded(first, down, *(None if bias is None else bias[experts] for bias in layer.biases))

    def _index_tables(self, layer: LayerOnDevice, groups: Sequence[SlotGroup]) -> tuple[Tensor, Tensor, Tensor]:
        """In one copy: the position of every expert in the sweep (the last entry is for ids out of range), the experts
        in that order, and the ends of their rows within their group."""
        experts = [expert for group in groups for expert in group.experts]
        position = np.full(layer.geometry.experts + 1, len(experts), np.int32)
        position[experts] = np.arange(len(experts))
        ends = [end for group in groups for end in group.ends]
        joined = on_device(np.concatenate((position, np.array(experts + ends, np.int32))), self.device)
        tables = joined.split((len(position), len(experts), len(ends)))  # type: ignore[no-untyped-call]
        return tables[0], tables[1], tables[2]

    def _sweep(
        self,
        layer: LayerOnDevice,
        batch: ExpertBatch,
        groups: Sequence[SlotGroup],
        tables: tuple[Tensor, Tensor, Tensor],
    ) -> Iterator[tuple[GroupedRows, Decoded, GroupLora | None, DropoutMask | None, Tensor]]:
        """What the products of each group need; the last is token * k + slot of each of its rows."""
        position, experts, ends = tables
        ids, none = batch.ids.reshape(-1), layer.geometry.experts
        if groups[-1].begin + groups[-1].ends[-1] < ids.numel():  # otherwise every row has an expert of these groups
            ids = torch.where((ids < 0) | (ids >= none), none, ids)
        keys, mixed = position[ids], batch.mixed
        if mixed is not None:
            keys = adapter_keys(mixed, keys, batch.ids.shape[1])
        keys, order = torch.sort(keys, stable=True)
        tokens, weights = order // batch.ids.shape[1], batch.weights.reshape(-1).float()[order]
        share, seed = batch.dropout.rate, batch.dropout.seed
        pairs: dict[str, LoraPair] = {}
        if batch.lora is not None:
            pairs = self._lora.get(batch.lora, layer.geometry.first.out_rows, batch.needs_grad)
        first = 0
        for at, group in enumerate(groups):
            slots = self._fetch(layer, groups, at)
            rows, span = slice(group.begin, group.begin + group.ends[-1]), slice(first, first + len(group.experts))
            dropout = DropoutMask(share, seed, order[rows]) if share and pairs else None
            group_rows = GroupedRows(tokens[rows], weights[rows], ends[span])
            decoded = self._decoded(layer, group, slots, experts[span])
            lora = select_experts(pairs, experts[span], ends[span]) if pairs else None
            if mixed is not None:
                out_rows = layer.geometry.first.out_rows
                lora = select_adapters(mixed, self.lora_cache, out_rows, experts[span], keys[rows], first)
            first = span.stop
            yield group_rows, decoded, lora, dropout, order[rows]

    def _pass_key(
        self, layer: LayerOnDevice, batch: ExpertBatch, streamed: int, needs_grad: bool | None
    ) -> PassKey | None:
        """The key of the pass's graph; None: it cannot be captured and runs group by group. `streamed`: number of
        experts in the cache; `needs_grad` None: a forward pass."""
        per_group, max_rows = self._experts_per_group(layer.geometry), GROUP_ROWS + TOKEN_ROWS * batch.hidden.shape[0]
        if per_group < layer.geometry.experts or batch.ids.numel() > max_rows or streamed > self.cache.count:
            return None
        return self._graphs.key(layer, batch, needs_grad) if can_capture(layer, batch) else None

    def replays(self, layer: LayerOnDevice, batch: ExpertBatch, needs_grad: bool | None) -> bool:
        """Whether this pass over all experts is replayed from a graph, which needs no `counts`."""
        streamed = layer.geometry.experts - len(self.resident_experts(layer.index))
        key = self._pass_key(layer, batch, streamed, needs_grad)
        return key is not None and self._graphs.is_captured(key)

    def _graph_inputs(
        self, layer: LayerOnDevice, batch: ExpertBatch, experts: Sequence[int], needs_grad: bool | None
    ) -> tuple[PassKey, GraphInputs] | None:
        """The pass's key and the inputs of its graph; None: it runs group by group."""
        geometry, per_group = layer.geometry, self._experts_per_group(layer.geometry)
        resident_cache = self.residents.get(layer.index)
        resident = self.resident_experts(layer.index)
        streamed = [e for e in experts if e not in resident]
        key = self._pass_key(layer, batch, len(streamed), needs_grad)
        if key is None or not self._graphs.is_due(key, layer.index):
            return None
        slot_refs = []
        for cache, wanted in ((resident_cache, [e for e in experts if e in resident]), (self.cache, streamed)):
            if cache is not None and wanted:
                slots = cache.fetch(layer.index, layer.source, wanted, frozenset((layer.index, e) for e in wanted))
                cache.wait_for_copies(slots)
                slot_refs.append(SlotRefs(cache, wanted, slots))
        first = self._buffer("first", geometry.experts, geometry.first.out_rows, geometry.hidden, per_group)
        down = self._buffer("down", geometry.experts, geometry.hidden, geometry.intermediate, per_group)
        pairs = {}
        if batch.lora is not None:
            pairs = self._lora.get(batch.lora, geometry.first.out_rows, batch.needs_grad)
        table = slot_table(geometry.experts, slot_refs, self.cache)
        return key, GraphInputs(layer, batch, self.cache, slot_refs, Decoded(first, down), table, pairs)

    def forward(
        self, layer: LayerOnDevice, batch: ExpertBatch, experts: Sequence[int], counts: NDArray[np.int64] | None
    ) -> Tensor:
        """float32 [T, H], to be read before the next call. `counts` [E] may be None only for a pass that `replays`."""
        self._wait_for_last_call()
        if (prepared := self._graph_inputs(layer, batch, experts, None)) is not None:
            replayed = self._graphs.forward(*prepared)
            if replayed is not None:
                self.record_finished()
                return replayed
        assert counts is not None
        out = torch.zeros(batch.hidden.shape, dtype=torch.float32, device=self.device)
        groups = self._groups(layer, experts, counts, batch.hidden.shape[0])
        for rows, weights, lora, dropout, _ in self._sweep(layer, batch, groups, self._index_tables(layer, groups)):
            grouped_mlp.forward(batch.hidden, rows, weights, layer.gate, out, lora, dropout)
        self.record_finished()
        return out

    def backward(
        self,
        layer: LayerOnDevice,
        batch: ExpertBatch,
        grad_out: Tensor,
        experts: Sequence[int],
        counts: NDArray[np.int64] | None,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Gradients of hidden float32 [T, H] and of the routing weights [T, k], zeros for experts of the CPU; with
        `needs_grad` those of the LoRA factors. To be read, or in copies, before the next call."""
        self._wait_for_last_call()
        if (prepared := self._graph_inputs(layer, batch, experts, needs_grad)) is not None:
            replayed = self._graphs.backward(*prepared, grad_out)
            if replayed is not None:
                self.record_finished()
                return replayed
        assert counts is not None
        grad_hidden = torch.zeros(batch.hidden.shape, dtype=torch.float32, device=self.device)
        grad_weights = torch.zeros(batch.ids.numel(), dtype=torch.float32, device=self.device)
        groups = self._groups(layer, experts, counts, batch.hidden.shape[0])
        tables = self._index_tables(layer, groups)
        gradients = FactorGradients(batch.lora)
        for rows, weights, lora, dropout, positions in self._sweep(layer, batch, groups, tables):
            grad_rows, grads = grouped_mlp.backward(
                grad_out, batch.hidden, rows, weights, layer.gate, grad_hidden, lora, dropout, needs_grad
            )
            grad_weights.index_copy_(0, positions, grad_rows)
            gradients.add(grads)
        factor_grads = gradients.scatter(tables[1].long()) if needs_grad else []
        self.record_finished()
        return grad_hidden, grad_weights.view(batch.ids.shape), factor_grads

    def _wait_for_last_call(self) -> None:
        """Buffers are shared by all calls, on any stream: the current stream waits for the last call's work."""
        if self._finished is not None:
            torch.cuda.current_stream(self.device).wait_event(self._finished)

    def record_finished(self) -> None:
        """The next call waits for what is on the current stream so far. Called after a pass, and again once its results
        have been read."""
        if self.device.type == "cuda":
            self._finished = torch.cuda.current_stream(self.device).record_event()


def cut(experts: Sequence[int], counts: NDArray[np.int64], max_experts: int, max_rows: int) -> Iterator[list[int]]:
    """Pieces of at most `max_experts` experts, closed when they have `max_rows` rows or more."""
    piece: list[int] = []
    rows = 0
    for expert in experts:
        piece.append(expert)
        rows += int(counts[expert])
        if len(piece) == max_experts or rows >= max_rows:
            yield piece
            piece, rows = [], 0
    if piece:
        yield piece


def on_device(numbers: NDArray[np.generic], device: torch.device) -> Tensor:
    """A small array on the device without synchronising: unpinned copies this small travel with the launch commands
    and do not queue behind the copy engine."""
    return torch.from_numpy(numbers).to(device, non_blocking=True)
