"""Progress of long work: a bar on a terminal, a line now and then elsewhere, events for a parent process, nothing with
--quiet; colours on a terminal alone."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from ktransformers.cli import progress
from ktransformers.cli.progress import PlainProgress, TimeLeft, drawn_reports, format_amount, make_bar, progress_bar
from ktransformers.ground import progress as events
from ktransformers.ground.errors import InputError
from ktransformers.ground.progress import ProgressEvent, clock, receive, rough
from tests.support.cli import RunKt, write_model


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


def test_items_are_counted_and_drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    assert list(events.counted("Unheard", "ab")) == ["a", "b"], "without a command that draws it"
    with drawn_reports():
        assert list(events.counted("First", "ab")) == ["a", "b"]
        events.report("Second", 5, 10, "%")
    events.report("Third", 1, 2)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        *("kt: First: 0/2", "kt: First: 1/2", "kt: First: 2/2", "kt: Second: 50%")
    ]
    with drawn_reports(quiet=True):
        events.report("Fourth", 1, 2)
    assert capsys.readouterr().err == ""


def test_hashes_are_counted_in_bytes(kt: RunKt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    model = write_model(tmp_path / "m")
    added = kt("model", "add", str(model), "--hash")
    assert "kt: Hashing: 0.0 of 0.0 MB" in added.error
    assert "kt: Checking hashes: 0.0 of 0.0 MB" in kt("model", "verify", "m").error
    assert kt("model", "verify", "m", "--json").error == "" and kt("model", "verify", "m", "-q").error == ""


BAR_AND_RESULT = """
from ktransformers.cli.progress import progress_bar
with progress_bar("Working", still=STILL) as report:
    for number in range(3):
        report(number, 3)
        print("row", number)
"""


@pytest.mark.parametrize("still", [True, False])
def test_results_are_not_diverted_by_a_bar(still: bool) -> None:
    """A bar on a terminal, stdout in a pipe."""
    ours, theirs = pty.openpty()
    code = BAR_AND_RESULT.replace("STILL", str(still))
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=theirs, text=True, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    drawn = os.read(ours, 65536).decode()
    os.close(ours)
    assert done.stdout == "row 0\nrow 1\nrow 2\n" and "row" not in drawn and "Working" in drawn
