"""One batch through one layer of experts on two machines: those on the GPU, or brought there, and those on the CPU.

Hidden states `[T, H]`, ids and routing weights `[T, k]` are on the device. The ids come down first and are counted;
`split` decides, under `auto` in the way that `trials` has found; the CPU's share starts in a thread of its own (the
core needs no GIL) as soon as its hidden states are down, while this thread queues copies, decoding and products for the
device. The results meet at the end; then copies for the layer that came next the last time are queued. Backward is the
same walk. Where all experts of a layer are on the GPU, or sent there unasked, nobody waits for the ids: they are
counted when they have come. A few tokens may go by host functions instead (`few`). The surprising decision: what
autograd keeps has the same shapes whatever the split was, because recomputation under checkpointing may split another
way and is compared with the first pass by shapes.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktransformers import _core
from ktransformers.nn.lora_factors import empty_gradients, is_adapter_packed, match_factor_strides, packed_adapter
from ktransformers.nn.lora_prefetch import LoraPrefetch
from ktransformers.nn.pool import avoid_pool_cpus
from ktransformers.nn.transfer import DeviceToHost, start_device_to_host
from ktransformers.place.choose import Chooser, PlacedLayer
from ktransformers.place.corrections import SETTLE
from ktransformers.place.gpu.device_lora import PendingCopies, start_to_host
from ktransformers.place.gpu.executor import ExpertBatch, GpuExecutor
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.gpu.multi_lora import host_options
from ktransformers.place.gpu.zero_copy import ZeroCopyReader
from ktransformers.place.host_callback import MOST, HostCallbackPath
from ktransformers.place.phase import FEW, PHASES, Phase, phase_of
from ktransformers.place.trials import QUEUED, WHOLE, size_of
from ktransformers.plan.split import Split

Result = TypeVar("Result")


@dataclass(frozen=True)
class Kept:
    """For backward."""

    ids: Tensor  # host; not there until the engine has settled, so nobody may copy it before
    keep: Tensor  # of the core, or empty; written where the CPU had everything
    cpu: Tensor  # bool [E]: what the CPU computed


class ExpertEngine(Chooser):
    """All layers of a model on one device."""

    def __init__(self, device: torch.device, policy: str, slots: ExpertCache) -> None:
        super().__init__(policy, GpuExecutor(device, slots))
        self._puller = ZeroCopyReader(device)
        self.few = HostCallbackPath(device, self.side)
        self._worker = ThreadPoolExecutor(1, "kt-experts", initializer=avoid_pool_cpus)
        weakref.finalize(self, self._worker.shutdown, wait=False)
        self._ahead = LoraPrefetch(self._worker)
        self._lock = threading.RLock()
        self._packed = 0.0  # seconds that an adapter took that has just changed
        self._unseen: deque[tuple[PlacedLayer, DeviceToHost]] = deque()  # ids that nobody has waited for

    def settle(self, wait: bool = True) -> None:
        """Count the rows of passes that nobody waited for."""
        with self._lock:
            while self._unseen and (wait or self._unseen[0][1].ready()):
                layer, descent = self._unseen.popleft()
                self._count(layer, descent.finish()[0])

    def _count(self, layer: PlacedLayer, ids: Tensor) -> NDArray[np.int64]:
        counts = count(ids, layer.packed.geometry.experts)
        layer.counts += counts
        layer.seen[size_of(ids.shape[0])] = counts
        return counts

    def counts(self, layer: PlacedLayer) -> NDArray[np.int64]:
        """Rows of each expert so far."""
        with self._lock:
            self.settle()
            return layer.counts.copy()

    def forward(self, layer: PlacedLayer, batch: ExpertBatch, retain: bool) -> tuple[Tensor, Kept]:
        """The result in hidden's dtype, and what backward needs; with `retain` the CPU keeps gate and up."""
        with self._lock:
            phase = phase_of("forward")
            return self._forward(layer, batch, retain, phase, self._way(layer, batch, phase))

    def infer(self, layer: PlacedLayer, batch: ExpertBatch) -> Tensor:
        """The result alone; nothing is kept, so few tokens need nobody to wait for their ids."""
        with self._lock:
            phase = FEW if self.few.suits(batch) else PHASES["forward"]
            queued = self.few.takes(layer.packed, batch, self.policy)
            way = self._way(layer, batch, phase, queued=queued)
            if queued is None and not self.few.ready(layer.packed, batch):
                way = self.trials.detour(QUEUED)  # somebody may want to capture the next pass
            if way != QUEUED:
                return self._forward(layer, batch, False, phase, way)[0]
            result = self.few.forward(layer.packed, layer.store, batch)
            self._leave()
            return result

    def _forward(
        self, layer: PlacedLayer, batch: ExpertBatch, retain: bool, phase: Phase, way: str
    ) -> tuple[Tensor, Kept]:
        self.settle(wait=way != WHOLE)
        tokens = batch.ids.shape[0]
        at_once = way == "cpu" and tokens <= MOST  # nobody has to know who is wanted to know who computes them
        routes = start_device_to_host((batch.ids, batch.hidden, batch.weights) if at_once else (batch.ids,))
        counts = None
        if way == WHOLE:
            ids, found = routes.targets[0], self._everybody(layer)
            self._unseen.append((layer, routes))
        else:
            ids = routes.finish()[0]
            counts = self._count(layer, ids)
            found = self.decide(layer, counts, tokens, phase, way, batch.factors)
        layer.last[phase.name] = found
        keeps = retain and self.policy != "stream"  # whatever the split: checkpointing compares shapes
        keep = layer.store.new_keep(*ids.shape) if keeps else ids.new_empty(0, dtype=torch.uint8)
        cpu = mask(found.cpu, layer.packed.geometry.experts)
        gpu = found.there + found.streamed
        share = None
        if found.cpu:
            rows = routes if at_once else start_device_to_host((batch.hidden, batch.weights))
            share = self._cpu_forward(layer, batch, rows, ids, found, cpu, keep[:0] if gpu else keep)
        whole = self.side.forward(layer.packed, batch, gpu, counts) if gpu else None
        self._prefetch(layer, phase, tokens, batch.ids.numel())
        if whole is not None:
            if share is not None:
                self._puller.add(share(), whole)
            result = whole.to(batch.hidden.dtype)
            self.side.close()
        elif share is not None:
            result = self._puller.pull(share())
        else:  # nobody was asked for
            result = torch.zeros_like(batch.hidden)
        if share is not None and batch.factors is not None:
            self._ahead.layer_done(layer.store)
        self._leave(whole is not None and self.side.making)
        return result, Kept(ids, keep, cpu)

    def backward(
        self, layer: PlacedLayer, batch: ExpertBatch, grad_out: Tensor, kept: Kept, wanted: bool
    ) -> tuple[Tensor, Tensor, list[Tensor], PendingCopies | None]:
        """Gradients of hidden, of the routing weights and, if `wanted`, of the factors, in host memory; whoever reads
        these has to finish what is still leaving."""
        with self._lock:
            return self._backward(layer, batch, grad_out, kept, wanted)

    def _backward(
        self, layer: PlacedLayer, batch: ExpertBatch, grad_out: Tensor, kept: Kept, wanted: bool
    ) -> tuple[Tensor, Tensor, list[Tensor], PendingCopies | None]:
        phase, wanted = phase_of("backward"), wanted and batch.factors is not None
        way, counts = self._way(layer, batch, phase, wanted), None
        self.settle(wait=way != WHOLE)
        if way == WHOLE:
            found = self._everybody(layer)
        else:
            counts = count(kept.ids, layer.packed.geometry.experts)
            found = self.decide(layer, counts, kept.ids.shape[0], phase, way, batch.factors)
        layer.last[phase.name] = found
        cpu = mask(found.cpu, layer.packed.geometry.experts)
        if found.there or found.streamed or not torch.equal(cpu, kept.cpu):  # rows are kept in the order of one split
            kept = replace(kept, keep=kept.keep[:0])
        grads: list[Tensor] = []
        views: Sequence[Tensor | None] = ()
        share = None
        if found.cpu:
            if wanted and batch.factors is not None:
                grads, views = empty_gradients(batch.factors, pinned=self.device.type == "cuda")
            share = self._cpu_backward(layer, batch, grad_out, kept, found, cpu, views)
        grad_hidden = grad_weights = None
        laid: list[Tensor] = []
        if gpu := found.there + found.streamed:
            grad_hidden, grad_weights, laid = self.side.backward(layer.packed, batch, grad_out, gpu, counts, wanted)
        leaving = start_to_host(laid) if laid and share is None else None
        self._prefetch(layer, phase, batch.ids.shape[0], batch.ids.numel())
        if share is not None:
            lower = share()
            if grad_hidden is None or grad_weights is None:
                grad_hidden, grad_weights = (self._puller.pull(one) for one in lower)
            else:
                self._puller.add(lower[0], grad_hidden)
                self._puller.add(lower[1], grad_weights)
            if laid:
                for there, here in zip(laid, grads, strict=False):
                    self._puller.add(here, there)
                leaving = start_to_host(laid)
        if grad_hidden is None or grad_weights is None:  # nobody was asked for
            grad_hidden, grad_weights = torch.zeros_like(batch.hidden), torch.zeros_like(batch.weights)
        found_grads = grad_hidden.to(batch.hidden.dtype), grad_weights.to(batch.weights.dtype)
        self.side.close()
        self._leave(bool(gpu) and self.side.making)
        if leaving is not None:
            grads = leaving.tensors
        elif grads and batch.factors is not None:
            grads = match_factor_strides(layer.store, batch.factors, grads)
        elif wanted and batch.factors is not None:  # nobody was asked for
            grads = [torch.zeros_like(tensor) for tensor in batch.factors.tensors]
        return *found_grads, grads, leaving

    # The CPU's share: tensors in host memory.

    def _cpu_forward(
        self,
        layer: PlacedLayer,
        batch: ExpertBatch,
        rows: DeviceToHost,
        ids: Tensor,
        found: Split,
        cpu: Tensor,
        keep: Tensor,
    ) -> Callable[[], Tensor]:
        hidden, weights = rows.finish()[-2:]
        out = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=self.device.type == "cuda")

        def work() -> Tensor:
            adapters = self._adapters(layer, batch)
            return layer.store.forward(
                hidden,
                ids,
                weights,
                skip=~cpu,
                out=out,
                keep=keep if keep.numel() else None,
                dropout=batch.dropout,
                needs_grad=batch.learns,
                **(host_options(batch.several) or {"adapters": adapters}),
            )

        return self._start("forward", ids.shape[0], found, work)

    def _cpu_backward(
        self,
        layer: PlacedLayer,
        batch: ExpertBatch,
        grad_out: Tensor,
        kept: Kept,
        found: Split,
        cpu: Tensor,
        views: Sequence[Tensor | None],
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        rising, weights, hidden = start_device_to_host((grad_out, batch.weights, batch.hidden)).finish()

        def work() -> tuple[Tensor, Tensor]:
            adapters = self._adapters(layer, batch)
            return layer.store.backward(
                rising,
                hidden,
                kept.ids,
                weights,
                skip=~cpu,
                keep=kept.keep if kept.keep.numel() else None,
                adapters=adapters,
                factors=[views] if views else None,
                dropout=batch.dropout,
            )

        return self._start("backward", kept.ids.shape[0], found, work)

    def _adapters(self, layer: PlacedLayer, batch: ExpertBatch) -> list[_core.Adapter]:
        if batch.factors is None:
            return []
        known, begun = is_adapter_packed(layer.store, batch.factors), time.perf_counter()
        found = packed_adapter(layer.store, batch.factors)
        if not known:
            taken = self._packed = time.perf_counter() - begun
            self._packing = taken + (1 - SETTLE) * (self._packing - taken) if self._packing else taken
        return [found]

    def _start(self, direction: str, tokens: int, found: Split, work: Callable[[], Result]) -> Callable[[], Result]:
        """The share, to be called for when it is wanted. Where the GPU has one too it is at work when this returns
        (until then its thread wants the GIL, which this one would keep); where not, nobody has to be woken."""
        if not found.there and not found.streamed:
            return lambda: self._timed(direction, tokens, found, work)
        begun = threading.Event()
        share = self._worker.submit(self._timed, direction, tokens, found, work, begun)
        begun.wait()
        return share.result

    def _timed(
        self,
        direction: str,
        tokens: int,
        found: Split,
        work: Callable[[], Result],
        begun: threading.Event | None = None,
    ) -> Result:
        """What the CPU takes corrects what it is expected to take the next time; not when a way has just been taken up
        and touches memory that nobody had touched before."""
        start, self._packed = time.perf_counter(), 0.0
        if begun is not None:
            begun.set()
        result = work()
        taken = time.perf_counter() - start - self._packed
        if self.policy == "auto" and not self.trials.fresh:
            self.corrections.learn(direction, tokens, found, taken)
        return result


def count(ids: Tensor, experts: int) -> NDArray[np.int64]:
    """Rows of each expert; ids outside count nowhere."""
    numbers = ids.numpy().reshape(-1)
    if len(numbers) and numbers.view(f"u{numbers.itemsize}").max() >= experts:  # -1 is large there
        numbers = numbers[(numbers >= 0) & (numbers < experts)]
    return np.bincount(numbers, minlength=experts)


def mask(experts: Sequence[int], count: int) -> Tensor:
    found = np.zeros(count, bool)
    found[list(experts)] = True
    return torch.from_numpy(found)
