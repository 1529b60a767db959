"""The driver's own calls, found in its library when they are first wanted: copies to the device and host functions. A
layer takes a hundred copies, and torch spends ten times as long on each, in the thread that everything else waits for;
host functions torch does not offer at all."""

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


@functools.cache
def _host_function() -> Any:
    call = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    call.restype = ctypes.c_int
    return call


def call_on_host(stream: int, function: int, argument: int) -> None:
    """The C function `void(void*)` at this address is called by a thread of the driver's, behind everything on the
    stream and before anything queued later; in a stream that is captured, at every replay. The current context must be
    the stream's. What `argument` points to must live until then."""
    code = _host_function()(stream, function, argument)
    if code:
        raise RuntimeError(f"the driver refused a host function: error {code}")


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
