"""Copies to the device by the driver's own call. A layer takes a hundred of them, and torch spends ten times as long on
each, in the thread that everything else waits for."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from torch import Tensor


@functools.cache
def _copy() -> Any:
    call = ctypes.CDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2
    call.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    call.restype = ctypes.c_int
    return call


class Lane:
    """From one buffer of rows `[n, bytes]` in host memory, known to the driver, to one on the device."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self._target, self._source, self._bytes = target.data_ptr(), source.data_ptr(), target.shape[1]

    def copy(self, to: int, origin: int, count: int, stream: int) -> None:
        """`count` rows, behind everything on the stream."""
        step = self._bytes
        code = _copy()(self._target + to * step, self._source + origin * step, count * step, stream)
        if code:
            raise RuntimeError(f"the driver refused a copy of {count * step} bytes to the GPU: error {code}")
