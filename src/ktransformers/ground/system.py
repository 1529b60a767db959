"""Facts about the machine besides its cores: memory available to this process, GPUs, installed packages.

Cores, caches and NUMA nodes come from the native core (`_core.machine()`). torch is imported only by
functions of GPUs, `dense_products()` and `bf16_is_fast()`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ktransformers.ground import env
from ktransformers.ground.errors import InputError
from ktransformers.ground.log import logger

MIN_CAPABILITY = (8, 0)  # of a GPU: older ones have no bf16 instructions, which all kernels here use
GPU_CONTEXT_BYTES = 600_000_000  # of a process on a GPU besides torch's allocator; estimated
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_log = logger(__name__)


@dataclass(frozen=True)
class Memory:
    total: int  # bytes, at most the cgroup's limit
    available: int
    huge_pages: str  # transparent huge pages: always, madvise, never, or unknown


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int  # bytes
    capability: tuple[int, int] = MIN_CAPABILITY


def parse_bytes(name: str, text: str) -> int:
    """`24GB`, `1.3TB`, `16GiB`; a bare number is bytes."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise InputError(name, text, "a size such as 24GB, 1.5TB or 16GiB")
    return round(float(match[1]) * unit)


def hyperthreads_asked_for(threads: int, cores: int, cpus: int) -> str | None:
    """What is wrong with so many threads of experts on a machine with hyperthreads; None: nothing."""
    if not cores < threads <= cpus:
        return None
    return (
        f"{threads} threads of experts on {cores} cores: {threads - cores} of them are second hyperthreads, which "
        "share the multipliers of a core"
    )


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


def all_gpus() -> list[Gpu]:
    """CUDA devices that torch sees, with the memory that KT_GPU_MEMORY leaves them; empty without torch."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    limit = parse_bytes(env.GPU_MEMORY, env.text(env.GPU_MEMORY) or "1000TB")
    for index, device in enumerate(devices):
        if limit < device.total_memory:
            share = max(0, limit - GPU_CONTEXT_BYTES) / device.total_memory
            torch.cuda.set_per_process_memory_fraction(share, index)
    return [Gpu(device.name, min(limit, device.total_memory), (device.major, device.minor)) for device in devices]


def gpus() -> list[Gpu]:
    """CUDA devices that are computed on: all before the first that is older than MIN_CAPABILITY. One line names what is
    left out."""
    return list(_supported(tuple(all_gpus())))


@functools.cache
def _supported(devices: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    old = [index for index, device in enumerate(devices) if device.capability < MIN_CAPABILITY]
    if not old:
        return devices
    supported = [str(index) for index in range(len(devices)) if index not in old]
    remedy = f"; CUDA_VISIBLE_DEVICES={','.join(supported)} shows the others alone" if supported else ""
    first = devices[old[0]]
    behind = " and the GPUs behind it are" if len(devices) > old[0] + 1 else " is"
    capability = ".".join(map(str, first.capability))
    _log.warning(
        "%s%s left out: compute capability %s, where 8.0 is the oldest%s", first.name, behind, capability, remedy
    )
    return devices[: old[0]]


def has_gpu() -> bool:
    return bool(gpus())


def require_supported(device: str, option: str, remedy: str) -> None:
    """Raises InputError if this device, which was asked for by `option`, is a GPU that is not computed on."""
    kind, _, index = device.partition(":")
    devices = all_gpus() if kind == "cuda" else []
    place = int(index or 0)
    if place < len(devices) and devices[place].capability < MIN_CAPABILITY:
        chosen = devices[place]
        raise InputError(option, f"{device}, {chosen.name}", "a GPU of compute capability 8.0 or later", remedy)


def gpu_memory() -> list[tuple[int, int]]:
    """(free, total) bytes of each CUDA device, of all processes; empty if this process does not use one."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]


