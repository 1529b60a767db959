"""Lines and progress bars on stderr, so that stdout has only what a command prints.

On a terminal progress is one line that is redrawn: what is done, a bar, how much of it, the time left. Elsewhere it is
a line every half minute, so that a log stays short. With `--quiet` there is neither, and with KT_PROGRESS both go to
the program that started this one (`ktransformers.ground.progress`). Colours are rich's, which leaves them out unless
stderr is a terminal, and with NO_COLOR."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

from ktransformers.ground import progress
from ktransformers.ground.progress import DrawProgress, ProgressEvent, clock

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, Task, TaskID

PLAIN_SECONDS = 30.0  # between two lines without a terminal
BAR_WIDTH, MIN_BAR_WIDTH = 24, 6
OTHER_WIDTH = 30  # characters of title, amount, time left and the spaces between them

_quiet = False


def set_quiet(quiet: bool) -> None:
    """`--quiet`: results and errors alone."""
    global _quiet
    _quiet = quiet


def is_quiet() -> bool:
    return _quiet


def log(line: str) -> None:
    """A line on stderr; its beginning is what a parent process shows of it."""
    progress.send(ProgressEvent(line.partition(":")[0]))
    if not _quiet:
        print(f"kt: {line}", file=sys.stderr, flush=True)


def error(line: str) -> None:
    """A line that `--quiet` leaves."""
    print(f"kt: {line}", file=sys.stderr, flush=True)


class ReportProgress(Protocol):
    """Called with the number of items or bytes that are done and in total, and a new title if it changes."""

    def __call__(self, done: float, total: float | None, title: str | None = None, /) -> None: ...


class TimeLeft:
    """Seconds left from the share that is done, counted down between two reports. Another total is other work."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._total: float | None = None
        self._first: float | None = None  # what was done at the first report
        self._end: float | None = None  # by the clock

    def report(self, done: float, total: float | None, remaining: float | None = None) -> None:
        """`remaining`: the command's own estimate."""
        now = time.monotonic()
        if self._first is None or total != self._total:  # what an earlier run has done took no time in this one
            self._total, self._first, self._started, self._end = total, done, now, None
        if remaining is None and total and done > self._first:
            remaining = (now - self._started) / (done - self._first) * (total - done)
        if remaining is not None:
            self._end = now + remaining

    @property
    def seconds(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    @property
    def text(self) -> str:
        """`1:10 left`; empty if nothing is known."""
        seconds = self.seconds
        return "" if seconds is None else f"{clock(seconds)} left" if seconds >= 0.5 else "a moment left"


def format_amount(done: float, total: float | None, unit: str) -> str:
    """`12/48`, `1.2 of 3.4 GB`, `25%`; empty without a total."""
    if not total:
        return ""
    if unit == "%":
        return f"{done / total:.0%}"
    if unit != "bytes":
        return f"{done:.0f}/{total:.0f}"
    scale, unit = (1e9, "GB") if total >= 5e8 else (1e6, "MB")
    return f"{done / scale:.1f} of {total / scale:.1f} {unit}"


def make_bar(console: Console, detail_width: int = 0, *, still: bool = False) -> Progress:
    """A redrawn line: title, bar, amount, details, time left. Fields of a task: `amount` and `detail`, texts, and
    `left`, a TimeLeft. `detail_width`: characters that the bar leaves to the details. `still`: no thread redraws it."""
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
    from rich.table import Column
    from rich.text import Text

    class Left(ProgressColumn):
        """Counts down, or up if nothing is known of the end."""

        def render(self, task: Task) -> Text:
            left: TimeLeft = task.fields["left"]
            return Text(left.text or clock(task.elapsed or 0.0))

    def text(field: str) -> TextColumn:
        return TextColumn(f"{{task.{field}}}", markup=False, table_column=Column(no_wrap=True))

    width = max(MIN_BAR_WIDTH, min(BAR_WIDTH, console.width - OTHER_WIDTH - detail_width))
    left = Left(table_column=Column(no_wrap=True))
    columns = (text("description"), BarColumn(bar_width=width), text("fields[amount]"), text("fields[detail]"), left)
    # rich prints what goes to stdout above the bar, through the bar's console: only if both are the same terminal.
    shared = sys.stdout.isatty()
    return Progress(*columns, console=console, transient=True, redirect_stdout=shared, auto_refresh=not still)


class _Bar:
    def __init__(self, bar: Progress, title: str, unit: str, still: bool) -> None:
        self._bar, self._unit, self._still, self._left = bar, unit, still, TimeLeft()
        self._task: TaskID = bar.add_task(title, total=None, amount="", detail="", left=self._left)

    def __call__(self, done: float, total: float | None, title: str | None = None, /) -> None:
        self._left.report(done, total)
        amount = format_amount(done, total, self._unit)
        self._bar.update(self._task, completed=done, total=total, description=title, amount=amount, refresh=self._still)


class PlainProgress:
    """A line from time to time: `kt: persona: 32/48, 1:10 left`."""

    def __init__(self, title: str, unit: str = "") -> None:
        self._title, self._unit = title, unit
        self._last, self._left = time.monotonic(), TimeLeft()

    def __call__(self, done: float, total: float | None, title: str | None = None, /) -> None:
        self._left.report(done, total)
        self._title = title or self._title
        if time.monotonic() - self._last < PLAIN_SECONDS or not total:
            return
        self._last = time.monotonic()
        log(", ".join([f"{self._title}: {format_amount(done, total, self._unit)}", *filter(None, [self._left.text])]))


class _SentProgress:
    """To the program that started this one."""

    def __init__(self, title: str, unit: str) -> None:
        self._title, self._unit = title, unit
        progress.send(ProgressEvent(title, unit=unit))

    def __call__(self, done: float, total: float | None, title: str | None = None, /) -> None:
        self._title = title or self._title
        progress.send(ProgressEvent(self._title, done, total, self._unit))


def no_progress(done: float, total: float | None, title: str | None = None, /) -> None:
    """Where nothing is shown."""


@contextmanager
def progress_bar(title: str, *, quiet: bool = False, unit: str = "", still: bool = False) -> Iterator[ReportProgress]:
    """`unit` of what is counted: empty for items, `bytes`, or `%` for any other work. `still`: for work that is being
    timed, redrawn only when something is reported."""
    if progress.descriptor() is not None:
        yield _SentProgress(title, unit)
    elif quiet or _quiet:
        yield no_progress
    elif not sys.stderr.isatty():
        yield PlainProgress(title, unit)
    else:
        from rich.console import Console

        with make_bar(Console(stderr=True), still=still) as bar:
            yield _Bar(bar, title, unit, still)


@contextmanager
def drawn_reports(quiet: bool = False) -> Iterator[DrawProgress]:
    """Draws what packages report (`ktransformers.ground.progress.report`), each title as a bar; yields what draws
    it."""
    with ExitStack() as bars:
        current: dict[str, ReportProgress] = {}

        def draw(title: str, done: float, total: float | None, unit: str) -> None:
            if title not in current:
                bars.close()
                current.clear()
                current[title] = bars.enter_context(progress_bar(title, quiet=quiet, unit=unit))
            current[title](done, total)
            if done == total:
                bars.close()
                current.clear()

        with progress.drawn_by(draw):
            yield draw
