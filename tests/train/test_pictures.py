"""The pictures of a run: drawn while it trains, complete at the end, without matplotlib as SVG alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from ktransformers.train import pictures
from ktransformers.train.callbacks import ExpertClock, PeakRates, TrainLog
from ktransformers.train.pictures import LivePicture, draw_final, plot_loss


def points(file: Path) -> list[int]:
    """Points of each curve."""
    lines = ElementTree.parse(file).getroot().findall(".//{*}polyline")
    return [len(line.attrib["points"].split()) for line in lines]


def write_log(folder: Path, steps: int) -> None:
    lines = [{"current_steps": step, "loss": 1 / step, "lr": 1e-4, "grad_norm": 2.0} for step in range(1, steps + 1)]
    (folder / "trainer_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_picture_follows_the_log_and_a_resumed_run_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "MAX_SHARE", 1e9)  # every drawing
    write_log(tmp_path, 3)
    clock = ExpertClock(torch.nn.Module())
    clock.peak_rates = PeakRates(1e9, 1e9)
    log = TrainLog(tmp_path, clock, lambda progress: None)
    state = SimpleNamespace(is_world_process_zero=True, global_step=2, max_steps=9, epoch=0.0)
    log.on_train_begin(None, state, None)
    for step in (3, 4):
        state.global_step = step
        log.on_log(None, state, None, {"loss": 0.5, "learning_rate": 1e-4, "grad_norm": 1.5})
        assert points(tmp_path / "training.svg") == [step, step, step], "step 3 of the killed run is not drawn twice"
    assert not list(tmp_path.glob(".*partial"))


def test_drawing_takes_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def draw(lines: object) -> str:
        now[0] += 1.0  # seconds
        return f"drawing {now[0]:.0f}"

    monkeypatch.setattr(pictures, "run_picture", draw)
    monkeypatch.setattr(pictures.time, "perf_counter", lambda: now[0])
    picture, lines = LivePicture(tmp_path), [{"current_steps": 1}]
    picture.draw([])
    assert not (tmp_path / "training.svg").exists(), "nothing is logged yet"
    drawn = 0
    for _ in range(200):
        before = now[0]
        picture.draw(lines)
        drawn += now[0] > before
        now[0] += 1.0
    assert drawn == 4, "1 s in 50"
    picture.draw(lines, is_last=True)
    assert (tmp_path / "training.svg").read_text() == f"drawing {now[0]:.0f}"


def test_only_plot_loss_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_final(tmp_path, tmp_path)
    assert not (tmp_path / "training.svg").exists() and not plot_loss(tmp_path, tmp_path / "loss.png")
    write_log(tmp_path, 12)
    monkeypatch.setattr(pictures, "is_installed", lambda module: False)
    draw_final(tmp_path, tmp_path)
    assert not plot_loss(tmp_path, tmp_path / "loss.png")
    assert points(tmp_path / "training.svg") == [12, 12, 12, 12], "loss also smoothed"
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert plot_loss(tmp_path, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
