"""Peak memory of this process on the host and on the GPU since the last reset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ktransformers.ground.system import resident_bytes
from ktransformers.plan.meter import uncounted_pinned

if TYPE_CHECKING:
    import torch

GIB = 1 << 30


def graph_bytes() -> int:
    """Bytes of CUDA graph pools that torch counts as free: they are kept for replays and not allocated to others."""
    import torch

    own = (0, 0)  # the pool of all that is no graph's
    segments = torch.cuda.memory_snapshot()
    apart = [one for one in segments if tuple(one.get("segment_pool_id", own)) != own]
    return sum(one["total_size"] - one["allocated_size"] for one in apart)


class Peaks:
    """Memory of this process since `reset`, graphs' own included, and pinned memory that RSS does not count."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"

    def reset(self) -> None:
        import torch

        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()

    def allocated(self) -> int:
        """Bytes of the GPU; of steps that record nothing, as what a capture allocates is in its graph's bytes."""
        import torch

        return torch.cuda.max_memory_allocated() + graph_bytes() if self._gpu else 0

    def settle(self) -> int:
        """Everything is recorded now: the GPU's peak up to here, in bytes; it starts anew."""
        import torch

        before = torch.cuda.max_memory_allocated() if self._gpu else 0
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()
        return before

    def read(self, before: int = 0) -> dict[str, float]:
        """`before`: what `settle` has said."""
        import torch

        gpu, pinned = self._gpu, uncounted_pinned("VmRSS")
        return {
            "gpu_peak_gib": max(before, self.allocated()) / GIB,
            "gpu_settling_gib": before / GIB,
            "gpu_graphs_gib": graph_bytes() / GIB if gpu else 0.0,
            "gpu_reserved_gib": torch.cuda.max_memory_reserved() / GIB if gpu else 0.0,
            "host_peak_gib": (resident_bytes("VmHWM") + pinned) / GIB,
            "host_pinned_apart_gib": pinned / GIB,
        }
