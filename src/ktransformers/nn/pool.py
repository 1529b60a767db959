"""The threads of all stores that were given none, and of what is computed beside experts.

There is one pool, or threads of two would stand in each other's way: whoever wants it otherwise than it makes itself
chooses before anyone has asked for it.
"""

from __future__ import annotations

import atexit
import os
import threading

from ktransformers import _core, env
from ktransformers.nn.rank_cores import share_cores

_lock = threading.Lock()
_default: list[_core.Pool] = []  # at most one

# Threads stay with the parent: a child that uses experts gets a pool of its own.
os.register_at_fork(after_in_child=_default.clear)
atexit.register(_default.clear)


def default_pool() -> _core.Pool:
    """Made when first asked for. Ranks on one machine share its cores."""
    with _lock:
        if not _default:
            _default.append(_made(0, 0, env.text("KT_PLACE") not in ("", "cpu")))
        return _default[0]


def choose_pool(threads: int = 0, groups: int = 0, spare: bool = False) -> _core.Pool:
    """The default from now on, with so many threads (0: as many as are fastest). With `spare` one CPU is left to the
    thread that launches a GPU's work, unless their number was given."""
    with _lock:
        _default[:] = [_made(threads, groups, spare)]
        return _default[0]


def _made(threads: int, groups: int, spare: bool) -> _core.Pool:
    share_cores()
    pool = _core.Pool(threads, groups)
    if spare and not threads and not env.text("KT_THREADS") and pool.threads > 2:
        return _core.Pool(pool.threads - 1, groups)
    return pool


def beside_the_pool() -> None:
    """This thread, from now on, on a CPU that the pool's pinned threads leave free, where there is one: it works along
    with them, and beside one of them it would wait for its turn, milliseconds."""
    free = os.sched_getaffinity(0) - set(default_pool().cpus)
    if free:
        os.sched_setaffinity(0, free)
