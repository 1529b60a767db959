"""One batch through one layer of experts on two machines: those on the GPU, or brought there, and those on the CPU.

Hidden states `[T, H]`, ids and routing weights `[T, k]` are on the device. The ids come down first and are counted;
`split` decides, under `auto` in the way that `trials` has found; the CPU's share starts in a thread of its own (the
core needs no GIL) as soon as its hidden states are down, while this thread queues copies, decoding and products for the
device. The results meet at the end; then copies for the layer that came next the last time are queued. Backward is the
same walk. The surprising decision: what autograd keeps has the same shapes whatever the split was, because
recomputation under checkpointing may split another way and is compared with the first pass by shapes.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktransformers import _core
from ktransformers.nn.ahead import Ahead
from ktransformers.nn.factors import Factors, gradients_like, is_packed, packed, turned
from ktransformers.nn.pool import beside_the_pool
from ktransformers.nn.store import ExpertStore
from ktransformers.nn.transfer import Descent, start_down
from ktransformers.place.corrections import SETTLE, Corrections
from ktransformers.place.few import FEW, Few
from ktransformers.place.gpu.factors import Leaving, start_to_host
from ktransformers.place.gpu.pull import Puller
from ktransformers.place.gpu.several import host_options
from ktransformers.place.gpu.side import Batch, Packed, Side
from ktransformers.place.gpu.slots import Slots
from ktransformers.place.phase import PHASES, Phase, phase_of
from ktransformers.place.split import Costs, Split, split
from ktransformers.place.trials import POLICY, Trials

Result = TypeVar("Result")
MANY = 4  # rows an expert on average: from here on the next batch wants the same experts


@dataclass
class Layer:
    packed: Packed
    home: weakref.ReferenceType[ExpertStore]  # the operator finds layers by their store, which must be free to go
    costs: dict[str, Costs]  # by direction
    counts: NDArray[np.int64]  # rows of each expert, of all forward passes so far
    last: dict[str, Split] = field(default_factory=dict)  # by phase
    seen: dict[str, tuple[NDArray[np.int64], int]] = field(default_factory=dict)  # rows of experts, tokens; by phase

    @property
    def store(self) -> ExpertStore:
        found = self.home()
        if found is None:
            raise RuntimeError("the expert store is gone; keep the ExpertStore alive as long as its graph")
        return found


@dataclass(frozen=True)
class Kept:
    """For backward."""

    ids: Tensor  # host
    keep: Tensor  # of the core, or empty; written where the CPU had everything
    cpu: Tensor  # bool [E]: what the CPU computed


class Engine:
    """All layers of a model on one device."""

    def __init__(self, device: torch.device, policy: str, slots: Slots) -> None:
        self.device, self.policy, self.slots = device, policy, slots
        self.side = Side(device, slots)
        self._puller = Puller(device)
        self.few = Few(device, self.side)
        self.layers: dict[int, Layer] = {}
        self._worker = ThreadPoolExecutor(1, "kt-experts", initializer=beside_the_pool)
        weakref.finalize(self, self._worker.shutdown, wait=False)
        self._ahead = Ahead(self._worker)
        self._lock = threading.RLock()
        self._after: dict[tuple[int, str], tuple[int, str]] = {}
        self._before: tuple[int, str] | None = None
        self._packing = self._packed = 0.0  # seconds that an adapter takes when it has changed, and took just now
        self._left = 0.0  # when copies for the next layer were queued
        # Seconds from then on until it asks, the last two times, by layer and phase.
        self._gaps: dict[tuple[int, str], tuple[float, float]] = {}
        self.trials = Trials(device)
        self.corrections = Corrections()

    def decide(
        self,
        layer: Layer,
        counts: NDArray[np.int64],
        tokens: int,
        phase: Phase,
        factors: Factors | None = None,
        begun: Any = None,
    ) -> Split:
        """`begun`: the moment at which the layer was called."""
        index = layer.packed.index
        here = (index, phase.name)
        if self._left and self._after.get(self._before or (-1, "")) == here:
            gap = max(0.0, time.perf_counter() - self._left)
            self._gaps[here] = (self._gaps.get(here, (gap, gap))[1], gap)
        costs = self.corrections.apply(layer.costs[phase.direction], phase.direction, tokens)
        if factors is not None and not is_packed(layer.store, factors):
            costs = replace(costs, cpu_call=costs.cpu_call + self._packing)
        there, policy = self._resident(index), self.policy
        if policy == "auto":
            moment = self.trials.mark() if begun is None else begun
            way = self.trials.enter(
                phase.walk, tokens, here, moment, lambda: self._foretell(counts, tokens, costs, here)
            )
            policy = POLICY[way]
        if policy == "resident":
            return split(counts, tokens, costs, there=there, policy=policy)
        coming = self.slots.coming(index)
        there |= self.slots.present(index) - frozenset(coming)
        return split(counts, tokens, costs, there=there, coming=coming, backlog=self.slots.backlog(), policy=policy)

    def _foretell(
        self, counts: NDArray[np.int64], tokens: int, costs: Costs, here: tuple[int, str]
    ) -> dict[str, float]:
        """Seconds of a layer like this one by way, as costs have it; both only where they gain."""
        leads = sorted(min(gaps) for (_, name), gaps in self._gaps.items() if name == here[1])
        lead, there = leads[len(leads) // 2] if leads else 0.0, self._resident(here[0])
        found = {
            way: split(counts, tokens, costs, there=there, backlog=-lead, policy=policy)
            for way, policy in POLICY.items()
        }
        mixed = bool(found["both"].streamed) and bool(found["both"].cpu)
        return {way: one.seconds for way, one in found.items() if way != "both" or mixed}

    def _few(self, layer: Layer, batch: Batch) -> bool:
        """So few tokens, and no residents, that the CPU has them all without a thought."""
        return self.policy != "stream" and batch.ids.shape[0] <= FEW and not self._resident(layer.packed.index)

    def forward(self, layer: Layer, batch: Batch, retain: bool) -> tuple[Tensor, Kept]:
        """The result in hidden's dtype, and what backward needs; with `retain` the CPU keeps gate and up."""
        with self._lock:
            return self._forward(layer, batch, retain)

    def infer(self, layer: Layer, batch: Batch) -> Tensor:
        """The result alone; nothing is kept, so few tokens need nobody to wait for their ids."""
        with self._lock:
            if self.few.takes(layer.packed, batch, self.policy):
                return self.few.forward(layer.packed, layer.store, batch)
            return self.forward(layer, batch, False)[0]

    def _forward(self, layer: Layer, batch: Batch, retain: bool) -> tuple[Tensor, Kept]:
        phase, begun = phase_of("forward"), self._mark()
        few = self._few(layer, batch)
        routes = start_down((batch.ids, batch.hidden, batch.weights) if few else (batch.ids,))
        ids = routes.finish()[0]
        counts = count(ids, layer.packed.geometry.experts)
        layer.counts += counts
        if few:
            found = Split((), (), tuple(np.flatnonzero(counts).tolist()), 0.0, 0.0)
        else:
            found = self.decide(layer, counts, ids.shape[0], phase, batch.factors, begun)
        layer.last[phase.name] = found
        keeps = retain and self.policy != "stream"  # whatever the split: checkpointing compares shapes
        keep = layer.store.new_keep(*ids.shape) if keeps else ids.new_empty(0, dtype=torch.uint8)
        cpu = mask(found.cpu, layer.packed.geometry.experts)
        gpu = found.there + found.streamed
        share = None
        if found.cpu:
            rows = routes if few else start_down((batch.hidden, batch.weights))
            share = self._cpu_forward(layer, batch, rows, ids, found, cpu, keep[:0] if gpu else keep)
        whole = self.side.forward(layer.packed, batch, gpu, counts) if gpu else None
        self._prefetch(layer, phase, counts, batch.ids.shape[0])
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
            self._ahead.passed(layer.store)
        self._leave(few)
        return result, Kept(ids, keep, cpu)

    def backward(
        self, layer: Layer, batch: Batch, grad_out: Tensor, kept: Kept, wanted: bool
    ) -> tuple[Tensor, Tensor, list[Tensor], Leaving | None]:
        """Gradients of hidden, of the routing weights and, if `wanted`, of the factors, in host memory; whoever reads
        these has to finish what is still leaving."""
        with self._lock:
            return self._backward(layer, batch, grad_out, kept, wanted)

    def _backward(
        self, layer: Layer, batch: Batch, grad_out: Tensor, kept: Kept, wanted: bool
    ) -> tuple[Tensor, Tensor, list[Tensor], Leaving | None]:
        phase, begun = phase_of("backward"), self._mark()
        counts = count(kept.ids, layer.packed.geometry.experts)
        found = self.decide(layer, counts, kept.ids.shape[0], phase, batch.factors, begun)
        layer.last[phase.name] = found
        cpu = mask(found.cpu, layer.packed.geometry.experts)
        if found.there or found.streamed or not torch.equal(cpu, kept.cpu):  # rows are kept in the order of one split
            kept = replace(kept, keep=kept.keep[:0])
        wanted = wanted and batch.factors is not None
        grads: list[Tensor] = []
        views: Sequence[Tensor | None] = ()
        share = None
        if found.cpu:
            if wanted and batch.factors is not None:
                grads, views = gradients_like(batch.factors, pinned=self.device.type == "cuda")
            share = self._cpu_backward(layer, batch, grad_out, kept, found, cpu, views)
        grad_hidden = grad_weights = None
        laid: list[Tensor] = []
        if gpu := found.there + found.streamed:
            grad_hidden, grad_weights, laid = self.side.backward(layer.packed, batch, grad_out, gpu, counts, wanted)
        leaving = start_to_host(laid) if laid and share is None else None
        self._prefetch(layer, phase, counts, batch.ids.shape[0])
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
        self._leave()
        if leaving is not None:
            grads = leaving.tensors
        elif grads and batch.factors is not None:
            grads = turned(layer.store, batch.factors, grads)
        elif wanted and batch.factors is not None:  # nobody was asked for
            grads = [torch.zeros_like(tensor) for tensor in batch.factors.tensors]
        return *found_grads, grads, leaving

    def _mark(self) -> Any:
        return self.trials.mark() if self.policy == "auto" else None

    def _leave(self, few: bool = False) -> None:
        if self.policy == "auto" and not few:
            self.trials.leave()

    # The CPU's share: tensors in host memory.

    def _cpu_forward(
        self, layer: Layer, batch: Batch, rows: Descent, ids: Tensor, found: Split, cpu: Tensor, keep: Tensor
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
                learns=batch.learns,
                **(host_options(batch.several) or {"adapters": adapters}),
            )

        return self._start("forward", ids.shape[0], found, work)

    def _cpu_backward(
        self,
        layer: Layer,
        batch: Batch,
        grad_out: Tensor,
        kept: Kept,
        found: Split,
        cpu: Tensor,
        views: Sequence[Tensor | None],
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        rising, weights, hidden = start_down((grad_out, batch.weights, batch.hidden)).finish()

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

    def _adapters(self, layer: Layer, batch: Batch) -> list[_core.Adapter]:
        if batch.factors is None:
            return []
        known, begun = is_packed(layer.store, batch.factors), time.perf_counter()
        found = packed(layer.store, batch.factors)
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

    # What comes next.

    def _prefetch(self, layer: Layer, phase: Phase, counts: NDArray[np.int64], tokens: int) -> None:
        """Queue copies for the layer that came after this one the last time, if it will want the same experts."""
        here = (layer.packed.index, phase.name)
        if self._before is not None:
            self._after[self._before] = here
        # Copies of this layer that are still under way are no lead of the next one's.
        self._before, self._left = here, max(time.perf_counter(), self.slots.link_free)
        layer.seen[phase.name] = counts, tokens
        following = self._after.get(here)
        many = counts.sum() >= MANY * len(counts)
        if following is None or not many:
            return
        target = self.layers[following[0]]
        before, towards = target.seen.get(following[1]), PHASES[following[1]]
        policy = self.policy
        if policy == "auto" and before is not None:
            policy = POLICY.get(self.trials.coming(towards.walk, before[1]), "resident")
        if before is None or policy not in ("auto", "stream") or not self.slots.direct(target.packed.source):
            return
        index, resident = target.packed.index, self._resident(target.packed.index)
        costs = self.corrections.apply(target.costs[towards.direction], towards.direction, before[1])
        lead = min(self._gaps.get(following, (0.0,)))  # of the link, over the layer that will ask; a pause is none
        likely = split(*before, costs, there=resident, backlog=-lead, policy=policy).streamed[: self.slots.count]
        self.slots.fetch(index, target.packed.source, sorted(likely))

    def _resident(self, index: int) -> frozenset[int]:
        room = self.side.residents.get(index)
        return frozenset() if room is None else room.present(index)


def count(ids: Tensor, experts: int) -> NDArray[np.int64]:
    """Rows of each expert; ids outside count nowhere."""
    numbers = ids.numpy().reshape(-1)
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= experts):
        numbers = numbers[(numbers >= 0) & (numbers < experts)]
    return np.bincount(numbers, minlength=experts)


def mask(experts: Sequence[int], count: int) -> Tensor:
    found = torch.zeros(count, dtype=torch.bool)
    found[list(experts)] = True
    return found
