"""The default thread pool of the process, shared by all stores and by the kernels for linear layers and attention.

There is one pool, because the threads of two would compete for the same CPUs. A program that needs other settings calls
`set_default_pool` before the first store is created; one that passes on the request of a user, `pool_for`.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
from collections.abc import Callable

import torch

from ktransformers import _core
from ktransformers.ground import env, system
from ktransformers.ground.rank_cores import bind_rank_cores

_lock = threading.Lock()
_default: list[_core.Pool] = []  # at most one

# Threads do not survive a fork: a child that uses experts creates its own pool.
os.register_at_fork(after_in_child=_default.clear)
atexit.register(_default.clear)


def default_pool() -> _core.Pool:
    """Created on first use. Ranks on one machine divide its cores (`ground/rank_cores.py`)."""
    with _lock:
        if not _default:
            _default.append(_new_pool(0, 0, env.text("KT_PLACE") not in ("", "cpu")))
        return _default[0]


def set_default_pool(threads: int = 0, groups: int = 0, spare: bool = False) -> _core.Pool:
    """Replace the default pool by one with `threads` threads (0: the core chooses). `spare` leaves one CPU to the
    thread that launches GPU work, unless the number of threads was given."""
    with _lock:
        _default[:] = [_new_pool(threads, groups, spare)]
        return _default[0]


def pool_for(
    threads: int | None,
    groups: int | None,
    note: Callable[[str], None],
    *,
    names: tuple[str, str] = ("--kt-cpuinfer", "--kt-threadpool-count"),
    spare: bool = False,
    most: int | None = None,
) -> _core.Pool | None:
    """The default pool with the threads and groups that options of these `names` ask for; None if nothing is asked for.

    A recipe may come from a larger machine: for more threads than CPUs, or more groups than NUMA nodes, `note` gets a
    line and the pool has its default. `most`: threads that may be used, which are then the default too."""
    machine, (of_threads, of_groups) = _core.machine(), names
    available = most or machine["cpus"]
    threads, groups = threads or 0, groups or 0
    if threads > available:
        note(f"{of_threads} {threads} exceeds the {available} available CPUs; using the default")
        threads = 0
    if text := system.hyperthreads_asked_for(threads, machine["cores"], available):
        note(f"{of_threads}: {text}; without it the pool measures whether they help")
    if groups > machine["nodes"]:
        note(f"{of_groups} {groups} exceeds the {machine['nodes']} NUMA nodes; using the default")
        groups = 0
    threads = threads or most or 0
    return set_default_pool(threads, groups, spare) if threads or groups or spare else None


def limit_torch_threads() -> None:
    """torch has a thread for each CPU that it may use. Where a container grants the time of fewer CPUs, so many threads
    use up its share early in every period and stand still for the rest of it."""
    quota = _core.machine()["quota"]
    if quota and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(min(torch.get_num_threads(), max(1, math.ceil(quota))))


def _new_pool(threads: int, groups: int, spare: bool) -> _core.Pool:
    bind_rank_cores()
    limit_torch_threads()
    pool = _core.Pool(threads, groups)
    if spare and not threads and not env.text("KT_THREADS") and pool.threads > 2:
        return _core.Pool(pool.threads - 1, groups)
    return pool


def avoid_pool_cpus() -> None:
    """Bind this thread to the CPUs that the pool's pinned threads leave free, if any. It runs concurrently with them,
    and on a CPU of theirs it would wait milliseconds for a time slice."""
    free = os.sched_getaffinity(0) - set(default_pool().cpus)
    if free:
        os.sched_setaffinity(0, free)
