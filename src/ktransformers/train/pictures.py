"""Pictures of a run, in its directory: training.svg while it trains, and training_loss.png for `plot_loss`, the one
picture that needs matplotlib.

training.svg has the loss, the learning rate, the gradient norm and the tokens per second, and is drawn again at every
logging step (`training_charts.py`, about a millisecond per hundred steps). Runs with very short steps skip drawings,
so that pictures take at most MAX_SHARE of the time; the last one is always drawn.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ktransformers.ground.charts import SERIES_COLOURS, smooth
from ktransformers.ground.packages import is_installed
from ktransformers.ground.training_charts import PANELS, LogLines, curve, read_log, run_picture
from ktransformers.train.files import reporting_full_disk

SVG_FILE = "training.svg"
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


def draw_final(log: Path, target: Path) -> None:
    """Writes the picture of a finished run from the log in folder `log` to `target`."""
    if lines := read_log(log):
        (target / SVG_FILE).write_text(run_picture(lines), encoding="utf-8")


def plot_loss(log: Path, path: Path) -> bool:
    """Writes training_loss.png, as LLaMA-Factory does; False without a loss curve or without matplotlib."""
    lines = read_log(log)
    if not curve(lines, "loss") or not is_installed("matplotlib"):
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    axes: Any = figure.add_subplot()
    for number, field in enumerate(PANELS["loss"]):
        if points := curve(lines, field):
            steps, values = zip(*points, strict=True)
            style = {"alpha": 0.35 if number == 0 else 1.0, "marker": "." if len(points) < 3 else ""}
            axes.plot(steps, values, color=SERIES_COLOURS[number], label=field.replace("_", " "), **style)
            if number == 0:
                axes.plot(steps, smooth(values), color=SERIES_COLOURS[number], label="smoothed")
    axes.legend()
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    return True
