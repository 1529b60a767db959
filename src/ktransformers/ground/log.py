"""The logger `ktransformers`, silent unless KT_LOG or the application configures it.

With KT_LOG set, records go to stderr in the format of the native core ("kt: ..."). A command with a run directory keeps
its records in a file there too, with those of the packages that it uses (`FileLog`): details that a terminal does not
show.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from logging.handlers import MemoryHandler
from pathlib import Path

from ktransformers.ground import env
from ktransformers.ground.errors import InputError

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
NEVER = logging.CRITICAL + 1


class StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is at the time of a record: a bar that is being drawn replaces it, so that lines
    appear above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def level() -> int | None:
    """The level that the environment requests, None if none."""
    name = env.text("KT_LOG").lower()
    if name:
        if name not in LEVELS:
            raise InputError("KT_LOG", repr(name), "one of " + ", ".join(LEVELS))
        return LEVELS[name]
    return logging.DEBUG if env.text("KT_KERNEL_DEBUG") == "1" else None


def logger(name: str) -> logging.Logger:
    """The logger of a module; call with `__name__`."""
    requested = level()
    if requested is not None and not logging.getLogger("ktransformers").handlers:
        show(requested)
    return logging.getLogger(name)


def show(lowest: int) -> None:
    """Write records from this level up to stderr, and still those that the environment asks for."""
    root = logging.getLogger("ktransformers")
    handler = next((handler for handler in root.handlers if isinstance(handler, StderrHandler)), None)
    if handler is None:
        handler = StderrHandler()
        handler.setFormatter(logging.Formatter("kt: %(message)s"))
        root.addHandler(handler)
        root.propagate = False
    requested = level()
    handler.setLevel(lowest if requested is None else min(lowest, requested))
    root.setLevel(min(handler.level for handler in root.handlers))


class _FileFormat(logging.Formatter):
    """Time and message, with the name of a package that is not ours."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        name = record.name.partition(".")[0]
        time = self.formatTime(record, "%Y-%m-%d %H:%M:%S")
        return f"{time} {line}" if name == "ktransformers" else f"{time} {name}: {line}"


class FileLog:
    """Records from INFO up, of ktransformers and of other loggers, for a file whose directory is known later: they are
    kept until `open` and lost without it."""

    def __init__(self, others: Iterable[str] = ()) -> None:
        self._loggers = [logging.getLogger(name) for name in ("ktransformers", *others)]
        self._before = [(found.level, found.propagate) for found in self._loggers]
        self._handler: logging.Handler = MemoryHandler(2**20, flushLevel=NEVER, flushOnClose=False)
        self._attach()

    def _attach(self) -> None:
        self._handler.setLevel(logging.INFO)
        for found in self._loggers:
            found.addHandler(self._handler)
        root = self._loggers[0]
        root.setLevel(min(handler.level for handler in root.handlers))
        root.propagate = False

    def open(self, file: Path) -> None:
        """Appends to the file; later calls change nothing."""
        kept = self._handler
        if not isinstance(kept, MemoryHandler):
            return
        target = logging.FileHandler(file, encoding="utf-8")
        target.setFormatter(_FileFormat())
        kept.setTarget(target)
        kept.flush()
        self._detach()
        self._handler = target
        self._attach()

    def _detach(self) -> None:
        for found in self._loggers:
            found.removeHandler(self._handler)

    def close(self) -> None:
        self._detach()
        self._handler.close()
        for found, (level, propagate) in zip(self._loggers, self._before, strict=True):
            found.setLevel(level)
            found.propagate = propagate
