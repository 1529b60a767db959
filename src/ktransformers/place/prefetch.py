"""Copies of experts queued before the layer that needs them asks.

Layers come in the order of the last sweep, so the layer that follows is known, and the experts that it used of the last
batch of this size are those that it is likely to use again. Copies are queued when a layer has been launched and cross
the link while attention of the next layer runs; how long that was the last two times is the lead by which `split` mode
decides how many experts are worth a copy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from ktransformers.place.dispatch import COPYING, Dispatcher, PlacedLayer
from ktransformers.place.gpu.executor import GpuExecutor
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.plan.modes import MAX_DECODE_TOKENS, SPLIT, STREAM, size_bucket
from ktransformers.plan.split import split

MIN_ROWS_PER_EXPERT = 4  # on average: from here on the next batch uses the same experts

Position = tuple[int, str]  # layer and pass: forward, recompute or backward


class Prefetcher:
    """Of all layers of one engine."""

    def __init__(self, dispatcher: Dispatcher, executor: GpuExecutor) -> None:
        self._dispatcher, self._executor = dispatcher, executor
        self._cache: ExpertCache = executor.cache
        self._next: dict[Position, Position] = {}
        self._previous: Position | None = None
        self._queued_at = 0.0  # when the link could begin with copies for the next layer
        self._leads: dict[Position, tuple[float, float]] = {}  # seconds from then until it asked, the last two times

    def layer_asks(self, position: Position, tokens: int) -> None:
        """A layer is about to be divided in a forward pass: how long ago could its copies begin?"""
        if tokens > MAX_DECODE_TOKENS and self._queued_at and self._next.get(self._previous or (-1, "")) == position:
            lead = max(0.0, time.perf_counter() - self._queued_at)
            self._leads[position] = (self._leads.get(position, (lead, lead))[1], lead)

    def layer_launched(
        self,
        layers: Mapping[int, PlacedLayer],
        layer: PlacedLayer,
        pass_name: str,
        tokens: int,
        rows: int,
        training: bool,
    ) -> None:
        """Queue copies for the layer that followed this one in the last sweep."""
        position = (layer.packed.index, pass_name)
        if self._previous is not None:
            self._next[self._previous] = position
        self._previous, self._queued_at = position, max(time.perf_counter(), self._cache.link_free)
        following = self._next.get(position)
        if following is None or rows < MIN_ROWS_PER_EXPERT * len(layer.counts):
            return
        target, mode = layers[following[0]], self._dispatcher.decided_mode(tokens, training)
        last_counts = target.last_counts.get(size_bucket(tokens))
        if last_counts is None or mode not in COPYING or not self._cache.can_copy_directly(target.packed.source):
            return
        last = target.last_split.get(following[1])
        if mode != SPLIT and last is not None and len(last.gpu) == len(last_counts):
            experts = last.streamed  # all of them, regardless of routing
        else:
            costs = target.costs["forward"]  # `stream` takes all experts with tokens, whatever they cost
            residents = self._executor.resident_experts(target.packed.index)
            lead = min(self._leads.get(following, (0.0,)))  # the shorter: a pause between batches is no lead
            how = SPLIT if mode == SPLIT else STREAM
            experts = split(last_counts, tokens, costs, resident=residents, backlog=-lead, mode=how).streamed
        self._cache.fetch(target.packed.index, target.packed.source, sorted(experts[: self._cache.count]))
