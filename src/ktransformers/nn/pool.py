"""The threads of all stores that were given none."""

from __future__ import annotations

import atexit
import os
import threading

from ktransformers import _core, env
from ktransformers.nn.cores import share_cores

_lock = threading.Lock()
_default: list[_core.Pool] = []  # at most one

# Threads stay with the parent: a child that uses experts gets a pool of its own.
os.register_at_fork(after_in_child=_default.clear)
atexit.register(_default.clear)


def default_pool() -> _core.Pool:
    """Made when first asked for. Ranks on one machine share its cores. Where experts are computed on a GPU too, one CPU
    is left to the thread that launches its work."""
    with _lock:
        if not _default:
            share_cores()
            pool = _core.Pool()
            if env.text("KT_PLACE") not in ("", "cpu") and not env.text("KT_THREADS") and pool.threads > 2:
                pool = _core.Pool(pool.threads - 1)
            _default.append(pool)
        return _default[0]


def beside_the_pool() -> None:
    """This thread, from now on, on a CPU that the pool's pinned threads leave free, where there is one: it works along
    with them, and beside one of them it would wait for its turn, milliseconds."""
    free = os.sched_getaffinity(0) - set(default_pool().cpus)
    if free:
        os.sched_setaffinity(0, free)
