"""Seconds of a layer in each mode, timed when a placement is attached, for modes of passes without gradients that the
cost model cannot tell apart. Training is not timed: layers of experts alone say little about a step (`plan/modes.py`).

A sweep passes a random batch with even routing forward through a few layers. The first sweeps allocate buffers and
capture CUDA graphs; the median of the others counts. Results are cached beside the calibrated costs, by machine,
geometry, residents, batch size and mode, so that the next run decides the same without timing anything.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ktransformers.experts.store import NO_DROPOUT
from ktransformers.ground import log
from ktransformers.ground.files import write_json
from ktransformers.ground.progress import counted
from ktransformers.place.engine import ExpertEngine
from ktransformers.place.gpu.executor import ExpertBatch
from ktransformers.place.gpu.layer_costs import cache_key
from ktransformers.plan.calibrate import cache_file
from ktransformers.plan.modes import MAX_DECODE_TOKENS, pass_kind, size_bucket

LAYERS = 4  # of a sweep: more than the cache of streamed experts holds
ROUTINGS = 6  # of a few tokens: a model routes each step differently, so no expert is found in a cache
WARM_SWEEPS, TIMED_SWEEPS = 4, 3  # at least; graphs are captured in the third
WARM_SECONDS, TIMED_SECONDS = 0.15, 0.05  # at least: the shorter a layer, the more sweeps, up to MAX_SWEEPS
MAX_SWEEPS = 60

_log = log.logger(__name__)


def tune(engine: ExpertEngine, sizes: Sequence[int]) -> None:
    """Decide the modes of these batch sizes; nothing happens for a policy other than `auto`, or without a GPU."""
    dispatcher = engine.dispatcher
    if dispatcher.policy != "auto" or engine.device.type != "cuda" or not engine.layers:
        return
    layer = engine.layers[0]
    key = f"{cache_key(layer.packed, layer.store, engine.executor)} {dispatcher.residents_per_layer} {dispatcher.top_k}"
    file = cache_file(f"modes {key}")
    timed = _read(file)
    for tokens in {size_bucket(tokens): tokens for tokens in sorted(sizes)}.values():
        modes = dispatcher.modes_to_time(tokens)
        if len(modes) < 2:
            continue
        name = f"{pass_kind(tokens, training=False)} {size_bucket(tokens)}"
        seconds = timed.setdefault(name, {})
        missing = [mode for mode in modes if mode not in seconds]
        for mode in counted(f"Timing modes at {tokens} tokens", missing):
            seconds[mode] = time_mode(engine, mode, tokens)
        dispatcher.set_timed(tokens, {mode: seconds[mode] for mode in modes})
        _log.debug("%d tokens: %s", tokens, dispatcher.decision(tokens, training=False).reason)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, timed)
    except OSError:
        pass  # timed again by the next run


def _read(file: Path) -> dict[str, dict[str, float]]:
    try:
        document = json.loads(file.read_text())
        return {name: {mode: float(value) for mode, value in row.items()} for name, row in document.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def time_mode(engine: ExpertEngine, mode: str, tokens: int) -> float:
    """Seconds of a layer."""
    layers = [engine.layers[index] for index in sorted(engine.layers)[:LAYERS]]
    counts = [layer.counts.copy() for layer in layers]
    batches = [_batch(engine, tokens, seed) for seed in range(ROUTINGS if tokens <= MAX_DECODE_TOKENS else 1)]

    def sweep(number: int) -> None:
        batch = batches[number % len(batches)]
        for layer in layers:
            if tokens <= MAX_DECODE_TOKENS:
                engine.cache.evict_layer(layer.packed.index)
            engine.infer(layer, batch)

    engine.dispatcher.forced = mode
    try:
        with torch.no_grad():
            _timed_sweeps(engine, sweep, WARM_SWEEPS, WARM_SECONDS)
            seconds = _timed_sweeps(engine, sweep, TIMED_SWEEPS, TIMED_SECONDS)
    finally:
        engine.dispatcher.forced = None
        engine.count_pending()
        engine.callbacks.drop_counts()
        for layer, before in zip(layers, counts, strict=True):  # random routing is no statistic
            layer.counts[:] = before
            layer.last_counts.clear()
            layer.last_split.clear()
    return statistics.median(seconds) / len(layers)


def _timed_sweeps(
    engine: ExpertEngine, sweep: Callable[[int], None], min_sweeps: int, min_seconds: float
) -> list[float]:
    seconds: list[float] = []
    while len(seconds) < min_sweeps or (sum(seconds) < min_seconds and len(seconds) < MAX_SWEEPS):
        torch.cuda.synchronize(engine.device)
        begun = time.perf_counter()
        sweep(len(seconds))
        torch.cuda.synchronize(engine.device)
        seconds.append(time.perf_counter() - begun)
    return seconds


def _batch(engine: ExpertEngine, tokens: int, seed: int) -> ExpertBatch:
    geometry, top_k = engine.executor.geometry, engine.dispatcher.top_k
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, geometry.experts, generator=generator).topk(top_k).indices
    hidden = torch.randn(tokens, geometry.hidden, generator=generator).bfloat16()
    weights = torch.full((tokens, top_k), 1 / top_k)
    device = engine.device
    return ExpertBatch(hidden.to(device), ids.to(device), weights.to(device), None, NO_DROPOUT)
