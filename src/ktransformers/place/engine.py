"""One batch through one layer of experts, computed by GPU and CPU together.

Hidden states `[T, H]`, expert ids and routing weights `[T, k]` are on the device. The dispatcher (`place/dispatch.py`)
names the mode. In most modes the ids are copied to the host and counted, and the experts are divided; the CPU's share
starts in a worker thread (the core runs without the GIL) as soon as its hidden states are on the host, while this
thread queues copies, dequantisation and products for the device. The results meet at the end; then copies for the next
layer are queued (`place/prefetch.py`). In mode `stream_all` the host does not wait for the ids, they are counted later;
a few tokens may go through host callbacks instead (`place/host_callback.py`).

What autograd keeps has the same shapes however a batch is divided, because recomputation under activation checkpointing
is compared with the first pass by shapes.
"""

from __future__ import annotations

import threading
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
from ktransformers.experts.backend import ExpertBatch
from ktransformers.experts.lora import LoraPrefetch, empty_gradients, match_factor_strides, packed_adapter
from ktransformers.experts.transfer import DeviceToHost, start_device_to_host
from ktransformers.ground.current_device import on_device
from ktransformers.ground.pool import avoid_pool_cpus
from ktransformers.place.dispatch import Dispatcher, PlacedLayer
from ktransformers.place.gpu.device_lora import PendingCopies, start_to_host
from ktransformers.place.gpu.executor import GpuExecutor
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.gpu.zero_copy import ZeroCopyReader
from ktransformers.place.host_callback import HostCallbackPath
from ktransformers.place.prefetch import Prefetcher
from ktransformers.plan.memory import ENGINE_LIMITS
from ktransformers.plan.modes import CPU, HOST_CALLBACK, MAX_DECODE_TOKENS, RESIDENT, SPLIT, STREAM_ALL, size_bucket
from ktransformers.plan.split import Split

Result = TypeVar("Result")


@dataclass(frozen=True)
class SavedForBackward:
    ids: Tensor  # host memory; written by a copy that may still be under way until `count_pending` has waited for it
    keep: Tensor  # gate and up of the core, or empty; written where the CPU computed every expert
    cpu: Tensor  # bool [E]: experts that the CPU computed


