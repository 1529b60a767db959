"""Functions of the CUDA driver library, loaded on first use: asynchronous copies to the device and host callbacks.
Streaming a layer takes about a hundred copies, and torch spends ten times as long as the driver on launching each, in
the thread that launches everything else; so the core calls the driver for all of them. torch has no host callbacks."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktransformers import _core


@functools.cache
def _copy_function() -> int:
    """Address of cuMemcpyHtoDAsync."""
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
    """Queue a call of the C function `void(void*)` at this address on the stream; a driver thread makes it, at every
    replay if the stream is captured. The current context must be the stream's. What `argument` points to must outlive
    the call."""
    code = _host_function()(stream, function, argument)
    if code:
        raise RuntimeError(f"cuLaunchHostFunc failed with CUDA error {code}")


def copy_to_device(rows: NDArray[np.uint64], stream: int) -> None:
    """Queue copies (target address, source address, bytes) on the stream; sources are registered or pinned."""
    if code := _core.copy_rows(_copy_function(), rows, stream):
        raise RuntimeError(f"copying {int(rows[:, 2].sum())} bytes to the GPU failed with CUDA error {code}")
