"""Which CUDA kernels a call runs: how many times each, and how long, from torch's profiler (graph replays included)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

NAME_LENGTH = 96


def profile_kernels(call: Callable[[], Any], layers: int, top: int = 24) -> list[dict[str, Any]]:
    """Kernels and copies of one call, the longest first, as numbers for one of `layers` layers."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    counts: dict[str, int] = defaultdict(int)
    microseconds: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            counts[event.name] += 1
            microseconds[event.name] += event.device_time
    names = sorted(microseconds, key=lambda name: -microseconds[name])[:top]
    rows = [
        {"kernel": name[:NAME_LENGTH], "count": counts[name] / layers, "us": microseconds[name] / layers}
        for name in names
    ]
    total = {"kernel": "all", "count": sum(counts.values()) / layers, "us": sum(microseconds.values()) / layers}
    return [total, *rows]


def print_kernels(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"{title}: kernels of a layer (count, us)")
    for row in rows:
        print(f"  {row['count']:7.2f} {row['us']:9.2f}  {row['kernel']}")
