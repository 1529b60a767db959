"""Pictures of a run, in its directory: training.svg while it trains, and PNG files at the end if matplotlib is
installed.

training.svg has the loss, the learning rate, the gradient norm and the tokens per second, and is drawn again at every
logging step (`training_charts.py`, about a millisecond per hundred steps). Runs with very short steps skip drawings,
so that pictures take at most MAX_SHARE of the time; the last one is always drawn.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktransformers.ground.charts import SERIES_COLOURS, smooth
from ktransformers.ground.packages import is_installed
from ktransformers.ground.training_charts import PANELS, LogLines, curve, read_log, run_picture
from ktransformers.train.files import reporting_full_disk

SVG_FILE, PNG_FILE = "training.svg", "training.png"
MAX_SHARE = 0.02  # of the time of a run, for drawing


class LivePicture:
    """training.svg of a run that is under way."""

    def __init__(self, output: Path) -> None:
        self._file = output / SVG_FILE
        self._due = 0.0  # when the next drawing may begin

    def draw(self, lines: LogLines, is_last: bool = False) -> None:
        began = time.perf_counter()
        if not lines or (began < self._due and not is_last):
            return
        # Replaced in one step, because a browser may be reading it; not synced, because the log has the numbers.
        partial = self._file.with_name(f".{self._file.name}.partial")
        with reporting_full_disk(self._file.parent):
            partial.write_text(run_picture(lines), encoding="utf-8")
            partial.replace(self._file)
        now = time.perf_counter()
        self._due = now + (now - began) / MAX_SHARE


def draw_final(log: Path, target: Path) -> list[str]:
    """Writes the pictures of a finished run from the log in folder `log` to `target`; returns their names."""
    lines = read_log(log)
    if not lines:
        return []
    (target / SVG_FILE).write_text(run_picture(lines), encoding="utf-8")
    if not is_installed("matplotlib"):
        return [SVG_FILE]
    _plot_panels(lines, PANELS, target / PNG_FILE, columns=2)
    return [SVG_FILE, PNG_FILE]


def plot_loss(log: Path, path: Path) -> bool:
    """Writes training_loss.png, as LLaMA-Factory does; False without a loss curve or without matplotlib."""
    lines = read_log(log)
    if not curve(lines, "loss") or not is_installed("matplotlib"):
        return False
    _plot_panels(lines, {"loss": PANELS["loss"]}, path, columns=1)
    return True


def _plot_panels(lines: LogLines, panels: Mapping[str, tuple[str, ...]], path: Path, columns: int) -> None:
    from matplotlib.figure import Figure

    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.5 * columns, 3.6 * rows), layout="constrained")
    for index, (title, fields) in enumerate(panels.items(), 1):
        axes: Any = figure.add_subplot(rows, columns, index)
        for number, field in enumerate(fields):
            points = curve(lines, field)
            if not points:
                continue
            steps, values = [step for step, _ in points], [value for _, value in points]
            colour, is_loss = SERIES_COLOURS[number], field == "loss"
            axes.plot(
                steps, values, color=colour, alpha=0.35 if is_loss else 1.0, label=field.replace("_", " "),
                marker="." if len(points) < 3 else "",
            )  # fmt: skip
            if is_loss:
                axes.plot(steps, smooth(values), color=colour, label="smoothed")
        if len(axes.lines) > 1:
            axes.legend()
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
