"""Packed bytes in host memory, made fit for fast copies to a GPU: registered where they lie, or staged.

`map` registers a layer's buffers with the driver when the layer is first streamed, as long as a byte budget lasts; the
copy engine then reads them directly. `stage` copies through a ring of pinned buffers, and is what a layer gets whose
registration was refused or is beyond the budget. A read-only file mapping wants a flag of its own; whether a buffer is
one is read from the process's map. The surprising decision: the driver's error of a refused registration is cleared
through the runtime library itself, because torch would report it at its next kernel as if that had failed.
"""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers import log

READ_ONLY = 8  # cudaHostRegisterReadOnly
STAGE_BYTES = 32 << 20
STAGES = 4
MODES = ("map", "stage")

_log = log.logger(__name__)


def _writable(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags, *_ = line.split()
        first, last = (int(word, 16) for word in span.split("-"))
        if first <= address < last:
            return "w" in flags
    return True


def _clear_error() -> None:
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.split()[-1]
        if "libcudart" in name and ".so" in name:
            ctypes.CDLL(name).cudaGetLastError()
            return


class Registered:
    """Buffers known to the driver, within a budget of bytes; they are kept alive until `close`."""

    def __init__(self, budget: int) -> None:
        self.left = budget
        self._known: dict[int, bool] = {}
        self._kept: list[Tensor] = []
        weakref.finalize(self, _unregister, self._kept).atexit = False

    def take(self, buffer: Tensor) -> bool:
        """Whether the copy engine may read this buffer, which is registered now if it was not."""
        address, size = buffer.data_ptr(), buffer.numel() * buffer.element_size()
        if address not in self._known:
            self._known[address] = buffer.is_pinned() or self._register(buffer, address, size)
        return self._known[address]

    def _register(self, buffer: Tensor, address: int, size: int) -> bool:
        if size > self.left:
            _log.info("%d bytes of experts are beyond the budget of pinned memory: they are staged", size)
            return False
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostRegister(address, size, 0 if _writable(address) else READ_ONLY)
        if int(code) != 0:
            _clear_error()
            _log.warning("the driver refuses to register %d bytes (%s): they are staged", size, code)
            return False
        self.left -= size
        self._kept.append(buffer)
        return True

    def close(self) -> None:
        """Before the memory may go."""
        _unregister(self._kept)
        self._known.clear()


def _unregister(buffers: list[Tensor]) -> None:
    runtime: Any = torch.cuda.cudart() if buffers else None  # type: ignore[no-untyped-call]
    for buffer in buffers:
        runtime.cudaHostUnregister(buffer.data_ptr())
    buffers.clear()


class Stages:
    """A ring of pinned buffers; a piece is copied in by the calling thread and out by the copy stream."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(STAGES)]
        self._free: list[torch.cuda.Event | None] = [None] * STAGES
        self._next = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """`source` in host memory to `target` on the device, on the current stream."""
        for begin in range(0, source.numel(), STAGE_BYTES):
            piece = source[begin : begin + STAGE_BYTES]
            buffer, free = self._buffers[self._next], self._free[self._next]
            if free is not None:
                free.synchronize()
            staged = buffer[: piece.numel()]
            staged.copy_(piece)
            target[begin : begin + piece.numel()].copy_(staged, non_blocking=True)
            self._free[self._next] = torch.cuda.current_stream(target.device).record_event()
            self._next = (self._next + 1) % STAGES
