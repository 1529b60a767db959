"""Spinning of OpenMP threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_openmp_spin_count_is_set_unless_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    from ktransformers.ground.openmp import SPIN_COUNT, USER_VARIABLES, limit_spinning

    for name in USER_VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is as it was afterwards
        monkeypatch.delenv(name)
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == SPIN_COUNT
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
    done = subprocess.run(
        [sys.executable, "-c", "import sys; import ktransformers.ground.openmp; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "False\n", "too late: torch has loaded libgomp by now"
