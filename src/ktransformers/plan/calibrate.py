"""Rates of this machine: a few seconds of bare loops and of one real layer, measured once and cached.

The cache is one JSON file per CPU, ISA variant and thread count under the XDG cache, written atomically. Bare loops
give the peak rates (`_core.Pool.rate`); a layer of 16 experts, forward and backward, gives the share of them that its
kernels reach, with many tokens, so that reading the weights hardly counts. The time that Python takes to launch a layer
is scaled by the speed of a Python loop. Rates are those of a machine without other programs: the kernel counts how long
threads waited for a core, and that time is left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ktransformers.ground import system
from ktransformers.ground.files import write_json
from ktransformers.plan.machine import CpuRates, GpuRates, Machine, gpu_rows

if TYPE_CHECKING:
    from ktransformers import _core

VERSION = 3  # of the cache file; older files are measured again
LOOP_SECONDS = 0.2  # of one bare loop
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 512, 256, 16, 4  # of the layer
LAYER_SECONDS = 0.15  # of one pass through it, approximately


@dataclass(frozen=True)
class Rates:
    version: int
    cpu: str
    isa: str
    threads: int
    nodes: int
    tile_flops: float
    read_bytes: float
    dense_flops: float
    dense_flops_f32: float
    forward_share: float
    backward_share: float
    python_seconds: float  # `system.python_loop_seconds`


def cache_file(key: str) -> Path:
    root = os.environ.get("XDG_CACHE_HOME", "").strip() or str(Path.home() / ".cache")
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return Path(root) / "ktransformers" / f"machine-{digest}.json"


def calibrate(*, remeasure: bool = False) -> Rates:
    """From the cache, or measured now, on the cores of this process."""
    from ktransformers import _core

    if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":  # one of several ranks; importing nn takes seconds
        from ktransformers.ground.rank_cores import bind_rank_cores

        bind_rank_cores()
    machine, pool = _core.machine(), _core.Pool()
    isa, file = _core.isa(), _file_of(pool)
    if not remeasure and (cached := _read(file)) is not None:
        return cached
    from ktransformers.ground.pool import limit_torch_threads

    limit_torch_threads()
    tile, read = (_running_rate(partial(pool.rate, loop, LOOP_SECONDS)) for loop in ("panels", "read"))
    forward, backward = _layer_shares(pool, tile)
    rates = Rates(
        version=VERSION,
        cpu=machine["cpu"],
        isa=isa,
        threads=pool.threads,
        nodes=pool.groups,
        tile_flops=tile,
        read_bytes=read,
        dense_flops=_dense_rate("bfloat16"),
        dense_flops_f32=_dense_rate("float32"),
        forward_share=forward,
        backward_share=backward,
        python_seconds=system.python_loop_seconds(),
    )
    _write(file, rates)
    return rates


def is_calibrated() -> bool:
    """Whether this machine was measured before."""
    from ktransformers import _core

    return _read(_file_of(_core.Pool())) is not None


def _file_of(pool: _core.Pool) -> Path:
    from ktransformers import _core

    machine = _core.machine()
    return cache_file(f"{machine['cpu']} {machine['cpus']} {machine['l2']} {_core.isa()} {pool.threads}")


def remeasure_rates() -> Rates:
    """Measure the bare loops again, half a second, and keep the faster rates. Called when a layer ran faster than the
    cached rates allow, which means that these were measured on a busy machine. The layer's shares are kept, because it
    was slowed as much as the loops."""
    from ktransformers import _core

    before, pool = calibrate(), _core.Pool()
    loops = (partial(pool.rate, loop, LOOP_SECONDS) for loop in ("panels", "read"))
    tile, read = (max(_running_rate(loop) for _ in range(2)) for loop in loops)
    faster = replace(before, tile_flops=max(tile, before.tile_flops), read_bytes=max(read, before.read_bytes))
    if faster != before:
        _write(_file_of(pool), faster)
    return faster


def _read(file: Path) -> Rates | None:
    try:
        rates = Rates(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return rates if rates.version == VERSION else None


def _write(file: Path, rates: Rates) -> None:
    """If the cache cannot be written, the next run measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, asdict(rates))
    except OSError:
        return


def _running_rate(measure: Callable[[], float]) -> float:
    """A rate by the clock, as it would be if the threads of this process had not waited for a core. Under a limit of
    CPU time, as containers have, threads wait for their own limit, which stays."""
    from ktransformers import _core

    before = system.scheduled_seconds()
    rate = measure()
    ran, waited = (now - then for now, then in zip(system.scheduled_seconds(), before, strict=True))
    return rate * (ran + max(0.0, waited)) / ran if ran > 0 and not _core.machine()["quota"] else rate


def _running_seconds(call: Callable[[], object], rounds: int = 3) -> float:
    """Mean seconds of a call after a first one, without those in which the threads waited for a core."""
    call()

    def calls_per_second() -> float:
        begun = time.perf_counter()
        for _ in range(rounds):
            call()
        return rounds / (time.perf_counter() - begun)

    return 1 / _running_rate(calls_per_second)


def _layer_shares(pool: object, tile: float) -> tuple[float, float]:
    """Share of the tile loop that forward and backward of a real layer reach."""
    import torch

    from ktransformers.experts.store import ExpertStore

    generator = torch.Generator().manual_seed(0)
    row = 2 * 3 * HIDDEN * INTERMEDIATE * TOP_K
    tokens = max(64, min(16384, int(LAYER_SECONDS * tile / row)))
    store = ExpertStore(EXPERTS, HIDDEN, INTERMEDIATE, pool=pool)  # type: ignore[arg-type]
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator).mul_(HIDDEN**-0.5).bfloat16()
    store.pack(gate_up=gate_up, down=gate_up.view(EXPERTS, HIDDEN, 2 * INTERMEDIATE)[:, :, :INTERMEDIATE])
    hidden = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices
    weights = torch.full((tokens, TOP_K), 1 / TOP_K)
    keep = store.new_keep(tokens, TOP_K)
    forward = _running_seconds(lambda: store.forward(hidden, ids, weights, keep=keep))
    backward = _running_seconds(lambda: store.backward(hidden, hidden, ids, weights, keep=keep))
    return tokens * row / forward / tile, tokens * row / backward / tile


def _dense_rate(name: str) -> float:
    """Operations per second of torch's GEMM. A CPU without bf16 instructions is a hundred times slower in bf16, so
    sizes begin small."""
    import torch

    dtype, size, rate = getattr(torch, name), 128, 0.0
    while size <= 2048:
        left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
        seconds = _running_seconds(partial(torch.mm, left, right))
        rate = max(rate, 2 * size**3 / seconds)
        if seconds > 0.05:
            break
        size *= 2
    return rate


def _gpu(gpu: system.Gpu) -> GpuRates:
    rows = gpu_rows()
    like = next((row for row in rows.values() if row.name.removeprefix("GeForce ") in gpu.name), rows["rtx-4090"])
    return GpuRates(gpu.name, gpu.memory, like.flops, like.bandwidth, like.link)


def this_machine(*, remeasure: bool = False) -> Machine:
    rates = calibrate(remeasure=remeasure)
    shared = {item.name: getattr(rates, item.name) for item in fields(CpuRates) if hasattr(rates, item.name)}
    cpu = CpuRates(name=rates.cpu, dense_products=system.dense_products(), **shared)
    gpus = tuple(_gpu(gpu) for gpu in system.gpus())
    sources = ("measured on this machine",)
    machine = Machine("this", cpu, system.memory().available, gpus, True, sources)
    return machine.with_python_speed(rates.python_seconds)
