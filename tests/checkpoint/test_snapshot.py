"""Downloads into huggingface_hub's cache report their bytes and draw nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktransformers.checkpoint.hub import bar_class, fetch_snapshot
from ktransformers.ground import progress
from tests.support.cli import model_files
from tests.support.hub import Hub


def test_bytes_are_reported_and_files_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    """As huggingface_hub uses its bars: totals grow, one bar counts what was received and one what was written."""
    seen: list[tuple[str, float, float | None, str]] = []
    made = bar_class("tiny-moe")
    with progress.drawn_by(lambda *report: seen.append(report)):
        received, written = (made(total=0, initial=0, unit="B", unit_scale=True, name="x") for _ in range(2))
        files = made(total=2, desc="Fetching 2 files")
        received.total += 100
        received.update(40)
        written.total += 100
        written.update(30)
        files.update(1)
        for bar in (received, written, files):
            bar.refresh()
            bar.close()
    title = "Downloading tiny-moe"
    assert seen == [(title, 40, 100, "bytes"), (title, 40, 100, "bytes")]
    progress.report("no command draws it", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_snapshot_is_fetched_with_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float, float | None, str]] = []
    with Hub(model_files()) as hub, progress.drawn_by(lambda *report: seen.append(report)):
        directory = fetch_snapshot(hub.repo, cache_dir=tmp_path, endpoint=hub.url)
    assert (directory / "config.json").is_file()
    assert seen and {title for title, *_ in seen} == {"Downloading tiny-moe"}
    assert all(done <= (total or 0) for _, done, total, _ in seen)
