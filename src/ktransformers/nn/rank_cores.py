"""The CPUs of one rank among several on a machine: launchers start a process for each GPU, and each would use them all.

`share_cores` keeps a process that `torchrun` or `accelerate launch` has started to its part: whole cores, in the order
of their numbers, so that ranks keep to NUMA nodes where there is one for each. Every pool of threads that is made later
is as large as that part. The surprising decision: a launcher that has bound its ranks itself is recognised by their
mask, which then is not its own, and nothing is changed.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Collection
from pathlib import Path

from ktransformers.errors import InputError

CPUS = Path("/sys/devices/system/cpu")


def _number(name: str, default: int) -> int:
    word = os.environ.get(name, "").strip()
    if not word:
        return default
    if not word.isdigit():
        raise InputError(name, word, "a number", "a launcher such as torchrun sets it")
    return int(word)


def first_sibling(cpu: int) -> int:
    """The number of a core: that of its first CPU."""
    try:
        words = (CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        return int(words.replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu


def part(cpus: Collection[int], rank: int, ranks: int) -> frozenset[int]:
    """Of one rank: a run of cores, one at least."""
    cores: dict[int, set[int]] = {}
    for cpu in cpus:
        cores.setdefault(first_sibling(cpu), set()).add(cpu)
    order = [cores[core] for core in sorted(cores)]
    if len(order) < ranks:
        return frozenset(order[rank % len(order)])
    mine = order[len(order) * rank // ranks : len(order) * (rank + 1) // ranks]
    return frozenset().union(*mine)


def share_cores() -> None:
    """Keep to this rank's part from now on, with all threads; once is enough, and more often does no harm."""
    rank, ranks = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1)
    if ranks < 2 or multiprocessing.parent_process() is not None:  # a rank's own children have its part
        return
    here = os.sched_getaffinity(os.getpid())
    try:
        bound = here != os.sched_getaffinity(os.getppid())
    except OSError:  # the launcher is gone
        bound = True
    if bound:
        return
    chosen = part(here, rank, ranks)
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), chosen)
        except OSError:
            continue  # it has ended