def resident_bytes(kind: str = "VmRSS", process: int | str = "self") -> int:
    """Memory of a process; with RssAnon the anonymous part alone, without mapped files."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    return 0


DENSE_PRODUCTS = ("bfloat16", "widened", "float32")
forced_dense_products: str | None = None  # one of DENSE_PRODUCTS; None: a measurement decides. Tests set it
# Rows, columns and outputs of the two products that are timed. The first takes microseconds, or milliseconds where bf16
# is emulated: then the second, which is large enough that calling torch counts for nothing, is not needed.
PROBES = ((8, 128, 256), (64, 1024, 512))
PROBE_ROUNDS = 4
EMULATED_SECONDS = 2e-3
# Times as long in bf16 as in float32 up to which bf16 is taken: half as long or less where the CPU multiplies bf16,
# 1.7 times and more where it does not.
MAX_BF16_RATIO = 1.2


def dense_products() -> str:
    """How the CPU multiplies in dense linear layers, unless a dtype is asked for: "bfloat16", torch's
    own products; "widened", bf16 weights multiplied in float32 (`quantized/widened.py`), on CPUs where torch is slower
    in bf16; "float32", the same with float32 copies of the weights. Decided by a measurement, once per process."""
    if forced_dense_products is not None:
        return forced_dense_products
    return "bfloat16" if _torch_bf16_time_ratio() <= MAX_BF16_RATIO else "widened"


@functools.cache
def _torch_bf16_time_ratio() -> float:
    """Time of torch's bf16 linear over float32. It is measured in milliseconds, some tens of them on two slow cores.

    What counts is the CPU time of one thread, in turn and the least of some rounds: by the clock, other programs on the
    same CPUs decide which of the two is faster, and with it the dtype of a model and the bits of its results. Where
    the kernel counts CPU time in ticks that are longer than a product, it is the clock all the same."""
    import torch

    ratio = 0.0
    with torch.inference_mode(), warnings.catch_warnings(), _one_torch_thread():
        warnings.simplefilter("ignore")  # on Arm torch says that it lacks bf16 products
        for rows, columns, outputs in PROBES:
            shapes = ((rows, columns), (outputs, columns))
            operands = [
                [torch.ones(shape, dtype=dtype, device="cpu") for shape in shapes]
                for dtype in (torch.bfloat16, torch.float32)
            ]
            # [round, dtype, CPU time or clock]
            rounds = [[_seconds_of(torch.nn.functional.linear, *of) for of in operands] for _ in range(PROBE_ROUNDS)]
            cpu, clock = torch.tensor(rounds, dtype=torch.float64, device="cpu").amin(0).t().tolist()
            bf16, float32 = cpu if min(cpu) > 0 else clock
            ratio = bf16 / float32
            if bf16 > EMULATED_SECONDS:
                break
    return ratio


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _seconds_of(function: Callable[..., object], *args: object) -> tuple[float, float]:
    """CPU time of this thread, and time by the clock."""
    started, began = time.thread_time(), time.perf_counter()
    function(*args)
    return time.thread_time() - started, time.perf_counter() - began


def bf16_is_fast(device: str) -> bool:
    """False on CPUs where torch multiplies bf16 slower than float32, up to a hundred times."""
    return device != "cpu" or dense_products() == "bfloat16"


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


def scheduled_seconds() -> tuple[float, float]:
    """Seconds that the threads of this process ran on a core, and that they waited for one; zeros where the kernel does
    not count them. Threads that have ended are not counted."""
    ran = waited = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            words = file.read_text().split()
        except OSError:  # the thread has ended
            continue
        if len(words) > 1:
            ran, waited = ran + int(words[0]), waited + int(words[1])
    return ran / 1e9, waited / 1e9


def python_loop_seconds(rounds: int = 30) -> float:
    """Time of a Python loop of a million iterations: ten times the minimum of many short runs, because hosts are
    shared. Hosts with the same CPU differ by a third and more, and so do models whose kernels Python launches."""
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        sum(number * number for number in range(100_000))
        best = min(best, time.perf_counter() - started)
    return 10 * best
