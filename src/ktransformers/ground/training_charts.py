"""The charts of a training run, from its trainer_log.jsonl: loss, learning rate, gradient norm and tokens per second.

`kt train` writes them into the directory of the run, reports of `kt loop` and of its sweeps show them, several runs in
one chart."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktransformers.ground.charts import SERIES_COLOURS, Series, grid, line_chart, smooth

LOG_FILE = "trainer_log.jsonl"
# Title -> fields of the log, the first one measured at every logging step.
PANELS = {
    "loss": ("loss", "eval_loss"),
    "learning rate": ("lr",),
    "gradient norm": ("grad_norm",),
    "tokens/s": ("throughput",),
}
WIDTH, HEIGHT = 430, 240
MIN_SMOOTHED = 10  # points of a curve that is also drawn smoothed

TAIL_BYTES = 4096  # of a log, which hold its last line

LogLines = Sequence[Mapping[str, Any]]


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The logging steps of a run; an incomplete last line, of a run that is being written, is left out."""
    file = folder / LOG_FILE
    lines = []
    for text in file.read_text(errors="replace").splitlines() if file.is_file() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "current_steps" in line:
            lines.append(line)
    return lines


def last_step(folder: Path) -> tuple[int, int]:
    """(step, steps) of the last complete line, without reading the log; (0, 0) if there is none."""
    try:
        with (folder / LOG_FILE).open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = stream.read().splitlines()
        last = next(json.loads(line) for line in reversed(lines) if line.startswith(b"{") and line.endswith(b"}"))
        return int(last["current_steps"]), int(last["total_steps"])
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return 0, 0  # nothing logged yet, or a file of another program


def curve(lines: LogLines, field: str) -> list[tuple[float, float]]:
    return [(float(line["current_steps"]), float(line[field])) for line in lines if line.get(field) is not None]


def _smoothed(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    values = smooth([value for _, value in points])
    return [(step, value) for (step, _), value in zip(points, values, strict=True)]


def run_panels(lines: LogLines) -> list[str]:
    """One chart for each of PANELS."""
    charts = []
    for title, (field, *others) in PANELS.items():
        measured = curve(lines, field)
        series = [Series(title, measured, SERIES_COLOURS[0])]
        if field == "loss" and len(measured) >= MIN_SMOOTHED:
            series = [Series("", measured, SERIES_COLOURS[0], faint=True)]
            series.append(Series("loss, smoothed", _smoothed(measured), SERIES_COLOURS[0]))
        series += [Series(other.replace("_", " "), curve(lines, other), SERIES_COLOURS[1]) for other in others]
        charts.append(line_chart(title, series, WIDTH, HEIGHT, "step"))
    return charts


def run_picture(lines: LogLines) -> str:
    """All panels in one SVG file."""
    return grid(run_panels(lines), 2, WIDTH, HEIGHT, "loss, learning rate, gradient norm and tokens/s of a run")


def compared_panels(runs: Mapping[str, LogLines]) -> list[str]:
    """One chart for each of PANELS with the curves of all runs; smoothed where they are long."""
    charts = []
    for title, (field, *_) in PANELS.items():
        curves = {name: curve(lines, field) for name, lines in runs.items()}
        series = [
            Series(name, _smoothed(points) if field == "loss" and len(points) >= MIN_SMOOTHED else points)
            for name, points in curves.items()
        ]
        legend_rows = 1 + sum(len(name) + 4 for name in runs) // 60
        charts.append(line_chart(title, series, 860, 240 + 16 * legend_rows, "step"))
    return charts
