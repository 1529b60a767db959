"""The thread pool of the wrappers: that of ktransformers, with the number of threads that the first wrapper asks for.

Threads are pinned, one per core. A server has processes of its own (scheduler, tokeniser, detokeniser, the CUDA
driver's callback thread), and a thread of the pool that has to share its core with one of them holds up the whole
layer: so `RESERVED_CPUS` are left to them even where all were asked for.
"""

from __future__ import annotations

import os

from ktransformers.ground.log import logger
from ktransformers.ground.pool import pool_for

RESERVED_CPUS = 2

log = logger(__name__)


def use_threads(threads: int | None, pools: int, numa_nodes: list[int] | None = None) -> int:
    """Make the process's pool; the number of threads that it got. 0 and None, as stock SGLang passes it without
    --kt-cpuinfer, are as many as there may be. Experts are divided over all NUMA nodes of the
    process, whatever `pools` and `numa_nodes` say: `numactl` restricts a process to some of them."""
    cpus = len(os.sched_getaffinity(0))
    most = max(1, cpus - RESERVED_CPUS) if cpus > 2 * RESERVED_CPUS else cpus
    pool = pool_for(threads, 0, log.info, names=("cpuinfer", "threadpool_count"), most=most)
    assert pool is not None
    if numa_nodes is not None and len(numa_nodes) != pool.groups:
        log.warning("numa_nodes %s: experts are divided over the %d NUMA nodes of this process instead; restrict it "
                    "with numactl", numa_nodes, pool.groups)  # fmt: skip
    return pool.threads
