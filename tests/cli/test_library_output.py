"""Warnings while a verb runs: one line `kt: package: text`, without the path of a file; ours in the same style."""

from __future__ import annotations

import logging
import warnings

import pytest

from ktransformers.cli.library_output import library_output
from ktransformers.cli.progress import set_quiet

PEFT_FILE = "/venv/lib/python3.12/site-packages/peft/tuners/tuners_utils.py"
PATTERNS = "The following rank_pattern keys did not match any targeted module and were ignored: ['.*\\.gate_up_proj']."


def test_warnings_have_one_style(capsys: pytest.CaptureFixture[str]) -> None:
    set_quiet(False)
    ours = logging.getLogger("ktransformers.place")
    root, handlers = logging.getLogger(), logging.getLogger().handlers[:]
    root.handlers = []  # as in a process that is no test
    before = logging.getLogger("ktransformers").handlers[:]
    try:
        with library_output(), warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn_explicit("a weight is odd\nand more", RuntimeWarning, PEFT_FILE, 12)
            warnings.warn_explicit(PATTERNS, RuntimeWarning, PEFT_FILE, 1123)
            warnings.warn_explicit("of a script", UserWarning, "script.py", 3)
            ours.warning("no CUDA device")
    finally:
        root.handlers = handlers
    assert capsys.readouterr().err.splitlines() == [
        *("kt: peft: a weight is odd", "kt: of a script", "kt: no CUDA device"),
    ]
    assert logging.getLogger("ktransformers").handlers == before
