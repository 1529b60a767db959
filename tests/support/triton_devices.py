"""Where a test runs Triton kernels: in Triton's interpreter on the CPU if TRITON_INTERPRET=1, and on a GPU."""

from __future__ import annotations

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

triton_devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", id="interpreted", marks=pytest.mark.skipif(not INTERPRETED, reason="no interpreter")),
        pytest.param("cuda:0", id="gpu", marks=pytest.mark.gpu),
    ],
)
