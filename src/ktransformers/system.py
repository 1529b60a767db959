"""Facts about the machine besides its cores: memory available to this process, GPUs, installed packages.

Cores, caches and NUMA nodes come from the native core (`_core.machine()`). torch is imported only by `gpus()` and
`bf16_is_fast()`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Memory:
    total: int  # bytes, at most the cgroup's limit
    available: int
    huge_pages: str  # transparent huge pages: always, madvise, never, or unknown


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int  # bytes


def _cgroup_limits(root: Path) -> tuple[int, int] | None:
    """(limit, usage) in bytes of this process's cgroup, None without a limit."""
    for folder, limit, use in (
        ("sys/fs/cgroup", "memory.max", "memory.current"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            values = (root / folder / limit).read_text().strip(), (root / folder / use).read_text().strip()
        except OSError:
            continue
        if all(value.isdigit() for value in values):
            return int(values[0]), int(values[1])
    return None


def memory(root: Path = Path("/")) -> Memory:
    kilobytes = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        kilobytes[key] = int(value.split()[0])
    total, available = kilobytes["MemTotal"] * 1024, kilobytes["MemAvailable"] * 1024
    limits = _cgroup_limits(root)
    if limits is not None:
        total, available = min(total, limits[0]), min(available, max(0, limits[0] - limits[1]))
    try:
        choice = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
        huge_pages = choice[choice.index("[") + 1 : choice.index("]")]
    except (OSError, ValueError):
        huge_pages = "unknown"
    return Memory(total, available, huge_pages)


def version_of(distribution: str) -> str | None:
    """The installed version, None if not installed; the package is not imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpus() -> list[Gpu]:
    """CUDA devices that torch can use; empty without torch."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [Gpu(device.name, device.total_memory) for device in devices]


def bf16_is_fast(device: str) -> bool:
    """False on CPUs without bf16 instructions, where torch multiplies bf16 up to a hundred times slower than
    float32."""
    import torch

    return device != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextlib.contextmanager
def frozen_gc() -> Iterator[None]:
    """Excludes existing objects from garbage collection: a scan of a large model's modules takes a quarter of a second
    and happens about every ten steps."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def python_loop_seconds(rounds: int = 30) -> float:
    """Time of a Python loop of a million iterations: ten times the minimum of many short runs, because hosts are
    shared. Hosts with the same CPU differ by a third and more, and so do models whose kernels Python launches."""
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        sum(number * number for number in range(100_000))
        best = min(best, time.perf_counter() - started)
    return 10 * best
