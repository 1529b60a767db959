"""Progress of long work: a bar on a terminal, a line now and then elsewhere, events for a parent process, nothing with
--quiet; colours on a terminal alone."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

import pytest
from rich.console import Console

from ktransformers import progress as events
from ktransformers.cli import progress
from ktransformers.cli.progress import PlainProgress, TimeLeft, format_amount, make_bar, progress_bar
from ktransformers.errors import InputError
from ktransformers.progress import ProgressEvent, clock, receive, rough


@pytest.fixture(autouse=True)
def spoken() -> Iterator[None]:
    progress.set_quiet(False)
    yield
    progress.set_quiet(False)


class FakeClock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_durations_and_amounts() -> None:
    assert [clock(seconds) for seconds in (0.4, 61, 3723)] == ["0:00", "1:01", "1:02:03"]
    assert [rough(seconds) for seconds in (0.2, 42, 140, 5400, 9000, 200_000)] == [
        "1 s",
        "42 s",
        "2 min",
        "90 min",
        "2.5 h",
        "2 days",
    ]
    assert format_amount(3, 8, "") == "3/8" and format_amount(3, None, "") == ""
    assert format_amount(3e9, 4e9, "bytes") == "3.0 of 4.0 GB" and format_amount(1e6, 4e6, "bytes") == "1.0 of 4.0 MB"
    assert format_amount(1, 4, "%") == "25%"


def test_time_left_counts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, left = FakeClock(monkeypatch), TimeLeft()
    left.report(40, 100)
    assert left.seconds is None and left.text == "", "what was done before says nothing about the pace"
    fake.now += 10
    left.report(50, 100)
    assert left.seconds == pytest.approx(50)
    fake.now += 20
    assert left.text == "0:30 left"
    fake.now += 40
    assert left.text == "a moment left"
    left.report(60, 100, remaining=5.0)
    assert left.text == "0:05 left", "the command's own estimate"
    left.report(0, 7)
    assert left.text == "", "other work"


def test_plain_lines_are_rare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake, report = FakeClock(monkeypatch), PlainProgress("Converting", "bytes")
    for done in range(100):
        report(done * 10**9, 100 * 10**9)
        fake.now += 1.0
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "kt: Converting: 30.0 of 100.0 GB, 1:10 left",
        "kt: Converting: 60.0 of 100.0 GB, 0:40 left",
        "kt: Converting: 90.0 of 100.0 GB, 0:10 left",
    ]


def test_quiet_work_says_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    with progress_bar("Working") as report:
        report(1, 2)
    assert capsys.readouterr().err == "kt: Working: 1/2\n"
    with progress_bar("Working", quiet=True) as report:
        report(1, 2)
    progress.set_quiet(True)
    with progress_bar("Working") as report:
        report(1, 2)
    progress.log("a note")
    assert capsys.readouterr() == ("", "")


def test_parent_gets_the_events(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also from a quiet command: a parent draws them."""
    reading, writing = os.pipe()
    monkeypatch.setenv("KT_PROGRESS", str(writing))
    with progress_bar("Loading", quiet=True, unit="bytes") as report:
        report(1, 2, "Converting")
    os.write(writing, b'{"title": "cut off')
    os.close(writing)
    events.send(ProgressEvent("nobody listens"))
    with os.fdopen(reading, "rb") as stream:
        assert list(receive(stream)) == [
            ProgressEvent("Loading", unit="bytes"),
            ProgressEvent("Converting", 1, 2, "bytes"),
        ]
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("KT_PROGRESS", "stderr")
    with pytest.raises(InputError, match="KT_PROGRESS"):
        events.send(ProgressEvent("x"))


@pytest.mark.parametrize(("terminal", "coloured"), [(True, True), (False, False)])
def test_colours_need_a_terminal(terminal: bool, coloured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=80)
    with make_bar(console) as bar:
        bar.add_task("Working", total=4, completed=1, amount="1/4", detail="", left=TimeLeft())
        bar.refresh()
    assert ("\x1b[" in stream.getvalue()) is coloured


def test_errors_are_not_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    progress.set_quiet(True)
    progress.error("not proven: layer 3")
    assert capsys.readouterr().err == "kt: not proven: layer 3\n"
