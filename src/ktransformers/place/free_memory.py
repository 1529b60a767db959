"""Bytes of a GPU that residents may take: what is free now, less what the plan says is still to come."""

from __future__ import annotations

import torch

from ktransformers.plan.planner import GPU_SHARE, Candidate

# Lines of the plan that a loaded model and its engine have taken already, or that `Placement.working_bytes` counts.
THERE = ("weights", "context", "residents", "slots", "groups")


def free_bytes(device: torch.device) -> int:
    """That torch may still give out here, its own cache included, within the share of the GPU that it was allowed."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    usable = free + torch.cuda.memory_reserved(device) - allocated
    allowed = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch 2.6 and later
    if allowed is not None:
        usable = min(usable, int(allowed(device) * total) - allocated)
    return max(0, usable)


def to_come(candidate: Candidate | None, place: int) -> int:
    """Of one GPU, by the plan; nothing where there is none."""
    if candidate is None or place >= len(candidate.memory.gpus):
        return 0
    return sum(size for name, size in candidate.memory.gpus[place].items() if name not in THERE)


def resident_bytes(free: int, later: int) -> int:
    return max(0, int(GPU_SHARE * free) - later)
