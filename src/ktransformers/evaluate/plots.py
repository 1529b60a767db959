"""The two figures of a report as SVG text: differences from the first run with intervals, and values side by side.

Metrics have different units, so a difference is drawn in points for metrics on a scale of 100 and as relative change
otherwise (perplexity), always with better to the right.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from ktransformers.evaluate.compare import Comparison, Line
from ktransformers.evaluate.formatting import verdict
from ktransformers.evaluate.statistic import Difference
from ktransformers.ground.charts import RUN_COLOURS, VERDICT_COLOURS

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#c4c8ce",
    "axes.labelcolor": "#3b4048",
    "xtick.color": "#3b4048",
    "ytick.color": "#3b4048",
    "svg.fonttype": "none",  # text stays searchable and uses the page's font
    "svg.hashsalt": "ktransformers",  # reproducible output
}


def plotted_values(line: Line, change: Difference) -> tuple[float, float, float]:
    """(value, low, high) with better to the right: points out of 100, or percent of the first run's value."""
    scale = 1.0 if line.per_cent else 100 / abs(line.runs[0].value or 1.0)
    values = [scale * value for value in (change.value, change.low, change.high)]
    if not line.more_is_better:
        values = [-values[0], -values[2], -values[1]]
    return values[0], values[1], values[2]


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.subplots()


def _svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = out.getvalue()
    return text[text.index("<svg") :]


def forest_plot(rows: Sequence[tuple[str, Line, bool]], run: int, title: str) -> str:
    """One row per (label, line, is a slice): the difference of run number `run` from the first."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(0.9 + 0.3 * len(rows))
        for row, (_, line, is_slice) in enumerate(rows):
            change = line.differences[run - 1]
            value, low, high = plotted_values(line, change)
            colour = VERDICT_COLOURS[verdict(change)]
            axes.plot([low, high], [row, row], color=colour, linewidth=1.4 if is_slice else 2.4, solid_capstyle="round")
            axes.plot([value], [row], "o", color=colour, markersize=4 if is_slice else 7)
            axes.annotate(
                f"{value:+.1f}{'' if line.per_cent else ' %'}{change.mark}".replace("-", "−"),
                (1.0, row),
                xycoords=("axes fraction", "data"),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color=colour,
                fontsize=9,
                annotation_clip=False,
            )
        axes.axvline(0, color="#3b4048", linewidth=0.8)
        axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
        for tick, (_, _, is_slice) in zip(axes.get_yticklabels(), rows, strict=True):
            tick.set_fontsize(9 if is_slice else 10)
            tick.set_color("#6a707a" if is_slice else "#1d2127")
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#e6e8eb", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.set_xlabel("worse   ←   difference (points, or % of the first run)   →   better", fontsize=9)
        axes.set_title(title, loc="left", fontsize=11, color="#1d2127")
        return _svg(figure)


def bar_chart(comparison: Comparison) -> str:
    """Tasks whose primary metric is out of 100: all runs side by side, with intervals."""
    import matplotlib

    tasks = [task for _, panel in comparison.panels() for task in panel if task.headline.per_cent]
    if not tasks:
        return ""
    count = len(comparison.runs)
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(0.8 + (0.26 * count + 0.25) * len(tasks))
        height = 0.8 / count
        for number, run in enumerate(comparison.runs):
            estimates = [task.headline.runs[number] for task in tasks]
            positions = [position - 0.4 + height * (number + 0.5) for position in range(len(tasks))]
            values = [estimate.value for estimate in estimates]
            spread = [
                [max(0.0, e.value - e.low) for e in estimates],
                [max(0.0, e.high - e.value) for e in estimates],
            ]
            colour = RUN_COLOURS[number % len(RUN_COLOURS)]
            axes.barh(positions, values, height * 0.9, xerr=spread, label=run, color=colour,
                      error_kw={"ecolor": "#3b4048", "elinewidth": 0.9})  # fmt: skip
            for position, estimate in zip(positions, estimates, strict=True):
                axes.annotate(f"{estimate.value:.1f}", (max(estimate.high, estimate.value), position), xytext=(4, 0),
                              textcoords="offset points", va="center", fontsize=8, color="#3b4048")  # fmt: skip
        axes.set_yticks(range(len(tasks)), [f"{task.task}\n{task.primary}" for task in tasks], fontsize=9)
        axes.set_ylim(len(tasks) - 0.5, -0.5)
        axes.set_xlim(0, 105)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#e6e8eb", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=count, frameon=False, fontsize=9)
        return _svg(figure)
