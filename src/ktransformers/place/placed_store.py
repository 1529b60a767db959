"""What surrounds a layer's engine in a pass without gradients: batches of several adapters, deferred experts, residents
that follow the routing; and the engine that takes a batch by its size.

Deferred experts are an approximation of kt-kernel's, off by default. A token's experts are ordered by routing weight
and the last `d` of them may come late: what they compute is added to the output of the next layer of experts instead of
their own, so that the CPU computes them during the next attention. An expert that is among the first k - d of any token
of the batch is computed at once for all of them, and so is a resident. Where the next decoder layer has no placed
experts (a dense layer, the end of the model) nothing is deferred, so nothing is lost.
"""

from __future__ import annotations

import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktransformers.nn.lora_factors import LoraFactors, packed_adapter
from ktransformers.nn.mixed_lora import MixedLora
from ktransformers.nn.pool import avoid_pool_cpus
from ktransformers.nn.store import NO_DROPOUT, Dropout
from ktransformers.nn.transfer import DeviceToHost, start_device_to_host, start_host_to_device
from ktransformers.place.autograd import PlacedStore
from ktransformers.place.choose import PlacedLayer
from ktransformers.place.engine import ExpertEngine, Kept, count
from ktransformers.place.gpu.device_lora import PendingCopies
from ktransformers.place.gpu.executor import ExpertBatch
from ktransformers.place.gpu.multi_lora import MultiLora, host_options


class ThresholdEngine(ExpertEngine):
    """Streams batches of at least `threshold` tokens whole; of smaller ones residents are computed on the device and
    the rest on the CPU. 0: the policy says."""

    threshold = 0

    def policy_of(self, tokens: int) -> str:
        return self.policy if not self.threshold else "stream" if tokens >= self.threshold else "resident"

    def forward(self, layer: PlacedLayer, batch: ExpertBatch, retain: bool) -> tuple[Tensor, Kept]:
        with self._lock:
            self.policy = self.policy_of(batch.ids.shape[0])
            return super().forward(layer, batch, retain)

    def infer(self, layer: PlacedLayer, batch: ExpertBatch) -> Tensor:
        with self._lock:
            self.policy = self.policy_of(batch.ids.shape[0])
            return super().infer(layer, batch)

    def backward(
        self, layer: PlacedLayer, batch: ExpertBatch, grad_out: Tensor, kept: Kept, wanted: bool
    ) -> tuple[Tensor, Tensor, list[Tensor], PendingCopies | None]:
        with self._lock:
            self.policy = self.policy_of(batch.ids.shape[0])
            return super().backward(layer, batch, grad_out, kept, wanted)


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
        """A pass begins: what another one left, because it failed, belongs to nobody."""
        self._pending.clear()

    def add(self, layer: int, out: Tensor) -> Tensor:
        """With what the layer before this one has deferred."""
        late = self._pending.pop(layer, None)
        return (
            out if late is None else out + start_host_to_device((late.result(),), out.device).finish()[0].to(out.dtype)
        )

    def put(self, following: int, placed: ServedStore, batch: ExpertBatch, descent: DeviceToHost) -> None:
        """Compute a batch on the CPU for the next layer; `batch` has the deferred ids, `descent` brings its hidden
        states, ids and weights."""
        layer, pinned = placed.layer, batch.hidden.is_cuda

        def work() -> Tensor:
            hidden, ids, weights = descent.finish()
            layer.counts += count(ids, layer.packed.geometry.experts)
            lora = host_options(batch.several)
            if batch.factors is not None:
                lora = {"adapters": [packed_adapter(layer.store, batch.factors)]}
            out = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=pinned)
            return layer.store.forward(hidden, ids, weights, out=out, **lora)

        self._pending[following] = self._worker.submit(work)


class ServedStore(PlacedStore):
    """One layer of a placement. `number` is its decoder layer's, `following` the next one's if that has experts."""

    def __init__(self, engine: ThresholdEngine, layer: PlacedLayer, number: int = -1) -> None:
        super().__init__(engine, layer)
        self.number = number
        self.following: int | None = None
        self.deferral: Deferral | None = None
        self.first = False  # of the layers that a pass comes by
        self.renews = False  # residents follow what a streamed batch asks for
        self._at_once: tuple[frozenset[int], Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self.engine.device

    def __call__(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, factors: LoraFactors | None, dropout: Dropout, retain: bool
    ) -> Tensor:
        if torch.is_grad_enabled():
            return super().__call__(hidden, ids, weights, factors, dropout, retain)
        return self._pass(hidden, ids, weights, factors, None)

    def forward_mixed(self, hidden: Tensor, ids: Tensor, weights: Tensor, lora: MixedLora) -> Tensor:
        with torch.no_grad():
            return self._pass(hidden, ids, weights, None, MultiLora(lora, self.device))

    def _pass(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, factors: LoraFactors | None, several: MultiLora | None
    ) -> Tensor:
        rows, top_k = hidden.reshape(-1, hidden.shape[-1]), ids.shape[-1]
        ids, weights = ids.reshape(-1, top_k), weights.reshape(-1, top_k)
        batch = ExpertBatch(rows, ids, weights, factors, NO_DROPOUT, several)
        assert isinstance(self.engine, ThresholdEngine)
        whole = self.engine.policy_of(rows.shape[0]) == "stream"
        if self.deferral is not None and self.first:
            self.deferral.begin()
        before = self.engine.counts(self.layer) if self.renews and whole else None
        if self.deferral is None or self.following is None or whole:
            out = self.engine.infer(self.layer, batch)
        else:
            out = self._without_the_late(self.deferral, self.following, batch)
        if before is not None:
            self.renew(self.engine.counts(self.layer) - before)
        if self.deferral is not None:
            out = self.deferral.add(self.number, out)
        return out.view(hidden.shape)

    def _without_the_late(self, deferral: Deferral, following: int, batch: ExpertBatch) -> Tensor:
        experts = self.layer.packed.geometry.experts
        now, late = select(batch.ids, batch.weights, deferral.late, experts, self._never_late(experts))
        parts = [
            ExpertBatch(batch.hidden, ids, batch.weights, batch.factors, batch.dropout, batch.several)
            for ids in (now, late)
        ]
        descent = start_device_to_host((batch.hidden, late, batch.weights))  # not behind what the device computes next
        out = self.engine.forward(self.layer, parts[0], False)[0]
        deferral.put(following, self, parts[1], descent)
        return out

    def _never_late(self, experts: int) -> Tensor:
        residents = self.residents()
        if self._at_once is None or self._at_once[0] != residents:
            found = torch.zeros(experts + 1, dtype=torch.bool)
            found[[*residents, experts]] = True
            self._at_once = residents, found.to(self.device)
        return self._at_once[1]

    def residents(self) -> frozenset[int]:
        room = self.engine.side.residents.get(self.layer.packed.index)
        return frozenset() if room is None else room.present(self.layer.packed.index)

    def renew(self, counts: NDArray[np.int64]) -> int:
        """As many residents as before, now those with most rows; the number of those that are new. Of two with the same
        count the one that is there stays."""
        index, there = self.layer.packed.index, self.residents()
        room = self.engine.side.residents.get(index)
        if room is None or not counts.any():
            return 0
        order = sorted(range(len(counts)), key=lambda expert: (-int(counts[expert]), expert not in there, expert))
        wanted = frozenset(order[: room.count])

        def change() -> None:
            room.retain(index, wanted)
            room.fetch(index, self.layer.packed.source, sorted(wanted))

        self.engine.few.exchange(self.layer.packed, change)
        return len(wanted - there)
