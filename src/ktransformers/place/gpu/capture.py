"""A CUDA graph of what Python asks of a device, and the way back where that cannot be one.

torch leaves two things behind when a capture fails: the capture's stream as the current one, and random numbers that
believe they are being captured, so that the next dropout anywhere is an error. Both are put right here, the second by a
capture that succeeds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch


def capture(graph: torch.cuda.CUDAGraph, run: Callable[[], None], device: torch.device, pool: Any) -> None:
    """Kernels have to be loaded: `run` has been called before. RuntimeError: nothing has changed."""
    stream = torch.cuda.current_stream(device)
    try:
        _into(graph, run, pool)
    except RuntimeError:
        torch.cuda.set_stream(stream)
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(device)
            _into(torch.cuda.CUDAGraph(), torch.empty(1, device=device).zero_, None)
        torch.cuda.set_stream(stream)
        raise


def _into(graph: torch.cuda.CUDAGraph, run: Callable[[], object], pool: Any) -> None:
    # Other threads wait for their own copies meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run()
