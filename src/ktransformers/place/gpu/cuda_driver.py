"""The driver's own calls, found in its library when they are first wanted: copies to the device and host functions. A
layer takes a hundred copies, and torch spends ten times as long on each, in the thread that everything else waits for;
so the core calls the driver for all of them. Host functions torch does not offer at all."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ktransformers import _core


@functools.cache
def _copy() -> int:
    """Its address."""
    address = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2, ctypes.c_void_p).value
    assert address is not None
    return address


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


Run = tuple[int, int, int]  # neighbouring rows: the first one's number here, there, and how many


def rows_of(runs: Sequence[Run], target: Tensor, source: Tensor) -> NDArray[np.uint64]:
    """As (target, source, bytes), for buffers `[n, bytes]`."""
    found = np.array(runs, np.uint64)
    step = np.uint64(target.shape[1])
    here, there, count = (found[:, column] * step for column in range(3))
    return np.stack((there + np.uint64(target.data_ptr()), here + np.uint64(source.data_ptr()), count), 1)


def copy_to_device(runs: Sequence[Run], pairs: Sequence[tuple[Tensor, Tensor]], stream: int) -> None:
    """The same rows of every (target, source), behind everything on the stream; sources are known to the driver."""
    rows = np.concatenate([rows_of(runs, *pair) for pair in pairs])
    if code := _core.copy_rows(_copy(), rows, stream):
        raise RuntimeError(f"the driver refused a copy of {int(rows[:, 2].sum())} bytes to the GPU: error {code}")
