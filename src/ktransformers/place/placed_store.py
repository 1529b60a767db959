"""A layer of experts under the placement engine, as `experts/operator.py` calls it: training through autograd,
inference with one adapter or several, deferred experts, and residents that follow the routing.

Deferred experts are an approximation of kt-kernel's, off by default. A token's experts are ordered by routing weight,
and the results of the last `late` of them are added to the output of the next layer of experts instead of their own, so
that the CPU computes them during the next attention. An expert that is among the first k - late of any token of the
batch is computed at once for all tokens, and so is a resident. Where the next decoder layer has no placed experts (a
dense layer, the end of the model) nothing is deferred, so no result is lost.
"""

from __future__ import annotations

import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktransformers.experts.lora_factors import LoraFactors, packed_adapter
from ktransformers.experts.mixed_lora import MixedLora
from ktransformers.experts.store import NO_DROPOUT, Dropout
from ktransformers.experts.transfer import DeviceToHost, start_device_to_host, start_host_to_device
from ktransformers.ground.pool import avoid_pool_cpus
from ktransformers.place.autograd import apply_placed, register
from ktransformers.place.dispatch import PlacedLayer
from ktransformers.place.engine import ExpertEngine, count
from ktransformers.place.gpu.executor import ExpertBatch
from ktransformers.place.gpu.multi_lora import MultiLora, host_options
from ktransformers.plan.modes import STREAM


def select(ids: Tensor, weights: Tensor, late: int, experts: int, at_once: Tensor) -> tuple[Tensor, Tensor]:
    """Ids `[T, k]` to compute at once and ids to defer, -1 in the places of the others; `at_once` bool [E + 1]: experts
    that are never deferred, the last place for ids that are none."""
    protected, first = at_once.clone(), ids.shape[1] - late
    none = (ids < 0) | (ids >= experts)
    ids = torch.where(none, experts, ids)
    if first > 0:
        protected[ids.gather(1, weights.topk(first, dim=1).indices)] = True
    now = protected[ids] | none
    return torch.where(now & ~none, ids, -1), torch.where(now, -1, ids)


class Deferral:
    """Results that belong to a layer's successor, on their way; one for all layers of a model."""

    def __init__(self, late: int) -> None:
        self.late = late  # experts of a token that may be deferred
        self._worker = ThreadPoolExecutor(1, "kt-deferred", initializer=avoid_pool_cpus)
        weakref.finalize(self, self._worker.shutdown, wait=False)
        self._pending: dict[int, Future[Tensor]] = {}

    def begin(self) -> None:
        """A forward pass begins: results that a failed one has left are dropped."""
        self._pending.clear()

    def add(self, layer: int, out: Tensor) -> Tensor:
        """The output of a layer with what the layer before it has deferred."""
        late = self._pending.pop(layer, None)
        return (
            out if late is None else out + start_host_to_device((late.result(),), out.device).finish()[0].to(out.dtype)
        )

    def put(self, following: int, placed: PlacedStore, batch: ExpertBatch, copy: DeviceToHost) -> None:
        """Compute a batch on the CPU for the next layer; `batch` has the deferred ids, `copy` brings its hidden
        states, ids and weights."""
        layer, pinned = placed.layer, batch.hidden.is_cuda

        def work() -> Tensor:
            hidden, ids, weights = copy.finish()
            layer.counts += count(ids, layer.packed.geometry.experts)
            lora = host_options(batch.multi_lora)
            if batch.factors is not None:
                lora = {"adapters": [packed_adapter(layer.store, batch.factors)]}
            out = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=pinned)
            return layer.store.forward(hidden, ids, weights, out=out, **lora)

        self._pending[following] = self._worker.submit(work)


class PlacedStore:
    """What `nn.operator.place_store` is given for the store of one layer: the layer under its engine. `number` is its
    decoder layer's, `following` the next one's if that has placed experts."""

    def __init__(self, engine: ExpertEngine, layer: PlacedLayer, number: int = -1) -> None:
        self.engine, self.layer, self.number = engine, layer, number
        self.following: int | None = None
        self.deferral: Deferral | None = None
        self.first = False  # of the placed layers of a forward pass
        self.updates_residents = False  # residents follow the routing of streamed batches
        self._handle = register(self)
        self._never_deferred: tuple[frozenset[int], Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self.engine.device

    def __call__(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, factors: LoraFactors | None, dropout: Dropout, retain: bool
    ) -> Tensor:
        if torch.is_grad_enabled():
            return apply_placed(self._handle, hidden, ids, weights, factors, dropout, retain)
        return self._infer(hidden, ids, weights, factors, None)

    def forward_mixed(self, hidden: Tensor, ids: Tensor, weights: Tensor, lora: MixedLora) -> Tensor:
        with torch.no_grad():
            return self._infer(hidden, ids, weights, None, MultiLora(lora, self.device))

    def _infer(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, factors: LoraFactors | None, multi_lora: MultiLora | None
    ) -> Tensor:
        rows, top_k = hidden.reshape(-1, hidden.shape[-1]), ids.shape[-1]
        ids, weights = ids.reshape(-1, top_k), weights.reshape(-1, top_k)
        batch = ExpertBatch(rows, ids, weights, factors, NO_DROPOUT, multi_lora)
        streamed = self.engine.dispatcher.policy_of(rows.shape[0]) == STREAM
        if self.deferral is not None and self.first:
            self.deferral.begin()
        before = self.engine.counts(self.layer) if self.updates_residents and streamed else None
        if self.deferral is None or self.following is None or streamed:
            out = self.engine.infer(self.layer, batch)
        else:
            out = self._infer_deferred(self.deferral, self.following, batch)
        if before is not None:
            self.update_residents(self.engine.counts(self.layer) - before)
        if self.deferral is not None:
            out = self.deferral.add(self.number, out)
        return out.view(hidden.shape)

    def _infer_deferred(self, deferral: Deferral, following: int, batch: ExpertBatch) -> Tensor:
        experts = self.layer.packed.geometry.experts
        now, late = select(batch.ids, batch.weights, deferral.late, experts, self._protected(experts))
        copy = start_device_to_host((batch.hidden, late, batch.weights))  # before what the device computes next
        out = self.engine.forward(self.layer, replace(batch, ids=now), False, training=False)[0]
        deferral.put(following, self, replace(batch, ids=late), copy)
        return out

    def _protected(self, experts: int) -> Tensor:
        """bool [E + 1]: experts that are never deferred, the residents; the last place is for ids out of range."""
        residents = self.residents()
        if self._never_deferred is None or self._never_deferred[0] != residents:
            protected = torch.zeros(experts + 1, dtype=torch.bool)
            protected[[*residents, experts]] = True
            self._never_deferred = residents, protected.to(self.device)
        return self._never_deferred[1]

    def residents(self) -> frozenset[int]:
        return self.engine.executor.resident_experts(self.layer.packed.index)

    def update_residents(self, counts: NDArray[np.int64]) -> int:
        """As many residents as before, now those with most rows; the number of new ones. Between two with the same
        count the one that is resident stays."""
        index, residents = self.layer.packed.index, self.residents()
        cache = self.engine.executor.residents.get(index)
        if cache is None or not counts.any():
            return 0
        order = sorted(range(len(counts)), key=lambda expert: (-int(counts[expert]), expert not in residents, expert))
        busiest = frozenset(order[: cache.count])
        if busiest == residents:
            return 0

        def change() -> None:
            cache.evict_except(index, busiest)
            cache.fetch(index, self.layer.packed.source, sorted(busiest))

        self.engine.callbacks.replace_residents(self.layer.packed, change)
        return len(busiest - residents)
