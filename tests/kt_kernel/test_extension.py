"""`kt_kernel_ext`: the variant that is loaded, and `CPUInfer` without CUDA, whose tasks run in order."""

from __future__ import annotations

import ctypes
import threading

import pytest

from kt_kernel.kt_kernel_ext import CPUInfer, WorkerPoolConfig
from ktransformers import _core
from tests.support.forked import python


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


def test_streams_are_there_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of kt-kernel's guide."""
    for available in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda available=available: available)
        assert hasattr(CPUInfer(4), "submit_with_cuda_stream") is available
        assert hasattr(CPUInfer(4), "sync_with_cuda_stream") is available


def test_variant_is_the_one_that_is_loaded() -> None:
    program = "import kt_kernel; print(kt_kernel.__cpu_variant__, kt_kernel.__int8_kernel__)"
    usable = {variant["name"] for variant in _core.variants() if variant["native"] or variant["emulated"]}
    names = {"generic": "generic", "avx2": "avx2", "avx512": "avx512_base", "avx512_vnni": "avx512_vnni", "amx": "amx"}
    kernels = {"amx": "amx-int8", "avx512_base": "avx512-vnni", "avx512_vnni": "avx512-vnni"}
    for ours, theirs in names.items():
        if ours in usable:
            words = python(program, KT_ISA=ours).stdout.split()
            assert words == [theirs, kernels.get(theirs, "ktransformers")]
    wrong = python(program, KT_KERNEL_CPU_VARIANT="avx3")
    assert wrong.returncode == 1 and "KT_KERNEL_CPU_VARIANT=avx3" in wrong.stderr


def test_debug_switch_shows_the_detection() -> None:
    done = python("import kt_kernel", KT_KERNEL_DEBUG="1")
    assert done.returncode == 0 and "chosen, the best native one" in done.stderr
    assert not python("import kt_kernel").stderr
