"""A layer's expert pass on the GPU, captured once and replayed: no Python between its kernels.

A few thousand tokens keep a GPU busy for two milliseconds a layer, and Python takes longer than that to launch fifty
kernels. Where all experts of a layer are decoded at once, launches do not depend on the routing, which the device reads
itself, except for a table: which experts are wanted, and where each one lies. So there is one captured pass for each
direction and size of batch, shared by all layers; what differs is copied into static buffers before a replay. A pass is
two CUDA graphs: when the first has decoded the experts, others may be copied into their slots. Batches are padded to a
few sizes. A graph knows one buffer of packed experts by its address; the table has offsets from there, so residents,
which have memory of their own in every layer, are reached like streamed experts.

Rows that are not computed here (those of experts on the CPU and of padding tokens) are sorted behind all others and
multiplied all the same, from whatever the buffers held, and added to no result: a graph has a fixed number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktransformers.experts.backend import ExpertBatch
from ktransformers.experts.gate import Gate
from ktransformers.experts.lora import ExpertLora, LoraPair
from ktransformers.experts.transfer import copy_streams
from ktransformers.ground import env
from ktransformers.ground.packages import import_triton_module
from ktransformers.modeling.cuda_graphs import GraphCache, GraphPool, padded_tokens
from ktransformers.place.gpu import grouped_mlp
from ktransformers.place.gpu.device_lora import empty_like_factors, split_gradients
from ktransformers.place.gpu.epilogue import SILU
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.gpu.grouped_mlp import ALIGN, Decoded, GroupedRows, GroupLora
from ktransformers.place.gpu.zero_copy import ZeroCopyReader
from ktransformers.quantized.gpu.dequantize import decode
from ktransformers.quantized.gpu.layout import NOWHERE

if TYPE_CHECKING:
    from ktransformers.place.gpu.executor import LayerOnDevice

LoraLayout = tuple[Any, ...]


class PassKey(NamedTuple):
    """What passes that go through the same graphs have in common."""

    needs_grad: bool | None  # of the LoRA factors; None: a forward pass
    tokens: int  # padded
    top_k: int
    dtype: torch.dtype
    gate: Gate
    lora: LoraLayout


@dataclass(frozen=True)
class SlotRefs:
    """Experts in the slots of one cache: the one that experts are streamed through, or the residents'."""

    cache: ExpertCache
    experts: Sequence[int]
    slots: Sequence[int]

    def offsets(self, name: str, base: Tensor) -> NDArray[np.int64]:
        """Bytes from `base` to matrix "first" or "down" of each expert."""
        packed: Tensor = getattr(self.cache, name)
        return packed.data_ptr() - base.data_ptr() + np.array(self.slots, np.int64) * packed.shape[1]


def slot_table(experts: int, slot_refs: Sequence[SlotRefs], base: ExpertCache) -> NDArray[np.int64]:
    """[E + 1 + 2 E]: the sort key of every expert and of ids that are none, E for those that are not computed here;
    then the offsets of each expert's two matrices from those of `base`, or NOWHERE."""
    table = np.full(3 * experts + 1, NOWHERE, np.int64)
    sort_key, first, down = np.split(table, (experts + 1, 2 * experts + 1))
    sort_key[:] = experts
    for refs in slot_refs:
        present = list(refs.experts)
        sort_key[present] = present
        first[present], down[present] = refs.offsets("first", base.first), refs.offsets("down", base.down)
    return table


@dataclass(frozen=True)
class GraphInputs:
    """What a replay needs of one layer and batch."""

    layer: LayerOnDevice
    batch: ExpertBatch
    base: ExpertCache  # whose address graphs know
    slot_refs: Sequence[SlotRefs]
    decoded: Decoded  # buffers for all experts
    table: NDArray[np.int64]  # `slot_table`
    lora: Mapping[str, LoraPair]  # of all experts


@dataclass(frozen=True)
class StaticBuffers:
    """Inputs and results of all graphs, for as many tokens as the largest of them."""

    hidden: Tensor  # [T, H]
    grad_out: Tensor  # [T, H]
    ids: Tensor  # [T, k]
    weights: Tensor  # float32 [T, k]
    out: Tensor  # float32 [T, H]
    grad_weights: Tensor  # float32 [T, k]

    @classmethod
    def allocate(cls, tokens: int, batch: ExpertBatch) -> StaticBuffers:
        hidden = batch.hidden.new_empty(tokens, batch.hidden.shape[1])
        ids = hidden.new_empty(tokens, batch.ids.shape[1], dtype=torch.int64)
        out, weights = (torch.empty_like(like, dtype=torch.float32) for like in (hidden, ids))
        return cls(hidden, torch.empty_like(hidden), ids, weights, out, torch.empty_like(weights))

    def fits(self, key: PassKey) -> bool:
        return self.hidden.shape[0] >= key.tokens and (self.hidden.dtype, self.ids.shape[1]) == (key.dtype, key.top_k)


