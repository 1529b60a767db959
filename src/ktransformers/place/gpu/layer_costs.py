"""Seconds of one layer here: a few calls on the CPU, a few copies, a few groups on the GPU, once a kind of layer.

The CPU's two unknowns, reading an expert and multiplying a row, come from two batches, one that hardly multiplies and
one that hardly reads; the rest is one measurement each. The result is a JSON file under the XDG cache, by CPU, variant,
threads, GPU and kind of layer.
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
from ktransformers.files import write_json
from ktransformers.nn.pool import default_pool
from ktransformers.nn.store import NO_DROPOUT, ExpertStore
from ktransformers.place.gpu.executor import ExpertBatch, GpuExecutor, LayerOnDevice
from ktransformers.plan.calibrate import cache_file
from ktransformers.plan.split import Costs

VERSION = 4
SMALL, LARGE = 8, 64  # tokens of the one batch, rows of an expert in the other
ROUNDS = 3
CROWDED_TOKENS = 512
MAX_CROWDING = 4.0
CROSSING = 800e-6  # hidden states down, a thread woken, results up, besides their bytes
READ_BYTES = 1 << 30

Measured = tuple[dict[str, Costs], float]  # by direction, and bytes a second of the link


def costs_of(layer: LayerOnDevice, store: ExpertStore, executor: GpuExecutor, *, anew: bool = False) -> Measured:
    """From the cache, or measured now; the layer's experts are in `store`."""
    file = cache_file(cache_key(layer, store, executor))
    if not anew:
        try:
            found = json.loads(file.read_text())
            return {name: Costs(**values) for name, values in found["costs"].items()}, float(found["link_rate"])
        except (OSError, ValueError, TypeError, KeyError):
            pass
    costs, link = _measure(layer, store, executor)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"costs": {name: asdict(value) for name, value in costs.items()}, "link_rate": link})
    except OSError:
        pass  # measured again the next time, nothing else
    return costs, link


def cache_key(layer: LayerOnDevice, store: ExpertStore, executor: GpuExecutor) -> str:
    """What measured seconds depend on."""
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
    large = min(4096, max(SMALL, LARGE * experts // top_k))
    batches = [_batch(layer, tokens, top_k) for tokens in (SMALL, large)]
    link = link_rate(layer, executor)
    gpu_call, gpu_expert, gpu_row = _gpu(layer, executor, batches[1])
    memory = layer.geometry.expert_bytes / memory_rate()
    token = 2 * 2 * layer.geometry.hidden / link
    found = {}
    for direction, times in (("forward", 1), ("backward", 3)):
        reading, row = _cpu(store, batches, direction)
        found[direction] = Costs(
            cpu_call=CROSSING,
            cpu_token=token * (1 if direction == "forward" else 2),
            cpu_expert=reading,
            cpu_row=row,
            link_expert=layer.geometry.expert_bytes / link,
            memory_expert=memory,
            gpu_call=gpu_call * (1 if times == 1 else 2),
            gpu_expert=gpu_expert,
            gpu_row=gpu_row * times,  # gate and up again, and two products back
        )
    crowding = _crowding(layer, store, executor, found["forward"])
    found = {direction: replace(costs, crowding=crowding) for direction, costs in found.items()}
    return found, link


def _cpu(store: ExpertStore, batches: list[tuple[Tensor, Tensor, Tensor]], direction: str) -> tuple[float, float]:
    """Seconds of an expert and of a row that explain both batches."""
    seen = []
    for hidden, ids, weights in batches:
        if direction == "forward":
            taken = fastest(lambda h=hidden, i=ids, w=weights: store.forward(h, i, w))  # type: ignore[misc]
        else:
            taken = fastest(lambda h=hidden, i=ids, w=weights: store.backward(h, h, i, w))  # type: ignore[misc]
        seen.append((len(set(ids.flatten().tolist())), ids.numel(), taken))
    power = Costs.sum
    (few, few_rows, short), (many, many_rows, long) = seen
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
            cache.forget(layer.index)
            cache.fetch(layer.index, layer.source, copied)
        begun = time.perf_counter()
        store.forward(hidden, ids, weights, skip=skip)
        seconds.append(time.perf_counter() - begun)
    cache.await_ready(range(cache.count))
    torch.cuda.synchronize(executor.device)
    cache.forget(layer.index)
    ratio = min(seconds[1:]) / costs.cpu_work(experts - half, rows, beside_copies=True)
    return min(MAX_CROWDING, max(1 / MAX_CROWDING, ratio))


def memory_rate() -> float:
    """Bytes a second out of memory, far beyond any cache."""
    pool = default_pool()
    return pool.rate("read", 0.05, bytes=READ_BYTES // pool.threads)


def link_rate(layer: LayerOnDevice, executor: GpuExecutor) -> float:
    slots = executor.cache
    count = max(1, min(slots.count, layer.geometry.experts, (256 << 20) // layer.geometry.expert_bytes))

    def copy() -> None:
        slots.forget(layer.index)
        slots.fetch(layer.index, layer.source, list(range(count)))
        slots.await_ready(range(slots.count))

    copy()
    taken = fastest(copy, executor.device)
    slots.forget(layer.index)
    return count * layer.geometry.expert_bytes / taken


def _gpu(
    layer: LayerOnDevice, executor: GpuExecutor, batch: tuple[Tensor, Tensor, Tensor]
) -> tuple[float, float, float]:
    """A call of one expert, then more experts, then more rows."""
    experts = list(range(max(1, min(executor.cache.count, layer.geometry.experts, 16))))
    executor.cache.fetch(layer.index, layer.source, experts)

    def seconds(chosen: list[int], tokens: int) -> float:
        ids = torch.tensor(chosen, dtype=torch.int64).repeat(-(-tokens // len(chosen)))[:tokens, None]
        hidden = batch[0][:1].expand(tokens, -1).contiguous()
        on = ExpertBatch(
            hidden.to(executor.device),
            ids.to(executor.device),
            torch.ones(tokens, 1).to(executor.device),
            None,
            NO_DROPOUT,
        )
        counts = np.bincount(ids.numpy().reshape(-1), minlength=layer.geometry.experts)
        executor.forward(layer, on, chosen, counts)
        return fastest(lambda: executor.forward(layer, on, chosen, counts), executor.device)

    one, several = seconds(experts[:1], 16), seconds(experts, 16 * len(experts))
    rows = 512 * len(experts)
    full = seconds(experts, rows)
    executor.cache.forget(layer.index)
    each = max(0.0, several - one) / max(1, len(experts) - 1)
    return one, each, max(0.0, full - several) / rows
