"""Which mode a layer runs a batch in, and which experts each side then computes.

The mode is decided once for each kind of pass (decode, prefill, training) and batch size, by the rule of
`plan/modes.py` from costs measured on this machine. Nothing is tried while a model runs, so two runs go the same way. A
fixed policy is the same mode for every pass; only `split` is `stream` in training, because dividing a training step
between CPU and link gained less than its bar on every machine (docs/log.md). Two refinements depend on the batch:
`stream` copies every expert without waiting for ids (`stream_all`) once the last batch of this size used nearly all of
them and the pass is a captured CUDA graph, and a layer whose experts are all resident does likewise."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ktransformers.experts.backend import ExpertBatch
from ktransformers.experts.store import ExpertStore
from ktransformers.place.gpu.executor import GpuExecutor, LayerOnDevice
from ktransformers.plan.modes import (
    CPU,
    DECODE,
    HOST_CALLBACK,
    NEARLY_ALL,
    RESIDENT,
    SPLIT,
    STREAM,
    STREAM_ALL,
    Decision,
    decide,
    even_counts,
    pass_kind,
    predict,
    size_bucket,
)
from ktransformers.plan.split import Costs, Split, split

COPYING = (STREAM, STREAM_ALL, SPLIT)  # modes that copy experts to the GPU


@dataclass
class PlacedLayer:
    packed: LayerOnDevice
    store: ExpertStore
    costs: dict[str, Costs]  # by direction
    counts: NDArray[np.int64]  # rows of each expert, of all forward passes so far
    last_split: dict[str, Split] = field(default_factory=dict)  # by pass
    last_counts: dict[int, NDArray[np.int64]] = field(default_factory=dict)  # rows of experts by size bucket


class Dispatcher:
    """Of all layers of one engine. `threshold`: batches of at least so many tokens stream and smaller ones use
    residents, whatever the policy; 0: none."""

    def __init__(self, policy: str, executor: GpuExecutor) -> None:
        self.policy, self.threshold, self._executor = policy, 0, executor
        self.forced: str | None = None  # mode of every pass, set by benches
        self.costs: dict[str, Costs] = {}
        self.top_k = 1
        self._decisions: dict[tuple[str, int], Decision] = {}

    # The decision.

    def policy_of(self, tokens: int) -> str:
        if self.threshold:
            return STREAM if tokens >= self.threshold else RESIDENT
        return self.policy

    def decided_mode(self, tokens: int, training: bool) -> str:
        """The mode by policy, size and kind of pass alone: the same for every layer and batch of this size."""
        policy = self.forced or self.policy_of(tokens)
        if policy == SPLIT and training:
            return STREAM
        return self.decision(tokens, training).mode if policy == "auto" else policy

    def decision(self, tokens: int, training: bool) -> Decision:
        """Of policy `auto`."""
        kind, bucket = pass_kind(tokens, training), size_bucket(tokens)
        if (kind, bucket) not in self._decisions:
            self._decisions[kind, bucket] = decide(kind, self._predicted(kind, tokens))
        return self._decisions[kind, bucket]

    def _predicted(self, kind: str, tokens: int) -> dict[str, float]:
        counts = even_counts(tokens * self.top_k, self._executor.geometry.experts)
        return predict(kind, self.costs, tokens, counts, self.residents_per_layer, host_callback=kind == "decode")

    @property
    def residents_per_layer(self) -> int:
        """The smallest number of any layer that has some: a mode must do for all of them."""
        return min((cache.count for cache in self._executor.residents.values()), default=0)

    def forget(self) -> None:
        """Residents or costs have changed."""
        self._decisions.clear()

    # One pass.

    def mode(self, layer: PlacedLayer, batch: ExpertBatch, *, training: bool, factor_grads: bool | None = None) -> str:
        """`factor_grads`: of a backward pass, whether LoRA factors get gradients; None: a forward pass."""
        tokens = batch.ids.shape[0]
        if not tokens:
            return CPU
        mode = self.decided_mode(tokens, training)
        residents = self._executor.resident_experts(layer.packed.index)
        decoding = pass_kind(tokens, training) == DECODE
        if mode == RESIDENT and residents and decoding and self.forced is None:
            return HOST_CALLBACK  # the same division, which a CUDA graph can hold
        if mode in (STREAM, RESIDENT, SPLIT) and len(residents) == layer.packed.geometry.experts:
            mode = STREAM_ALL  # nothing is copied
        if mode == STREAM and self._used_nearly_all(layer, tokens):
            mode = STREAM_ALL
        if mode == STREAM_ALL and not self._is_captured(layer, batch, factor_grads):
            mode = STREAM
        return CPU if mode == RESIDENT and not residents else mode

    def split(self, layer: PlacedLayer, counts: NDArray[np.int64], tokens: int, direction: str, mode: str) -> Split:
        """Who computes which expert of a batch whose `counts` [E] are known."""
        costs, index = layer.costs[direction], layer.packed.index
        if mode == CPU:
            return split(counts, tokens, costs, mode=CPU)
        residents = self._executor.resident_experts(index)
        if mode in (RESIDENT, HOST_CALLBACK):
            return split(counts, tokens, costs, resident=residents, mode=RESIDENT)
        cache = self._executor.cache
        queued = cache.in_flight(index)
        on_gpu = residents | (cache.present(index) - frozenset(queued))
        how = STREAM if mode == STREAM_ALL else mode
        return split(counts, tokens, costs, resident=on_gpu, queued=queued, backlog=cache.backlog(), mode=how)

    def all_on_gpu(self, layer: PlacedLayer) -> Split:
        """Every expert on the GPU, with or without tokens."""
        residents, experts = self._executor.resident_experts(layer.packed.index), range(layer.packed.geometry.experts)
        return Split(tuple(sorted(residents)), tuple(e for e in experts if e not in residents), (), 0.0)

    def _is_captured(self, layer: PlacedLayer, batch: ExpertBatch, factor_grads: bool | None) -> bool:
        """Whether the pass with all experts is replayed from a CUDA graph. The first of a size never is: nearly all
        experts must have been used before."""
        known = size_bucket(batch.ids.shape[0]) in layer.last_counts
        return known and self._executor.replays(layer.packed, batch, factor_grads)

    def _used_nearly_all(self, layer: PlacedLayer, tokens: int) -> bool:
        counts = layer.last_counts.get(size_bucket(tokens))
        return counts is not None and bool(np.count_nonzero(counts) >= NEARLY_ALL * len(counts))
