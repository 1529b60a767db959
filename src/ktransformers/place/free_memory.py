"""Bytes of a GPU that residents may take: free memory, less what the plan says is still to be allocated."""

from __future__ import annotations

from ktransformers.plan.planner import GPU_MEMORY_SHARE, Candidate

# Rows of the plan's memory table that a loaded model and its engine have already allocated, or that
# `Placement.working_bytes` counts.
ALLOCATED = ("weights", "context", "residents", "slots", "groups")


def bytes_to_allocate(candidate: Candidate | None, place: int) -> int:
    """Bytes that the plan still expects to be allocated on one GPU; 0 without a plan."""
    if candidate is None or place >= len(candidate.memory.gpus):
        return 0
    return sum(size for name, size in candidate.memory.gpus[place].items() if name not in ALLOCATED)


def resident_bytes(free: int, later: int) -> int:
    return max(0, int(GPU_MEMORY_SHARE * free) - later)
