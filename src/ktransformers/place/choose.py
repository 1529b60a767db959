"""Who computes which experts of a batch, by costs, by what is on the GPU already and by what trials have found; and
which copies are queued for the layer that comes next.

A pass has a way from the moment at which its layer is called: the policy's, or under `auto` that of the walk it is part
of. Layers come by in the order of the last time, so the one that follows is known, and what it wanted the last time is
what it is likely to want. The surprising decision: a pass whose experts are all on the GPU, or sent there whoever is
wanted, goes without anybody having seen its ids, because to wait for them costs more than bytes that nobody needs.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ktransformers.nn.lora_factors import LoraFactors, is_adapter_packed
from ktransformers.nn.store import ExpertStore
from ktransformers.place.corrections import Corrections
from ktransformers.place.gpu.executor import ExpertBatch, GpuExecutor, LayerOnDevice
from ktransformers.place.host_callback import MOST
from ktransformers.place.phase import PHASES, Phase
from ktransformers.place.trials import POLICY, QUEUED, WHOLE, Trials, size_of
from ktransformers.plan.split import Costs, Split, split

MANY = 4  # rows an expert on average: from here on the next batch wants the same experts
NEARLY_ALL = 0.9  # of a layer's experts were wanted the last time: under `stream` all are sent for, unasked


@dataclass
class PlacedLayer:
    packed: LayerOnDevice
    home: weakref.ReferenceType[ExpertStore]  # the operator finds layers by their store, which must be free to go
    costs: dict[str, Costs]  # by direction
    counts: NDArray[np.int64]  # rows of each expert, of all forward passes so far
    last: dict[str, Split] = field(default_factory=dict)  # by phase
    seen: dict[int, NDArray[np.int64]] = field(default_factory=dict)  # rows of experts, by the size of the batch

    @property
    def store(self) -> ExpertStore:
        found = self.home()
        if found is None:
            raise RuntimeError("the expert store is gone; keep the ExpertStore alive as long as its graph")
        return found


class Chooser:
    """Of all layers of a model on one device."""

    def __init__(self, policy: str, side: GpuExecutor) -> None:
        self.policy, self.side, self.slots, self.device = policy, side, side.slots, side.device
        self.layers: dict[int, PlacedLayer] = {}
        self.trials = Trials(side.device)
        self.corrections = Corrections()
        self._after: dict[tuple[int, str], tuple[int, str]] = {}
        self._before: tuple[int, str] | None = None
        self._packing = 0.0  # seconds that an adapter takes when it has changed
        self._entered = False  # this pass is part of a walk
        self._left = 0.0  # when copies for the next layer were queued
        # Seconds from then on until it asks, the last two times, by layer and phase.
        self._gaps: dict[tuple[int, str], tuple[float, float]] = {}

    def decide(
        self,
        layer: PlacedLayer,
        counts: NDArray[np.int64],
        tokens: int,
        phase: Phase,
        way: str,
        factors: LoraFactors | None = None,
    ) -> Split:
        """Of a pass whose ids were seen."""
        index = layer.packed.index
        here = (index, phase.name)
        # Few tokens send for nobody ahead.
        if tokens > MOST and self._left and self._after.get(self._before or (-1, "")) == here:
            gap = max(0.0, time.perf_counter() - self._left)
            self._gaps[here] = (self._gaps.get(here, (gap, gap))[1], gap)
        costs, policy = self._costs(layer, tokens, phase, factors), POLICY[way]
        if policy == "cpu":
            return split(counts, tokens, costs, policy=policy)
        there = self._resident(index)
        if policy == "resident":
            return split(counts, tokens, costs, there=there, policy=policy)
        coming = self.slots.coming(index)
        there |= self.slots.present(index) - frozenset(coming)
        return split(counts, tokens, costs, there=there, coming=coming, backlog=self.slots.backlog(), policy=policy)

    def _way(
        self,
        layer: PlacedLayer,
        batch: ExpertBatch,
        phase: Phase,
        learns: bool | None = None,
        queued: bool | None = False,
    ) -> str:
        """Of a pass whose ids nobody has seen. `learns` None: forward; `queued`: whether host functions have to take
        it, None: they may. Few tokens have a choice even where all experts are resident: launching their kernels may
        take longer than the CPU does."""
        self._entered = False
        if queued:
            return QUEUED
        if not batch.ids.shape[0]:
            return "cpu"  # nobody has anything to do
        there, experts = self._resident(layer.packed.index), layer.packed.geometry.experts
        if self.policy == "auto" and (len(there) < experts or batch.ids.shape[0] <= MOST):
            way = self._enter(layer, batch, phase, learns, queued)
        elif self.policy == "cpu":
            way = "cpu"
        elif len(there) == experts or (self.policy == "stream" and self._nearly_all(layer, batch)):
            way = WHOLE
        else:
            way = self.policy
        # What a walk does in other layers may not be possible in this one.
        if way == QUEUED and queued is not None:
            way = "resident"
        if way == WHOLE and not self._replays(layer, batch, learns):
            way = "stream"
        return "cpu" if way == "resident" and not there else way

    def _replays(self, layer: PlacedLayer, batch: ExpertBatch, learns: bool | None) -> bool:
        """Whether a pass with all of its experts needs no look at its ids; the first of its size is looked at."""
        return size_of(batch.ids.shape[0]) in layer.seen and self.side.replays(layer.packed, batch, learns)

    def _nearly_all(self, layer: PlacedLayer, batch: ExpertBatch) -> bool:
        """Whether the last batch like this one wanted nearly all experts."""
        counts = layer.seen.get(size_of(batch.ids.shape[0]))
        return counts is not None and bool(np.count_nonzero(counts) >= NEARLY_ALL * len(counts))

    def _costs(self, layer: PlacedLayer, tokens: int, phase: Phase, factors: LoraFactors | None) -> Costs:
        costs = self.corrections.apply(layer.costs[phase.direction], phase.direction, tokens)
        if factors is not None and not is_adapter_packed(layer.store, factors):
            costs = replace(costs, cpu_call=costs.cpu_call + self._packing)
        return costs

    def _enter(
        self, layer: PlacedLayer, batch: ExpertBatch, phase: Phase, learns: bool | None, queued: bool | None
    ) -> str:
        self._entered = True
        return self.trials.enter(
            phase.walk,
            batch.ids.shape[0],
            (layer.packed.index, phase.name),
            lambda: self._foretell(layer, batch, phase, learns, queued),
        )

    def _foretell(
        self, layer: PlacedLayer, batch: ExpertBatch, phase: Phase, learns: bool | None, queued: bool | None
    ) -> dict[str, float]:
        """Seconds of a layer like this one by way, as costs have it, if it wants what the last batch of this size did;
        both only where they gain. Other layers may have residents where this one has none."""
        tokens, there = batch.ids.shape[0], self._resident(layer.packed.index)
        counts = layer.seen.get(size_of(tokens))
        if counts is None:
            counts = evenly(batch.ids.numel(), len(layer.counts))
        costs = self._costs(layer, tokens, phase, batch.factors)
        leads = sorted(min(gaps) for (_, name), gaps in self._gaps.items() if name == phase.name)
        lead = leads[len(leads) // 2] if leads else 0.0
        found = {
            way: split(np.maximum(counts, way == WHOLE), tokens, costs, there=there, backlog=-lead, policy=policy)
            for way, policy in POLICY.items()
        }
        possible = {
            WHOLE: self._replays(layer, batch, learns),
            QUEUED: queued is None,
            "both": bool(found["both"].streamed) and bool(found["both"].cpu),
            "cpu": not self.side.residents or tokens <= MOST,  # the GPU has the residents' rows of more tokens sooner
            "resident": bool(self.side.residents),
        }
        launching = {WHOLE: costs.gpu_call}  # while the device still has the layer before, for which nobody waits
        return {way: one.seconds - launching.get(way, 0.0) for way, one in found.items() if possible.get(way, True)}

    def _leave(self, made: bool = False) -> None:
        """Layers without a choice are on no walk. `made`: there is something now that later passes find."""
        if self._entered:
            if made:
                self.trials.spoil()
            self.trials.leave()

    def _prefetch(self, layer: PlacedLayer, phase: Phase, tokens: int, rows: int) -> None:
        """Queue copies for the layer that came after this one the last time, if it will want the same experts as it did
        of the last batch of this size."""
        here = (layer.packed.index, phase.name)
        if self._before is not None:
            self._after[self._before] = here
        # Copies of this layer that are still under way are no lead of the next one's.
        self._before, self._left = here, max(time.perf_counter(), self.slots.link_free)
        following = self._after.get(here)
        if following is None or rows < MANY * len(layer.counts):
            return
        target = self.layers[following[0]]
        before, towards = target.seen.get(size_of(tokens)), PHASES[following[1]]
        policy = self.policy
        if policy == "auto":
            walk = phase.walk if following[1] == phase.name else towards.walk
            policy = POLICY.get(self.trials.coming(walk, tokens), "resident")
        if before is None or policy not in ("auto", "stream") or not self.slots.direct(target.packed.source):
            return
        index, resident = target.packed.index, self._resident(target.packed.index)
        last = target.last.get(following[1])
        if policy == "stream" and last is not None and len(last.there) + len(last.streamed) == len(before):
            likely = last.streamed  # everybody
        else:
            costs = self.corrections.apply(target.costs[towards.direction], towards.direction, tokens)
            lead = min(self._gaps.get(following, (0.0,)))  # of the link, over the layer that will ask; a pause is none
            likely = split(before, tokens, costs, there=resident, backlog=-lead, policy=policy).streamed
        self.slots.fetch(index, target.packed.source, sorted(likely[: self.slots.count]))

    def _everybody(self, layer: PlacedLayer) -> Split:
        """All experts on the GPU, wanted or not."""
        there, experts = self._resident(layer.packed.index), range(layer.packed.geometry.experts)
        return Split(tuple(sorted(there)), tuple(e for e in experts if e not in there), (), 0.0, 0.0)

    def _resident(self, index: int) -> frozenset[int]:
        room = self.side.residents.get(index)
        return frozenset() if room is None else room.present(index)


def evenly(rows: int, experts: int) -> NDArray[np.int64]:
    """Rows of experts where nobody knows them: of as many experts as can be, all over."""
    return np.diff(np.arange(experts + 1) * rows // experts)