class ExpertEngine:
    """All layers of one geometry on one device."""

    def __init__(self, device: torch.device, policy: str, cache: ExpertCache) -> None:
        self.device, self.cache = device, cache
        self.executor = GpuExecutor(device, cache)
        if policy == SPLIT:
            self.executor.whole_layer_bytes = ENGINE_LIMITS.split_layer_bytes
        self.dispatcher = Dispatcher(policy, self.executor)
        self.callbacks = HostCallbackPath(device, self.executor)
        self.layers: dict[int, PlacedLayer] = {}
        self._prefetcher = Prefetcher(self.dispatcher, self.executor)
        self._reader = ZeroCopyReader(device)
        self._worker = ThreadPoolExecutor(1, "kt-experts", initializer=avoid_pool_cpus)
        weakref.finalize(self, self._worker.shutdown, wait=False)
        self._lora_prefetch = LoraPrefetch(self._worker)
        self._lock = threading.RLock()
        self._uncounted: deque[tuple[PlacedLayer, DeviceToHost]] = deque()  # ids that the host has not waited for

    # Counts of routed rows.

    def count_pending(self, wait: bool = True) -> None:
        """Count the rows of passes whose ids the host did not wait for."""
        with self._lock:
            while self._uncounted and (wait or self._uncounted[0][1].ready()):
                layer, copy = self._uncounted.popleft()
                self._count(layer, copy.finish()[0])

    def _count(self, layer: PlacedLayer, ids: Tensor) -> NDArray[np.int64]:
        counts = count(ids, layer.packed.geometry.experts)
        layer.counts += counts
        layer.last_counts[size_bucket(ids.shape[0])] = counts
        return counts

    def counts(self, layer: PlacedLayer) -> NDArray[np.int64]:
        """Rows of each expert so far."""
        with self._lock:
            self.count_pending()
            return layer.counts.copy()

    # Passes.

    def forward(self, layer: PlacedLayer, batch: ExpertBatch, retain: bool) -> tuple[Tensor, SavedForBackward]:
        """The result in hidden's dtype, and what backward needs; with `retain` the CPU keeps gate and up."""
        with self._lock, on_device(self.device):
            mode = self._without_callbacks(layer, self.dispatcher.mode(layer, batch, training=True))
            return self._forward(layer, batch, retain, mode, True)

    def infer(self, layer: PlacedLayer, batch: ExpertBatch) -> Tensor:
        """The result alone."""
        with self._lock, on_device(self.device):
            mode = self._inference_mode(layer, batch)
            if mode == HOST_CALLBACK:
                return self.callbacks.forward(layer.packed, layer.store, batch)
            return self._forward(layer, batch, False, mode, False)[0]

    def _inference_mode(self, layer: PlacedLayer, batch: ExpertBatch) -> str:
        """A capture has no choice: host callbacks are the path that a CUDA graph can hold. Where a batch of this size
        may be captured later, its first call goes that way too, because it allocates what a graph needs."""
        mode = self.dispatcher.mode(layer, batch, training=False)
        if self.callbacks.capturing:
            self.callbacks.check(layer.packed, batch, self.dispatcher.policy_of(batch.ids.shape[0]))
            return HOST_CALLBACK
        if batch.ids.shape[0] > MAX_DECODE_TOKENS or self.callbacks.refusal(layer.packed, batch, mode):
            return self._without_callbacks(layer, mode)
        return mode if self.callbacks.is_prepared(layer.packed, batch) else HOST_CALLBACK

    def _without_callbacks(self, layer: PlacedLayer, mode: str) -> str:
        """Host callbacks exist for a few tokens without gradients; other passes divide the experts in the same way."""
        if mode != HOST_CALLBACK:
            return mode
        return RESIDENT if self.executor.resident_experts(layer.packed.index) else CPU

    def _forward(
        self, layer: PlacedLayer, batch: ExpertBatch, retain: bool, mode: str, training: bool
    ) -> tuple[Tensor, SavedForBackward]:
        self.count_pending(wait=mode != STREAM_ALL)
        # A forward pass inside of a backward pass recomputes under activation checkpointing.
        name = "recompute" if training and torch._C._current_graph_task_id() != -1 else "forward"
        tokens = batch.ids.shape[0]
        together = mode == CPU and tokens <= MAX_DECODE_TOKENS  # one copy: the CPU computes whatever the ids are
        copy = start_device_to_host((batch.ids, batch.hidden, batch.weights) if together else (batch.ids,))
        counts = None
        if mode == STREAM_ALL:
            ids, division = copy.targets[0], self.dispatcher.all_on_gpu(layer)
            self._uncounted.append((layer, copy))
        else:
            ids = copy.finish()[0]
            counts = self._count(layer, ids)
            self._prefetcher.layer_asks((layer.packed.index, name), tokens)
            division = self.dispatcher.split(layer, counts, tokens, "forward", mode)
        layer.last_split[name] = division
        keeps = retain and self.dispatcher.decided_mode(tokens, training) in (CPU, RESIDENT, HOST_CALLBACK)
        keep = layer.store.new_keep(*ids.shape) if keeps else ids.new_empty(0, dtype=torch.uint8)
        cpu = mask(division.cpu, layer.packed.geometry.experts)
        cpu_share = None
        if division.cpu:
            rows = copy if together else start_device_to_host((batch.hidden, batch.weights))
            cpu_share = self._cpu_forward(layer, batch, rows, ids, division, cpu, keep[:0] if division.gpu else keep)
        gpu_share = self.executor.forward(layer.packed, batch, division.gpu, counts) if division.gpu else None
        self._prefetch_next(layer, name, batch, training)
        if gpu_share is not None:
            if cpu_share is not None:
                self._reader.add(cpu_share(), gpu_share)
            result = gpu_share.to(batch.hidden.dtype)
            self.executor.record_finished()
        elif cpu_share is not None:
            result = self._reader.pull(cpu_share())
        else:  # no token goes to any expert
            result = torch.zeros_like(batch.hidden)
        if cpu_share is not None and batch.lora is not None:
            self._lora_prefetch.layer_done(layer.store)
        return result, SavedForBackward(ids, keep, cpu)

    def _prefetch_next(self, layer: PlacedLayer, name: str, batch: ExpertBatch, training: bool) -> None:
        tokens, rows = batch.ids.shape[0], batch.ids.numel()
        self._prefetcher.layer_launched(self.layers, layer, name, tokens, rows, training)

    def backward(
        self, layer: PlacedLayer, batch: ExpertBatch, grad_out: Tensor, saved: SavedForBackward, factor_grads: bool
    ) -> tuple[Tensor, Tensor, list[Tensor], PendingCopies | None]:
        """Gradients of hidden, of the routing weights and, with `factor_grads`, of the LoRA factors in host memory,
        whose copies the caller finishes before it reads them."""
        with self._lock, on_device(self.device):
            return self._backward(layer, batch, grad_out, saved, factor_grads and batch.lora is not None)

    def _backward(
        self, layer: PlacedLayer, batch: ExpertBatch, grad_out: Tensor, saved: SavedForBackward, factor_grads: bool
    ) -> tuple[Tensor, Tensor, list[Tensor], PendingCopies | None]:
        mode, counts = self.dispatcher.mode(layer, batch, training=True, factor_grads=factor_grads), None
        mode = self._without_callbacks(layer, mode)
        self.count_pending(wait=mode != STREAM_ALL)
        if mode == STREAM_ALL:
            division = self.dispatcher.all_on_gpu(layer)
        else:
            counts, tokens = count(saved.ids, layer.packed.geometry.experts), saved.ids.shape[0]
            division = self.dispatcher.split(layer, counts, tokens, "backward", mode)
        layer.last_split["backward"] = division
        cpu = mask(division.cpu, layer.packed.geometry.experts)
        if division.gpu or not torch.equal(cpu, saved.cpu):  # rows are kept in the order of one division
            saved = replace(saved, keep=saved.keep[:0])
        grads: list[Tensor] = []
        views: Sequence[Tensor | None] = ()
        cpu_share = None
        if division.cpu:
            if factor_grads and batch.lora is not None:
                grads, views = empty_gradients(batch.lora, pinned=self.device.type == "cuda")
            cpu_share = self._cpu_backward(layer, batch, grad_out, saved, division, cpu, views)
        grad_hidden = grad_weights = None
        device_grads: list[Tensor] = []
        if division.gpu:
            grad_hidden, grad_weights, device_grads = self.executor.backward(
                layer.packed, batch, grad_out, division.gpu, counts, factor_grads
            )
        pending = start_to_host(device_grads) if device_grads and cpu_share is None else None
        self._prefetch_next(layer, "backward", batch, True)
        if cpu_share is not None:
            cpu_hidden, cpu_weights = cpu_share()
            if grad_hidden is None or grad_weights is None:
                grad_hidden, grad_weights = self._reader.pull(cpu_hidden), self._reader.pull(cpu_weights)
            else:
                self._reader.add(cpu_hidden, grad_hidden)
                self._reader.add(cpu_weights, grad_weights)
            if device_grads:
                for on_device, on_host in zip(device_grads, grads, strict=False):
                    self._reader.add(on_host, on_device)
                pending = start_to_host(device_grads)
        if grad_hidden is None or grad_weights is None:  # no token goes to any expert
            grad_hidden, grad_weights = torch.zeros_like(batch.hidden), torch.zeros_like(batch.weights)
        results = grad_hidden.to(batch.hidden.dtype), grad_weights.to(batch.weights.dtype)
        self.executor.record_finished()
        if pending is not None:
            grads = pending.tensors
        elif grads and batch.lora is not None:
            grads = match_factor_strides(layer.store, batch.lora, grads)
        elif factor_grads and batch.lora is not None:
            grads = [torch.zeros_like(tensor) for tensor in batch.lora.tensors]
        return *results, grads, pending

    # The CPU's share: tensors in host memory.

    def _cpu_forward(
        self,
        layer: PlacedLayer,
        batch: ExpertBatch,
        rows: DeviceToHost,
        ids: Tensor,
        division: Split,
        cpu: Tensor,
        keep: Tensor,
    ) -> Callable[[], Tensor]:
        hidden, weights = rows.finish()[-2:]
        out = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=self.device.type == "cuda")

        def compute() -> Tensor:
            return layer.store.forward(
                hidden,
                ids,
                weights,
                skip=~cpu,
                out=out,
                keep=keep if keep.numel() else None,
                dropout=batch.dropout,
                needs_grad=batch.needs_grad,
                adapter=None if batch.mixed is None else batch.mixed.rows,
                adapters=_adapters(layer, batch) if batch.mixed is None else batch.mixed.adapters,
            )

        return self._start(division, compute)

    def _cpu_backward(
        self,
        layer: PlacedLayer,
        batch: ExpertBatch,
        grad_out: Tensor,
        saved: SavedForBackward,
        division: Split,
        cpu: Tensor,
        factor_grads: Sequence[Tensor | None],
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        host_grad_out, weights, hidden = start_device_to_host((grad_out, batch.weights, batch.hidden)).finish()

        def compute() -> tuple[Tensor, Tensor]:
            return layer.store.backward(
                host_grad_out,
                hidden,
                saved.ids,
                weights,
                skip=~cpu,
                keep=saved.keep if saved.keep.numel() else None,
                adapters=_adapters(layer, batch),
                factors=[factor_grads] if factor_grads else None,
                dropout=batch.dropout,
            )

        return self._start(division, compute)

    def _start(self, division: Split, compute: Callable[[], Result]) -> Callable[[], Result]:
        """A function that waits for the CPU's share. Where the GPU has a share too, the CPU is at work when this
        returns (until its thread has begun it needs the GIL); where it has none, this thread computes when it is
        called."""
        if not division.gpu:
            return compute
        begun = threading.Event()

        def work() -> Result:
            begun.set()
            return compute()

        future = self._worker.submit(work)
        begun.wait()
        return future.result


def _adapters(layer: PlacedLayer, batch: ExpertBatch) -> list[_core.Adapter]:
    return [] if batch.lora is None else [packed_adapter(layer.store, batch.lora)]


def count(ids: Tensor, experts: int) -> NDArray[np.int64]:
    """Rows of each expert; ids out of range count nowhere."""
    numbers = ids.numpy().reshape(-1)
    if len(numbers) and numbers.view(f"u{numbers.itemsize}").max() >= experts:  # -1 is large as unsigned
        numbers = numbers[(numbers >= 0) & (numbers < experts)]
    return np.bincount(numbers, minlength=experts)


def mask(experts: Sequence[int], count: int) -> Tensor:
    chosen = np.zeros(count, bool)
    chosen[list(experts)] = True
    return torch.from_numpy(chosen)
