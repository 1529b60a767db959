"""Which bytes of packed experts in host memory go to which bytes of the expert cache: a pure function over numbers,
which the copy engine, the staging ring and the CPU (in tests) carry out.

A matrix of an expert has `expert_bytes` in a slot, in the order of its blocks. In host memory it lies in one piece, or,
if it was packed on a host with several NUMA nodes, in one part per node: a part is a dense buffer `[E, width]`, and its
bytes of an expert begin at `offset` of the `expert_bytes`. Neighbours that are whole in one buffer are copied together;
of parts every expert is a copy of its own, because the target is strided. (cuMemcpy2DAsync, one call for a strided
copy, would save launches; it is not used because no GPU on a host with two nodes was there to measure it.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Run = tuple[int, int, int]  # experts and slots that both ascend by one: first expert, first slot, count


def runs(assigned: Sequence[tuple[int, int]], max_count: int) -> list[Run]:
    """Runs of (expert, slot) pairs that both ascend by one, at most `max_count` pairs each."""
    merged: list[Run] = []
    for expert, slot in assigned:
        if merged:
            first, first_slot, count = merged[-1]
            if count < max_count and (expert, slot) == (first + count, first_slot + count):
                merged[-1] = (first, first_slot, count + 1)
                continue
        merged.append((expert, slot, 1))
    return merged


def plan_copies(runs: Sequence[Run], offset: int, width: int, expert_bytes: int) -> NDArray[np.uint64]:
    """Rows (byte offset in the slots, byte offset in the part, bytes), for one part of one matrix."""
    table = np.array(runs, np.uint64).reshape(-1, 3)
    if width != expert_bytes:
        count = table[:, 2].astype(np.int64)
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        expert, slot = (np.repeat(table[:, column], count) + within.astype(np.uint64) for column in range(2))
        table = np.stack((expert, slot, np.ones_like(expert)), 1)
    target = table[:, 1] * np.uint64(expert_bytes) + np.uint64(offset)
    return np.stack((target, table[:, 0] * np.uint64(width), table[:, 2] * np.uint64(width)), 1)


def check_parts(name: str, parts: Sequence[tuple[int, int]], expert_bytes: int) -> None:
    """That parts (offset, width) are all bytes of an expert, each once; otherwise slots would hold stale bytes."""
    at = 0
    for offset, width in sorted(parts):
        if offset != at or width <= 0:
            break
        at += width
    else:
        if at == expert_bytes:
            return
    raise ValueError(f"{name}: given parts {list(parts)} (offset, bytes), expected all {expert_bytes} bytes, each once")
