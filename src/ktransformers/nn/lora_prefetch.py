"""LoRA factors packed before they are asked for: those of the layer that came next the last time.

An optimiser changes every layer's factors, so a step packs each layer's anew, milliseconds that its experts would wait
for. Where attention is on a GPU the CPU has nothing to do between two layers, and a thread of its own packs then. Who
asks while it does waits for the end of it and packs nothing twice (`nn/lora_factors.py`).
"""

from __future__ import annotations

import weakref
from concurrent.futures import Executor, ThreadPoolExecutor

import torch

from ktransformers.nn.lora_factors import pack_again
from ktransformers.nn.pool import beside_the_pool
from ktransformers.nn.store import ExpertStore


class LoraPrefetch:
    """One walk over layers, again and again. Without a `worker` of somebody's it has one of its own."""

    def __init__(self, worker: Executor | None = None) -> None:
        self._worker = worker
        self._before: weakref.ReferenceType[ExpertStore] | None = None
        self._after: weakref.WeakKeyDictionary[ExpertStore, weakref.ReferenceType[ExpertStore]]
        self._after = weakref.WeakKeyDictionary()

    def passed(self, store: ExpertStore) -> None:
        """A layer with factors has been computed. What is computed again in a backward pass tells nothing: it finds its
        factors packed, and comes in another order."""
        if torch._C._current_graph_task_id() != -1:
            return
        before = None if self._before is None else self._before()
        if before is not None and before is not store:
            self._after[before] = weakref.ref(store)
        self._before = weakref.ref(store)
        following = self._after.get(store)
        if following is not None and (target := following()) is not None:
            self._start().submit(pack_again, target)

    def _start(self) -> Executor:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "kt-pack", initializer=beside_the_pool)
        return self._worker
