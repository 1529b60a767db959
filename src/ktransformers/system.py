"""What the machine offers besides its cores: memory as this process may use it, GPUs, installed packages.

Cores, caches and NUMA nodes are the native core's business (`_core.machine()`). Nothing here imports torch until
`gpus()` or `bf16_is_fast()` is asked.
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
    total: int  # bytes, cut to the cgroup's limit
    available: int
    huge_pages: str  # transparent huge pages: always, madvise, never, or unknown


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int  # bytes


def _cgroup_limits(root: Path) -> tuple[int, int] | None:
    """Limit and use in bytes of the cgroup that this process sees, None where there is no limit."""
    for folder, limit, use in (
        ("sys/fs/cgroup", "memory.max", "memory.current"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            words = (root / folder / limit).read_text().strip(), (root / folder / use).read_text().strip()
        except OSError:
            continue
        if all(word.isdigit() for word in words):
            return int(words[0]), int(words[1])
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
    """The installed version, None where it is not installed; the package is not imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpus() -> list[Gpu]:
    """CUDA devices that torch can use; none where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [Gpu(device.name, device.total_memory) for device in found]


def bf16_is_fast(device: str) -> bool:
    """On a CPU without bf16 instructions torch multiplies bf16 up to a hundred times more slowly than float32."""
    import torch

    return device != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextlib.contextmanager
def frozen_gc() -> Iterator[None]:
    """Python's collector leaves alone what exists now: it takes a quarter of a second to look through the modules of a
    large model, every ten steps or so."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def python_loop_seconds(rounds: int = 30) -> float:
    """In which Python takes a million steps of a loop here: ten times the fastest of many short ones, because others
    use the same host. Hosts with the same CPU differ by a third and more, and with them models whose layers Python
    launches."""
    best = float("inf")
    for _ in range(rounds):
        begun = time.perf_counter()
        sum(number * number for number in range(100_000))
        best = min(best, time.perf_counter() - begun)
    return 10 * best
