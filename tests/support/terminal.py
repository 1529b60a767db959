"""A command on a pseudo terminal, and what its user sees: the screen that an emulator draws from the bytes."""

from __future__ import annotations

import os
import pty
import select
import sys
import time
from dataclasses import dataclass

import pyte

from tests.support.forked import SERVER


@dataclass(frozen=True)
class TerminalRun:
    code: int | None
    lines: list[str]  # at the end, scrolled ones first, without empty lines at the end
    frames: list[str]  # every text that the last drawn line had, in order, without repetitions
    raw: bytes


KT = "from ktransformers.cli.main import main; main()"


def _run_kt(name: str, code: str, words: tuple[str, ...], variables: dict[str, str]) -> None:
    """The code in a fork of the fork server, on the terminal of this name."""
    os.setsid()
    terminal = os.open(name, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(terminal, descriptor)
    for variable in [variable for variable in os.environ if variable.startswith("KT_")] + ["NO_COLOR", "FORCE_COLOR"]:
        os.environ.pop(variable, None)
    os.environ |= variables
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    sys.argv = ["kt", *words]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def run_on_terminal(
    *words: str, columns: int = 100, seconds: float = 120.0, code: str = KT, **variables: str
) -> TerminalRun:
    """Runs `kt` with stdin, stdout and stderr on a terminal of this width."""
    screen = pyte.HistoryScreen(columns, 60, history=10_000)
    stream = pyte.ByteStream(screen)
    master, slave = pty.openpty()
    variables = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "60"} | variables
    child = SERVER.Process(target=_run_kt, args=(os.ttyname(slave), code, words, variables))
    child.start()
    raw, frames, end = b"", list[str](), time.monotonic() + seconds
    try:
        while child.is_alive() or select.select([master], [], [], 0)[0]:
            if time.monotonic() > end:
                raise AssertionError(f"no end after {seconds} s:\n" + "\n".join(_lines(screen)))
            if not select.select([master], [], [], 0.05)[0]:
                continue
            data = os.read(master, 65536)
            raw += data
            stream.feed(data)
            last = _lines(screen)[-1:]
            if last and (not frames or frames[-1] != last[0]):
                frames.append(last[0])
        child.join(30)
    finally:
        if child.is_alive():
            child.kill()
            child.join()
        os.close(master)
        os.close(slave)
    return TerminalRun(child.exitcode, _lines(screen), frames, raw)


def _lines(screen: pyte.HistoryScreen) -> list[str]:
    scrolled = ["".join(line[column].data for column in range(screen.columns)) for line in screen.history.top]
    lines = [line.rstrip() for line in (*scrolled, *screen.display)]
    while lines and not lines[-1]:
        lines.pop()
    return lines
