"""Warnings and bars while a verb runs: a line `kt: package: text` without the path of a file; bars of one look."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from ktransformers.cli.library_output import library_output
from ktransformers.cli.progress import set_quiet
from tests.support.tiny_models import build

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
        *("kt: peft: a weight is odd", "kt: of a script", "kt: no CUDA device")
    ]
    assert logging.getLogger("ktransformers").handlers == before


def test_bars_of_transformers_are_drawn_as_ours(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    drawn: list[tuple[str, float, float | None, str]] = []
    model = build("qwen3_moe")
    with library_output(lambda *report: drawn.append(report)):
        model.save_pretrained(tmp_path)
    assert drawn == [("Writing model shards", 1, 1, "")]
    assert capfd.readouterr().err == "", "no bar of tqdm beside ours"
    with library_output():  # piped: a line only of long work
        model.save_pretrained(tmp_path)
    assert capfd.readouterr().err == ""
