"""Progress: reported by long work, drawn by a command, or sent to a parent process as JSON lines; durations as text.

`kt loop` starts the verbs as child processes and draws one bar for all of them. It opens a pipe and names its end in
KT_PROGRESS; whatever a verb would draw on a terminal is then written there, whether or not it has a terminal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from ktransformers.ground import env
from ktransformers.ground.errors import InputError

Item = TypeVar("Item")
DrawProgress = Callable[[str, float, float | None, str], None]  # title, done, total, unit


@dataclass(frozen=True)
class ProgressEvent:
    title: str  # what is being done
    done: float = 0.0
    total: float | None = None  # None: unknown
    unit: str = ""  # items, `bytes`, or `%` for any other work
    remaining: float | None = None  # seconds, if the command has a better estimate than done / total
    values: dict[str, float] = field(default_factory=dict)  # of a training step: loss, tokens_per_second, memory


def descriptor() -> int | None:
    """The descriptor that KT_PROGRESS names, None if it is not set."""
    text = env.text("KT_PROGRESS")
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise InputError("KT_PROGRESS", repr(text), "the number of an open file descriptor")
    return int(text)


def send(event: ProgressEvent) -> None:
    """Writes the event if a parent asked for it; a parent that has closed its end is ignored."""
    target = descriptor()
    if target is None:
        return
    try:
        os.write(target, json.dumps(asdict(event)).encode() + b"\n")
    except OSError:
        return


_draw: DrawProgress | None = None


def report(title: str, done: float, total: float | None, unit: str = "") -> None:
    """Progress of long work inside of the package (packing, a download); nothing is shown unless a command draws it."""
    if _draw is not None:
        _draw(title, done, total, unit)


def counted(title: str, items: Sequence[Item]) -> Iterator[Item]:
    """The items, reported as they are taken."""
    for number, item in enumerate(items):
        report(title, number, len(items))
        yield item
    report(title, len(items), len(items))


@contextmanager
def drawn_by(draw: DrawProgress) -> Iterator[None]:
    """Passes what is reported, by any thread, to `draw`."""
    global _draw
    previous, _draw = _draw, draw
    try:
        yield
    finally:
        _draw = previous


def receive(lines: Iterable[bytes]) -> Iterator[ProgressEvent]:
    """The events of a stream; a line that is none, truncated by a kill for example, is skipped."""
    for line in lines:
        try:
            yield ProgressEvent(**json.loads(line))
        except (ValueError, TypeError):
            continue


def clock(seconds: float) -> str:
    """`0:42`, `4:10`, `1:02:03`: of a bar."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def rough(seconds: float) -> str:
    """`40 s`, `9 min`, `1.5 h`, `3 days`: of a sentence."""
    if seconds < 99.5:
        return f"{max(1, round(seconds))} s"
    if seconds < 5700:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.2g} h" if seconds < 48 * 3600 else f"{round(seconds / 86400)} days"
