"""What all tests share: the variants to run over, and skipping what needs a GPU."""

from __future__ import annotations

import functools
import os

import pytest

from ktransformers.ground.openmp import limit_spinning
from tests.support.variants import FLOATS_OF_ANOTHER, ROUNDING, TESTS_OF_ALL

limit_spinning()  # before torch is imported: two processes side by side would spend more than half of their time on it


@functools.cache
def runnable_isas(module: str) -> list[str]:
    """Every variant of this build that runs here, natively or emulated, and that tests of `module` are about."""
    from ktransformers import _core

    left_out = () if module in TESTS_OF_ALL else FLOATS_OF_ANOTHER
    return [
        variant["name"]
        for variant in _core.variants()
        if variant["native"] or (variant["emulated"] and variant["name"] not in left_out)
    ]


@functools.cache
def exact_kinds() -> list[tuple[str, str]]:
    """(variant, precision) of every kind that runs here and does not round weights to bf16."""
    from ktransformers import _core

    runnable = [variant for variant in _core.variants() if variant["native"] or variant["emulated"]]
    return [(variant["name"], kind) for variant in runnable for kind in variant["precisions"] if kind != "bf16"]


def pytest_configure() -> None:
    """Tests hold experts against stock models in float32, to 1e-4. So where nobody says otherwise, and the best variant
    here rounds activations, the best one computes that has float32 kernels. Tests with an argument `isa` have every
    variant all the same. With `KT_ISA=amx` everything is on tiles, and some 120 tests miss their 1e-4 by that
    rounding."""
    if "KT_ISA" in os.environ or "KT_KERNEL_CPU_VARIANT" in os.environ:
        return
    from ktransformers import _core

    native = [variant for variant in _core.variants() if variant["native"]]
    if native[-1]["name"] in ROUNDING:
        exact = [variant["name"] for variant in native if "f32" in variant["precisions"]]
        os.environ["KT_ISA"] = exact[-1]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `isa` runs once for each variant, one with `exact` for each (isa, precision) of those
    that compute unrounded."""
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", runnable_isas(metafunc.module.__name__.rpartition(".")[2]))
    if "exact" in metafunc.fixturenames:
        metafunc.parametrize("exact", exact_kinds(), ids="-".join)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
