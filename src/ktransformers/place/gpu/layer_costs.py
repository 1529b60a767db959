"""Measured costs of one layer on this machine: a few calls on the CPU, a few copies, a few groups on the GPU, once per
geometry.

The CPU's two unknowns, reading an expert and multiplying a row, are solved from two batches, one dominated by reading
and one by multiplying; every other cost is one measurement. The result is cached as JSON under the XDG cache, by CPU,
ISA variant, threads, GPU and geometry.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.experts.backend import ExpertBatch
from ktransformers.experts.store import NO_DROPOUT, ExpertStore
from ktransformers.ground.current_device import on_device
from ktransformers.ground.files import write_json
from ktransformers.ground.pool import default_pool
from ktransformers.place.gpu.executor import GpuExecutor, LayerOnDevice
from ktransformers.plan.calibrate import cache_file
from ktransformers.plan.expert_time import HOST_ROUND_TRIP
from ktransformers.plan.split import Costs

VERSION = 4
SMALL_TOKENS, LARGE_ROWS = 8, 64  # tokens of the small batch, rows per expert of the large one
ROUNDS = 3
CROWDED_TOKENS = 512
MAX_CROWDING = 4.0
READ_BYTES = 1 << 30

Measured = tuple[dict[str, Costs], float]  # costs by direction, and bytes per second of the link


def measured_costs(
    layer: LayerOnDevice, store: ExpertStore, executor: GpuExecutor, *, remeasure: bool = False
) -> Measured:
    """From the cache file, or measured now; the layer's experts are in `store`."""
    file = cache_file(cache_key(layer, store, executor))
    if not remeasure:
        try:
            cached = json.loads(file.read_text())
            return {name: Costs(**values) for name, values in cached["costs"].items()}, float(cached["link_rate"])
        except (OSError, ValueError, TypeError, KeyError):
            pass
    with on_device(executor.device):
        costs, link = _measure(layer, store, executor)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"costs": {name: asdict(value) for name, value in costs.items()}, "link_rate": link})
    except OSError:
        pass  # the next run measures again
    return costs, link


def cache_key(layer: LayerOnDevice, store: ExpertStore, executor: GpuExecutor) -> str:
    """Everything that measured seconds depend on."""
    cpu = _core.machine()["cpu"]
    return f"place {VERSION} {cpu} {store.isa} {store.threads} {_device(executor)} {layer.geometry}"


def _device(executor: GpuExecutor) -> str:
    return torch.cuda.get_device_name(executor.device) if executor.device.type == "cuda" else "cpu"


def _batch(layer: LayerOnDevice, tokens: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, layer.geometry.experts, generator=generator).topk(top_k).indices
    hidden = torch.randn(tokens, layer.geometry.hidden, generator=generator).bfloat16()
    return hidden, ids, torch.full((tokens, top_k), 1 / top_k)


def fastest(call: Callable[[], object], device: torch.device | None = None) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        call()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return best


