"""The GPU that Triton launches on: the current one of the thread, wherever the tensors are. Functions that launch
kernels make the GPU of their tensors current; torch's own operators do that themselves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NOTHING = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes `device` the current one; nothing happens where it is, or where it is the CPU."""
    if device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)
