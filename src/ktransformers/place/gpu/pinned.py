"""Packed experts in host memory made readable for the GPU's copy engine: registered in place, or staged.

Mode `map` registers a layer's buffers with the driver when the layer is first streamed, within a byte budget; the copy
engine then reads them directly. Mode `stage` copies through a ring of pinned buffers, as do layers whose registration
fails or exceeds the budget. A read-only file mapping needs its own flag; whether a buffer is one is read from
/proc/self/maps. The CUDA error of a failed registration is cleared through the runtime library, because torch would
report it at its next kernel launch as if that had failed.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.ground import log

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


class RegisteredMemory:
    """Buffers registered with the driver, within a byte budget; they are kept alive until `close`."""

    def __init__(self, budget: int) -> None:
        self.left = budget
        self._registered: dict[int, bool] = {}
        self._kept: list[Tensor] = []
        weakref.finalize(self, _unregister, self._kept).atexit = False

    def register(self, buffer: Tensor, place: Callable[[], None] = lambda: None) -> bool:
        """Whether the copy engine can read this buffer; registers it at the first call. The driver then reads in all
        pages on the calling thread, and they can move no more: `place` has been called before, so that each is on its
        NUMA node."""
        address, size = buffer.data_ptr(), buffer.numel() * buffer.element_size()
        if address not in self._registered:
            self._registered[address] = buffer.is_pinned() or self._try_register(buffer, address, size, place)
        return self._registered[address]

    def try_register(self, buffer: Tensor) -> bool:
        """The same for memory that may share its pages with a neighbour that is registered: a refusal is normal."""
        address, size = buffer.data_ptr(), buffer.numel() * buffer.element_size()
        if address not in self._registered:
            fits = size <= self.left
            self._registered[address] = buffer.is_pinned() or (fits and not self._register(buffer, address, size))
        return self._registered[address]

    def _try_register(self, buffer: Tensor, address: int, size: int, place: Callable[[], None]) -> bool:
        if size > self.left:
            _log.info(
                "%d bytes of experts exceed the budget of pinned memory and are copied through staging buffers", size
            )
            return False
        place()
        if code := self._register(buffer, address, size):
            _log.warning(
                "the driver refused to register %d bytes (%s); they are copied through staging buffers", size, code
            )
        return not code

    def _register(self, buffer: Tensor, address: int, size: int) -> Any:
        """The driver's error, or 0."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostRegister(address, size, 0 if _writable(address) else READ_ONLY)
        if int(code) != 0:
            _clear_error()
            return code
        self.left -= size
        self._kept.append(buffer)
        return 0

    def close(self) -> None:
        """Unregister everything; to be called before the memory is freed."""
        _unregister(self._kept)
        self._registered.clear()


def _unregister(buffers: list[Tensor]) -> None:
    runtime: Any = torch.cuda.cudart() if buffers else None  # type: ignore[no-untyped-call]
    for buffer in buffers:
        runtime.cudaHostUnregister(buffer.data_ptr())
    buffers.clear()


class StagingRing:
    """A ring of pinned buffers: the calling thread copies a piece in, the copy stream copies it to the device."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(STAGES)]
        self._copied: list[torch.cuda.Event | None] = [None] * STAGES
        self._next = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """`source` in host memory to `target` on the device, on the current stream."""
        for begin in range(0, source.numel(), STAGE_BYTES):
            piece = source[begin : begin + STAGE_BYTES]
            buffer, copied = self._buffers[self._next], self._copied[self._next]
            if copied is not None:
                copied.synchronize()
            staged = buffer[: piece.numel()]
            staged.copy_(piece)
            target[begin : begin + piece.numel()].copy_(staged, non_blocking=True)
            self._copied[self._next] = torch.cuda.current_stream(target.device).record_event()
            self._next = (self._next + 1) % STAGES