def _measure(layer: LayerOnDevice, store: ExpertStore, executor: GpuExecutor) -> Measured:
    experts = layer.geometry.experts
    top_k = min(8, experts)
    large = min(4096, max(SMALL_TOKENS, LARGE_ROWS * experts // top_k))
    batches = [_batch(layer, tokens, top_k) for tokens in (SMALL_TOKENS, large)]
    link = link_rate(layer, executor)
    gpu_call, gpu_expert, gpu_row = _gpu(layer, executor, batches[1])
    memory = layer.geometry.expert_bytes / memory_rate()
    token = 2 * 2 * layer.geometry.hidden / link
    by_direction = {}
    for direction, times in (("forward", 1), ("backward", 3)):
        reading, row = _cpu(store, batches, direction)
        by_direction[direction] = Costs(
            cpu_call=HOST_ROUND_TRIP,
            cpu_token=token * (1 if direction == "forward" else 2),
            cpu_expert=reading,
            cpu_row=row,
            link_expert=layer.geometry.expert_bytes / link,
            memory_expert=memory,
            gpu_call=gpu_call * (1 if times == 1 else 2),
            gpu_expert=gpu_expert,
            gpu_row=gpu_row * times,  # recomputed gate and up, and two products
        )
    crowding = _crowding(layer, store, executor, by_direction["forward"])
    return {name: replace(costs, crowding=crowding) for name, costs in by_direction.items()}, link


def _cpu(store: ExpertStore, batches: list[tuple[Tensor, Tensor, Tensor]], direction: str) -> tuple[float, float]:
    """Seconds per expert and per row that explain both batches."""
    measurements = []
    for hidden, ids, weights in batches:
        if direction == "forward":
            taken = fastest(lambda h=hidden, i=ids, w=weights: store.forward(h, i, w))  # type: ignore[misc]
        else:
            taken = fastest(lambda h=hidden, i=ids, w=weights: store.backward(h, h, i, w))  # type: ignore[misc]
        measurements.append((len(set(ids.flatten().tolist())), ids.numel(), taken))
    power = Costs.sum
    (few, few_rows, short), (many, many_rows, long) = measurements
    expert, row = short / few, long / many_rows
    for _ in range(20):
        expert = max(short**power - (few_rows * row) ** power, (0.1 * short) ** power) ** (1 / power) / few
        row = max(long**power - (many * expert) ** power, (0.05 * long) ** power) ** (1 / power) / many_rows
    return expert, row


def _crowding(layer: LayerOnDevice, store: ExpertStore, executor: GpuExecutor, costs: Costs) -> float:
    """Time of half of the experts on the CPU while the other half is copied to the GPU, over its prediction."""
    experts, cache = layer.geometry.experts, executor.cache
    half = max(1, experts // 2)
    copied = list(range(min(half, cache.count)))
    if executor.device.type != "cuda" or half == experts:
        return 1.0
    hidden, ids, weights = _batch(layer, CROWDED_TOKENS, min(8, experts))
    skip = torch.arange(experts) < half
    rows = int((~skip[ids]).sum())
    seconds = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize(executor.device)
        for _ in range(2):  # so that copies outlast the CPU
            cache.evict_layer(layer.index)
            cache.fetch(layer.index, layer.source, copied)
        begun = time.perf_counter()
        store.forward(hidden, ids, weights, skip=skip)
        seconds.append(time.perf_counter() - begun)
    cache.wait_for_copies(range(cache.count))
    torch.cuda.synchronize(executor.device)
    cache.evict_layer(layer.index)
    ratio = min(seconds[1:]) / costs.cpu_work(experts - half, rows, beside_copies=True)
    return min(MAX_CROWDING, max(1 / MAX_CROWDING, ratio))


def memory_rate() -> float:
    """Bytes per second read from DRAM, far beyond any cache."""
    pool = default_pool()
    return pool.rate("read", 0.05, bytes=READ_BYTES // pool.threads)


def link_rate(layer: LayerOnDevice, executor: GpuExecutor) -> float:
    cache = executor.cache
    count = max(1, min(cache.count, layer.geometry.experts, (256 << 20) // layer.geometry.expert_bytes))

    def copy() -> None:
        cache.evict_layer(layer.index)
        cache.fetch(layer.index, layer.source, list(range(count)))
        cache.wait_for_copies(range(cache.count))

    copy()
    taken = fastest(copy, executor.device)
    cache.evict_layer(layer.index)
    return count * layer.geometry.expert_bytes / taken


def _gpu(
    layer: LayerOnDevice, executor: GpuExecutor, batch: tuple[Tensor, Tensor, Tensor]
) -> tuple[float, float, float]:
    """Seconds of a call, per expert and per row: one expert, more experts, more rows."""
    experts = list(range(max(1, min(executor.cache.count, layer.geometry.experts, 16))))
    executor.cache.fetch(layer.index, layer.source, experts)

    def seconds(wanted: list[int], tokens: int) -> float:
        ids = torch.tensor(wanted, dtype=torch.int64).repeat(-(-tokens // len(wanted)))[:tokens, None]
        hidden = batch[0][:1].expand(tokens, -1).contiguous()
        device_batch = ExpertBatch(
            hidden.to(executor.device),
            ids.to(executor.device),
            torch.ones(tokens, 1).to(executor.device),
            None,
            NO_DROPOUT,
        )
        counts = np.bincount(ids.numpy().reshape(-1), minlength=layer.geometry.experts)
        executor.forward(layer, device_batch, wanted, counts)
        return fastest(lambda: executor.forward(layer, device_batch, wanted, counts), executor.device)

    one, many = seconds(experts[:1], 16), seconds(experts, 16 * len(experts))
    rows = 512 * len(experts)
    full = seconds(experts, rows)
    executor.cache.evict_layer(layer.index)
    per_expert = max(0.0, many - one) / max(1, len(experts) - 1)
    return one, per_expert, max(0.0, full - many) / rows
