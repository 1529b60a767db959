"""Bytes of a GPU that residents may take: free memory, less what the plan says is still to be allocated."""

from __future__ import annotations

import torch

from ktransformers.plan.planner import GPU_MEMORY_SHARE, Candidate

# Rows of the plan's memory table that a loaded model and its engine have already allocated, or that
# `Placement.working_bytes` counts.
ALLOCATED = ("weights", "context", "residents", "slots", "groups")


def free_bytes(device: torch.device) -> int:
    """Bytes that torch can still allocate, its own cache included, within its per-process memory fraction."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    usable = free + torch.cuda.memory_reserved(device) - allocated
    allowed = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch 2.6 and later
    if allowed is not None:
        usable = min(usable, int(allowed(device) * total) - allocated)
    return max(0, usable)


def bytes_to_allocate(candidate: Candidate | None, place: int) -> int:
    """Bytes that the plan still expects to be allocated on one GPU; 0 without a plan."""
    if candidate is None or place >= len(candidate.memory.gpus):
        return 0
    return sum(size for name, size in candidate.memory.gpus[place].items() if name not in ALLOCATED)


def resident_bytes(free: int, later: int) -> int:
    return max(0, int(GPU_MEMORY_SHARE * free) - later)
