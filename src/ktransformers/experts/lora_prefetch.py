"""Prefetch of LoRA packing: after a layer has run, a background thread packs the factors of the layer that follows.

An optimiser step changes every layer's factors, so every training step packs each layer's factors again, milliseconds
for which its experts would wait. With attention on a GPU the CPU is idle between two layers, and packing then costs no
time. The following layer is the one that followed in the previous pass. A forward pass that needs factors which are
being packed waits on the cache's lock and does not pack them twice (`experts/lora_factors.py`).
"""

from __future__ import annotations

import weakref
from concurrent.futures import Executor, ThreadPoolExecutor

import torch

from ktransformers.experts.lora_factors import repack_last
from ktransformers.experts.store import ExpertStore
from ktransformers.ground.pool import avoid_pool_cpus


class LoraPrefetch:
    """Learns the order of layers from the forward passes. Without a `worker` it starts a thread of its own."""

    def __init__(self, worker: Executor | None = None) -> None:
        self._worker = worker
        self._previous: weakref.ReferenceType[ExpertStore] | None = None
        self._successors: weakref.WeakKeyDictionary[ExpertStore, weakref.ReferenceType[ExpertStore]]
        self._successors = weakref.WeakKeyDictionary()

    def layer_done(self, store: ExpertStore) -> None:
        """A layer with LoRA has been computed. Recomputation inside a backward pass is ignored: its factors are packed
        already, and its layers run in another order."""
        if torch._C._current_graph_task_id() != -1:
            return
        previous = None if self._previous is None else self._previous()
        if previous is not None and previous is not store:
            self._successors[previous] = weakref.ref(store)
        self._previous = weakref.ref(store)
        successor = self._successors.get(store)
        if successor is not None and (target := successor()) is not None:
            self._executor().submit(repack_last, target)

    def _executor(self) -> Executor:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "kt-pack", initializer=avoid_pool_cpus)
        return self._worker
