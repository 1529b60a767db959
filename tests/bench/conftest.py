"""Benches run as a user runs them, or by their `main` in this process, which has torch already.

In this process there is one round, and readings of the machine's rates are short and take little memory: they would be
most of the time of a test, which does not judge them.
"""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
Run = Callable[..., tuple[list[str], dict[str, Any]]]


@pytest.fixture
def run_script() -> Run:
    """Lines of the table, and the document of the last line."""

    def run(name: str, *options: str, status: int = 0) -> tuple[list[str], dict[str, Any]]:
        command = [sys.executable, str(BENCH / f"{name}.py"), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == status, done.stdout + done.stderr
        *table, last = done.stdout.splitlines()
        return table, json.loads(last)

    return run


@pytest.fixture
def main_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[list[str]], int]]:
    """A bench by name: its `main`, with short readings."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("KT_PLACE", "cpu")  # a bench may set it for its process: undone after the test,
    monkeypatch.delenv("KT_PLACE")  # and not set before
    monkeypatch.delitem(sys.modules, "place", raising=False)  # tests/place has the name of bench/place.py
    timing = importlib.import_module("timing")
    reader = functools.partialmethod(timing.Yardstick.__init__, seconds=0.001)
    monkeypatch.setattr(timing.Yardstick, "__init__", reader)
    monkeypatch.setattr(timing, "READ_BYTES", 1 << 22)
    for name in ("timing", "layer_bench", "moe", "sweeps"):
        monkeypatch.setattr(importlib.import_module(name), "SETTLE", 0.0)
    for name in ("layer_bench", "moe"):
        monkeypatch.setattr(importlib.import_module(name), "ROUNDS", 1)

    def of(name: str) -> Callable[[list[str]], int]:
        main: Callable[[list[str]], int] = importlib.import_module(name).main
        return main

    return of


@pytest.fixture
def run_bench(main_of: Callable[[str], Callable[[list[str]], int]], capsys: pytest.CaptureFixture[str]) -> Run:
    """As `run_script`, in this process."""

    def run(name: str, *options: str, status: int = 0) -> tuple[list[str], dict[str, Any]]:
        code = main_of(name)(list(options))
        printed = capsys.readouterr()
        assert code == status, printed.out + printed.err
        *table, last = printed.out.splitlines()
        return table, json.loads(last)

    return run


@pytest.fixture
def refused(
    main_of: Callable[[str], Callable[[list[str]], int]], capsys: pytest.CaptureFixture[str]
) -> Callable[[str, list[str]], str]:
    """What a bench says to options that it does not take."""

    def refuse(name: str, options: list[str]) -> str:
        with pytest.raises(SystemExit) as ended:
            main_of(name)(options)
        assert ended.value.code == 2
        return capsys.readouterr().err

    return refuse
