"""`kt` on a pseudo terminal that a test types into: what is typed, what is awaited, what is on the screen."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import time
from typing import Any

import pyte

from tests.support.forked import SERVER
from tests.support.terminal import KT, _lines, _run_kt

CTRL_C, CTRL_D = "\x03", "\x04"


def _run_interruptible(name: str, words: tuple[str, ...], variables: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell ignore it
    _run_kt(name, KT, words, variables)


class TerminalSession:
    def __init__(self, *words: str, columns: int = 100, rows: int = 60, **variables: str) -> None:
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000)
        self._stream = pyte.ByteStream(self._screen)
        self._master, self._slave = pty.openpty()
        size = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
        arguments = (os.ttyname(self._slave), words, size | variables)
        self._child = SERVER.Process(target=_run_interruptible, args=arguments)
        self._child.start()
        self.raw = b""

    def __enter__(self) -> TerminalSession:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._child.is_alive():
            self._child.kill()
            self._child.join()
        os.close(self._master)
        os.close(self._slave)

    @property
    def lines(self) -> list[str]:
        return _lines(self._screen)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def _read(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        data = os.read(self._master, 65536)
        self.raw += data
        self._stream.feed(data)
        return True

    def wait_for(self, pattern: str, seconds: float = 60.0, times: int = 1) -> None:
        """Until the screen shows what the regular expression matches, this many times; spaces at the end of a line are
        not seen."""
        end = time.monotonic() + seconds
        while len(re.findall(pattern, self.text, re.MULTILINE)) < times:
            if time.monotonic() > end or (not self._child.is_alive() and not self._read(0)):
                raise AssertionError(f"no {pattern!r} {times} times in:\n{self.text}")
            self._read(0.05)

    def wait_for_question(self, seconds: float = 60.0) -> None:
        """Until the last line ends in a colon and nothing more comes: a question that waits for its answer."""
        end = time.monotonic() + seconds
        while self._read(0.2) or not self.text.endswith(":"):
            if time.monotonic() > end or not self._child.is_alive():
                raise AssertionError(f"no question in:\n{self.text}")

    def wait(self, seconds: float = 60.0) -> int | None:
        """The exit status."""
        end = time.monotonic() + seconds
        while self._child.is_alive() or select.select([self._master], [], [], 0)[0]:
            if time.monotonic() > end:
                raise AssertionError(f"no end after {seconds} s:\n{self.text}")
            self._read(0.05)
        self._child.join(30)
        return self._child.exitcode
