"""Spinning of OpenMP threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_openmp_spin_count_is_set_unless_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    from ktransformers.openmp import KNOWN, SPINS, rest_soon

    for name in KNOWN:
        monkeypatch.setenv(name, "")  # so that it is as it was afterwards
        monkeypatch.delenv(name)
    rest_soon()
    assert os.environ["GOMP_SPINCOUNT"] == SPINS
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    rest_soon()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    rest_soon()
    assert "GOMP_SPINCOUNT" not in os.environ
    done = subprocess.run(
        [sys.executable, "-c", "import sys; import ktransformers.openmp; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "False\n", "too late: torch has loaded libgomp by now"
