"""Lines and progress bars on stderr, so that stdout has only what a command prints. A bar needs a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def log(line: str) -> None:
    print(f"kt: {line}", file=sys.stderr, flush=True)


class ProgressBar:
    """Called with the number of items or bytes that are done and in total, and a new title if it changes."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def __call__(self, done: int, total: int | None, title: str | None = None) -> None:
        self._progress.update(self._task, completed=done, total=total, description=title)


@contextmanager
def progress_bar(title: str, *, quiet: bool = False, in_bytes: bool = False) -> Iterator[ProgressBar | None]:
    """None without a terminal, or if `quiet`."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    units = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *units, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield ProgressBar(progress, progress.add_task(title, total=None))
