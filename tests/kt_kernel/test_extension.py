"""`kt_kernel_ext.CPUInfer` without CUDA: tasks run in order, waiting leaves as many as allowed."""

from __future__ import annotations

import ctypes
import threading

import pytest

from kt_kernel.kt_kernel_ext import CPUInfer, WorkerPoolConfig


def c_function(act: object) -> tuple[object, int]:
    """(what keeps it alive, its address)"""
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(act)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return function, address


def test_tasks_run_in_order() -> None:
    infer = CPUInfer(WorkerPoolConfig(2, [0, 0], [3, 2]))
    assert infer.backend_.threads == 5
    seen: list[int] = []
    alive, address = c_function(lambda number: seen.append(number or 0))
    for number in range(1, 101):
        infer.submit((address, number))
    infer.sync()
    assert seen == list(range(1, 101)) and alive is not None


def test_waiting_for_all_but_some() -> None:
    infer = CPUInfer(1)
    release = threading.Event()
    seen: list[int] = []
    first, quick = c_function(lambda number: seen.append(number or 0))
    second, slow = c_function(lambda _: release.wait(20))
    infer.submit((quick, 1))
    infer.submit((slow, 0))
    infer.sync(1)
    assert seen == [1]
    infer.submit((quick, 2))
    release.set()
    infer.sync()
    assert seen == [1, 2] and first is not None and second is not None


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="threads"):
        CPUInfer(0)
    infer = CPUInfer(1)
    infer.sync()  # nothing was submitted
    with pytest.raises(ValueError, match="function"):
        infer.submit((0, 0))
