"""Peak memory of this process on the host and on the GPU since the last reset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 1 << 30
PROBE = 64 << 20  # bytes of pinned memory, to see whether RSS counts them


def host_bytes(key: str) -> int:
    """A line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def graph_bytes() -> int:
    """Bytes of CUDA graph pools that torch counts as free: they are kept for replays and not allocated to others."""
    import torch

    own = (0, 0)  # the pool of all that is no graph's
    segments = torch.cuda.memory_snapshot()
    apart = [one for one in segments if tuple(one.get("segment_pool_id", own)) != own]
    return sum(one["total_size"] - one["allocated_size"] for one in apart)


class Peaks:
    """Memory of this process since `reset`, graphs' own included. The driver maps pinned memory in a way that RSS may
    not count; whether it does is tried once, and where it does not, what torch's pinned allocator holds is added."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._gpu = device.type == "cuda"
        self._uncounted = False
        if self._gpu:
            before = host_bytes("VmRSS")
            probe = torch.empty(PROBE, dtype=torch.uint8, pin_memory=True).fill_(1)
            self._uncounted = host_bytes("VmRSS") - before < PROBE // 2
            del probe  # the allocator keeps it for what is pinned later

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

    def _pinned(self) -> int:
        import torch

        if not self._gpu or not self._uncounted:
            return 0
        return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])

    def read(self, before: int = 0) -> dict[str, float]:
        """`before`: what `settle` has said."""
        import torch

        gpu = self._gpu
        return {
            "gpu_peak_gib": max(before, self.allocated()) / GIB,
            "gpu_settling_gib": before / GIB,
            "gpu_graphs_gib": graph_bytes() / GIB if gpu else 0.0,
            "gpu_reserved_gib": torch.cuda.max_memory_reserved() / GIB if gpu else 0.0,
            "host_peak_gib": (host_bytes("VmHWM") + self._pinned()) / GIB,
            "host_pinned_apart_gib": self._pinned() / GIB,
        }