@dataclass(frozen=True)
class PassBuffers:
    """What one captured pass reads and writes."""

    static: StaticBuffers
    table: Tensor  # `slot_table` on the device
    factors: dict[str, LoraPair]
    # Of the factors, with their strides; empty until a backward pass needs them.
    factor_grads: list[Tensor]

    def fill(self, inputs: GraphInputs, tokens: int, grad_out: Tensor | None, copier: ZeroCopyReader) -> None:
        """Copy this batch; ids of padding up to `tokens` are -1."""
        static, batch, count = self.static, inputs.batch, inputs.batch.ids.shape[0]
        copier.fill(self.table, torch.from_numpy(inputs.table))  # does not wait for copies that are queued
        targets, sources = [static.hidden[:count], static.weights[:count]], [batch.hidden, batch.weights]
        if grad_out is not None:
            targets.append(static.grad_out[:count])
            sources.append(grad_out)
        for name, pair in inputs.lora.items():
            targets += [self.factors[name].a, self.factors[name].b]
            sources += [pair.a, pair.b]
        torch._foreach_copy_(targets, sources)
        static.ids[:count].copy_(batch.ids)
        if count < tokens:
            static.ids[count:tokens].fill_(-1)


@dataclass(frozen=True)
class ExpertGraph:
    buffers: PassBuffers
    decode: Callable[[], None]  # reads packed experts
    compute: Callable[[], None]  # everything else

    def replay(self, inputs: GraphInputs) -> None:
        self.decode()
        for refs in inputs.slot_refs:
            refs.cache.mark_read(refs.slots)
        self.compute()


def can_capture(layer: LayerOnDevice, batch: ExpertBatch) -> bool:
    """Whether everything that such a pass launches can be part of a graph."""
    geometry, kernels = layer.geometry, import_triton_module("ktransformers.quantized.gpu.dequantize_triton")
    return (
        batch.hidden.is_cuda
        and kernels is not None
        and grouped_mlp.is_capturable(batch.hidden.device)
        and torch.cuda.current_device() == batch.hidden.device.index
        and geometry.hidden % ALIGN == 0 == geometry.intermediate % ALIGN
        and geometry.gated
        and layer.gate == SILU
        and layer.biases == (None, None)
        and batch.hidden.dtype in (torch.bfloat16, torch.float16)  # results leave by a cast: buffers are used again
        and batch.mixed is None
        and not batch.dropout.rate
        and kernels.supports(geometry.first)
        and kernels.supports(geometry.down)
        and not torch.are_deterministic_algorithms_enabled()
        and not torch.cuda.is_current_stream_capturing()
    )


def _lora_layout(factors: ExpertLora | None) -> LoraLayout:
    if factors is None:
        return ()
    return factors.roles, factors.scales, *((t.shape, t.stride(), t.dtype) for t in factors.tensors)


