"""A CUDA graph of what Python asks of a device, and the way back where that cannot be one.

When a capture fails torch leaves random numbers behind that believe they are being captured, so that the next dropout
anywhere is an error; a capture that succeeds puts that right. The surprising decision: not `torch.cuda.graph`, which
captures on one stream for all devices, the first one's, and empties the allocator's cache every time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch


def capture(
    graph: torch.cuda.CUDAGraph,
    run: Callable[[], None],
    device: torch.device,
    pool: Any,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Kernels have to be loaded: `run` has been called before. Errors leave everything as it was."""
    with torch.cuda.device(device):
        side = stream or _side(device)
        try:
            _into(graph, run, side, pool)
        except Exception:
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(device)
                _into(torch.cuda.CUDAGraph(), torch.empty(1, device=device).zero_, side, None)
            raise


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _into(graph: torch.cuda.CUDAGraph, run: Callable[[], object], side: torch.cuda.Stream, pool: Any) -> None:
    torch.cuda.synchronize()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # Other threads wait for their own copies meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
