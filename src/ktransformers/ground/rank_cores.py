"""CPU affinity of the ranks on one machine: launchers start a process per GPU, and each would use all CPUs.

`bind_rank_cores` binds a process that `torchrun` or `accelerate launch` has started to its share of the machine: whole
cores, contiguous in core numbers, so that each rank stays on a NUMA node if there is one per rank. Thread pools that
are created later have one thread per core of that share. If the launcher has already bound its ranks, the affinity mask
of the process differs from that of its parent, and it is left unchanged.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Collection
from pathlib import Path

from ktransformers.ground.errors import InputError

CPUS = Path("/sys/devices/system/cpu")


def int_variable(name: str, default: int) -> int:
    """A number that the launcher has put into the environment."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdigit():
        raise InputError(name, text, "a number", "a launcher such as torchrun sets it")
    return int(text)


def first_sibling(cpu: int) -> int:
    """The first CPU (hyperthread) of the CPU's core; it identifies the core."""
    try:
        siblings = (CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        return int(siblings.replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu


def rank_cpus(cpus: Collection[int], rank: int, ranks: int) -> frozenset[int]:
    """The CPUs of one rank: a contiguous range of cores, at least one."""
    cores: dict[int, set[int]] = {}
    for cpu in cpus:
        cores.setdefault(first_sibling(cpu), set()).add(cpu)
    order = [cores[core] for core in sorted(cores)]
    if len(order) < ranks:
        return frozenset(order[rank % len(order)])
    own = order[len(order) * rank // ranks : len(order) * (rank + 1) // ranks]
    return frozenset().union(*own)


def bind_rank_cores() -> None:
    """Bind all threads of this process to the rank's CPUs. Further calls change nothing."""
    rank, ranks = int_variable("LOCAL_RANK", 0), int_variable("LOCAL_WORLD_SIZE", 1)
    if ranks < 2 or multiprocessing.parent_process() is not None:  # children of a rank inherit its mask
        return
    affinity = os.sched_getaffinity(os.getpid())
    try:
        bound = affinity != os.sched_getaffinity(os.getppid())
    except OSError:  # the launcher has exited
        bound = True
    if bound:
        return
    cpus = rank_cpus(affinity, rank, ranks)
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except OSError:
            continue  # the thread has ended