class ExpertGraphs:
    """The captured passes of one engine, whose layers have the same sizes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graphs: GraphCache[PassKey, ExpertGraph] = GraphCache(
            "expert passes", GraphPool(device), enabled=env.graphs_enabled("experts")
        )
        self._copier = ZeroCopyReader(device)
        self._static: StaticBuffers | None = None
        self._lora: dict[LoraLayout, tuple[dict[str, LoraPair], list[Tensor]]] = {}

    def key(self, layer: LayerOnDevice, batch: ExpertBatch, needs_grad: bool | None) -> PassKey:
        """`needs_grad` None: a forward pass."""
        tokens, top_k = batch.ids.shape
        layout = _lora_layout(batch.lora)
        return PassKey(needs_grad, padded_tokens(tokens), top_k, batch.hidden.dtype, layer.gate, layout)

    def is_captured(self, key: PassKey) -> bool:
        return key in self.graphs.captured

    def is_pending(self, key: PassKey) -> bool:
        """Whether such a pass has no graph yet, but may get one."""
        return not self.is_captured(key) and self.graphs.may_capture(key)

    def is_due(self, key: PassKey, layer: int) -> bool:
        """Whether such a pass is replayed, or captured now."""
        return self.is_captured(key) or self.graphs.due(key, layer)

    def forward(self, key: PassKey, inputs: GraphInputs) -> Tensor | None:
        """float32 [T, H], to be read before the next replay; None: the pass could not be captured."""
        graph = self._fill(key, inputs)
        if graph is None:
            return None
        graph.replay(inputs)
        return graph.buffers.static.out[: inputs.batch.hidden.shape[0]]

    def backward(
        self, key: PassKey, inputs: GraphInputs, grad_out: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]] | None:
        """Gradients of hidden and of the routing weights in float32, and of the factors; the first and the last are to
        be read before the next replay. None as above."""
        graph = self._fill(key, inputs, grad_out)
        if graph is None:
            return None
        self._wait_for_gradient_copies()
        graph.replay(inputs)
        tokens, static = inputs.batch.hidden.shape[0], graph.buffers.static
        grads = graph.buffers.factor_grads if key.needs_grad else []
        return static.out[:tokens], static.grad_weights[:tokens].clone(), grads

    def _wait_for_gradient_copies(self) -> None:
        """The last layer's gradients may still be on their way from the buffers that are written now."""
        torch.cuda.current_stream(self.device).wait_stream(copy_streams(self.device).to_host)

    def _fill(self, key: PassKey, inputs: GraphInputs, grad_out: Tensor | None = None) -> ExpertGraph | None:
        """The graph, captured if need be, with this batch in its buffers."""
        graph = self.graphs.get(key)
        if graph is not None:
            graph.buffers.fill(inputs, key.tokens, grad_out, self._copier)
            return graph
        graph = self.graphs.capture(key, lambda: self._capture(key, inputs, grad_out))
        if graph is None:  # everything runs eagerly from now on
            self._evict()
            self._lora.clear()
            torch.cuda.empty_cache()
        return graph

    def _evict(self) -> None:
        torch.cuda.synchronize(self.device)
        self.graphs.evict()
        self._static = None

    def _capture(self, key: PassKey, inputs: GraphInputs, grad_out: Tensor | None) -> ExpertGraph:
        buffers = self._allocate(key, inputs)
        buffers.fill(inputs, key.tokens, grad_out, self._copier)
        if key.needs_grad is not None:
            self._wait_for_gradient_copies()
        pool = self.graphs.pool
        return ExpertGraph(buffers, pool.record(_decode(buffers, inputs)), pool.record(_compute(buffers, inputs, key)))

    def _allocate(self, key: PassKey, inputs: GraphInputs) -> PassBuffers:
        with torch.inference_mode(False):  # inference and training use the same buffers
            if self._static is None or not self._static.fits(key):
                self._evict()  # all graphs use the static buffers
                self._static = StaticBuffers.allocate(key.tokens, inputs.batch)
            table = torch.empty(len(inputs.table), dtype=torch.int64, device=self.device)
            if key.lora not in self._lora:
                pairs = inputs.lora.items()
                factors = {name: LoraPair(torch.empty_like(p.a), torch.empty_like(p.b)) for name, p in pairs}
                self._lora[key.lora] = factors, []
            factors, grads = self._lora[key.lora]
            if key.needs_grad and not grads:
                grads.extend(empty_like_factors(inputs.batch.lora, self.device))
        return PassBuffers(self._static, table, factors, grads)


def _decode(buffers: PassBuffers, inputs: GraphInputs) -> Callable[[], None]:
    geometry, base, decoded = inputs.layer.geometry, inputs.base, inputs.decoded

    def run() -> None:
        first, down = buffers.table[geometry.experts + 1 :].view(2, -1)
        decode(base.first, (), first, geometry.first, decoded.first)
        decode(base.down, (), down, geometry.down, decoded.down)

    return run


def _compute(buffers: PassBuffers, inputs: GraphInputs, key: PassKey) -> Callable[[], None]:
    """The pass over the batch in the buffers, with experts that are decoded."""
    static, tokens, pairs = buffers.static, key.tokens, buffers.factors
    geometry, decoded, gate, factors = inputs.layer.geometry, inputs.decoded, inputs.layer.gate, inputs.batch.lora

    def run() -> None:
        rows, order = _sorted_rows(static, buffers.table, geometry.experts, tokens)
        lora = GroupLora(rows.ends, pairs.get("first"), pairs.get("down")) if pairs else None
        out = static.out[:tokens].zero_()
        if key.needs_grad is None:
            grouped_mlp.forward(static.hidden[:tokens], rows, decoded, gate, out, lora)
            return
        grad_rows, grads = grouped_mlp.backward(
            static.grad_out[:tokens], static.hidden[:tokens], rows, decoded, gate, out, lora, None, key.needs_grad
        )
        assert rows.valid_rows is not None
        computed = torch.arange(len(grad_rows), device=grad_rows.device) < rows.valid_rows
        static.grad_weights[:tokens].view(-1).index_copy_(0, order, grad_rows.where(computed, 0.0))
        if factors is not None and grads:
            has_rows = rows.ends.diff(prepend=torch.zeros_like(rows.ends[:1])) > 0
            for target, part in zip(buffers.factor_grads, split_gradients(factors, grads), strict=True):
                target.copy_(part.where(has_rows[:, None, None], 0.0))

    return run


def _sorted_rows(static: StaticBuffers, table: Tensor, experts: int, tokens: int) -> tuple[GroupedRows, Tensor]:
    """Rows in the order of their experts, and where each comes from: token * k + slot."""
    ids, top_k = static.ids[:tokens].view(-1), static.ids.shape[1]
    keys = table[torch.where((ids < 0) | (ids >= experts), experts, ids)]
    keys, order = torch.sort(keys, stable=True)
    ends = torch.searchsorted(keys, torch.arange(experts, device=keys.device), right=True, out_int32=True)
    weights = static.weights[:tokens].view(-1)[order]
    return GroupedRows(order // top_k, weights, ends, ends[-1:]), order
