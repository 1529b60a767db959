"""Writes a comparison as `report.md`, `report.json` and `report.html`, and as a table for the terminal.

All have the same order: one line per task (gains, then costs), one row per run in the columns of published tables,
every metric, the slices, then sample answers. One star marks p < 0.05 of the paired bootstrap, two stars p < 0.01; a
difference without a star is not significant. Metrics have different units, so a chart draws a difference in points for
metrics on a scale of 100 and as relative change otherwise (perplexity), always with better to the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ktransformers.evaluate.compare import Comparison, Line, TaskComparison
from ktransformers.evaluate.statistic import Difference, Estimate
from ktransformers.ground import report
from ktransformers.ground.charts import RUN_COLOURS, VERDICT_COLOURS, Interval, interval_chart
from ktransformers.ground.report import Block, Cell, Rows

SIGNIFICANCE_NOTE = "* p < 0.05, ** p < 0.01, paired bootstrap against {first}; intervals are 95 %."
MAX_SAMPLE_CHARS = 700  # of a sample answer
# The columns in which results of fine-tuning are usually published, one row per model.
SCORE_COLUMNS = {
    **{f"bleu-{order}": f"BLEU-{order}" for order in range(1, 5)},
    **{f"rouge-{name}": f"ROUGE-{name.upper()}" for name in "12l"},
    "accuracy": "Accuracy",
    "accuracy_generated": "Accuracy (generated)",
    "judge": "Judge",
}


def write_report(comparison: Comparison, directory: Path) -> None:
    report.write_report(directory, _title(comparison), report_blocks(comparison), comparison.as_json())


def terminal_lines(comparison: Comparison) -> list[str]:
    return [
        *report.aligned(("task", "metric", *comparison.runs), summary_rows(comparison, False), left=2),
        "* p < 0.05, ** p < 0.01 (paired bootstrap)",
    ]


def _title(comparison: Comparison) -> str:
    return " against ".join(reversed(comparison.runs)) if len(comparison.runs) == 2 else "Runs compared"


def report_blocks(comparison: Comparison) -> list[Block]:
    runs = comparison.runs
    blocks = [
        report.paragraph(_verdicts(comparison)),
        report.listed([f"{run}: {model}" for run, model in zip(runs, comparison.models, strict=True)]),
        report.heading("Gains and costs"),
        report.table(("task", "metric", *runs), summary_rows(comparison, True), left=2),
        report.paragraph(SIGNIFICANCE_NOTE.format(first=runs[0])),
        *_scores_chart(comparison),
    ]
    headlines = [(task.task, task.headline, False) for _, tasks in comparison.panels() for task in tasks]
    blocks += _difference_charts(headlines, runs, "")
    return blocks + [block for task in comparison.tasks for block in _task_blocks(comparison, task)]


def _verdicts(comparison: Comparison) -> str:
    counts = []
    for number, run in enumerate(comparison.runs[1:]):
        states = [_verdict(task.headline.differences[number]) for task in comparison.tasks]
        labels = (("gain", "better"), ("loss", "worse"), ("even", "not told apart"))
        listed = ", ".join(f"{states.count(state)} {label}" for state, label in labels)
        counts.append(f"{run}: {listed} of {len(states)} tasks")
    return "; ".join(counts) + "."


def summary_rows(comparison: Comparison, titled: bool) -> list[list[str | Cell]]:
    """A row for each task with its primary metric, below the headings of the panels."""
    rows: list[list[str | Cell]] = []
    for heading, tasks in comparison.panels():
        rows += [[heading]] if heading else []
        for task in tasks:
            rows.append([(titled and task.title) or task.task, _metric_name(task.headline), *_cells(task.headline)])
    return rows


def _task_blocks(comparison: Comparison, task: TaskComparison) -> list[Block]:
    runs = comparison.runs
    note = f" For orientation: {task.note}." if task.note else ""
    blocks = [
        report.heading(task.title or task.task),
        report.paragraph(f"{task.task}, {task.items} items.{note}"),
        *_published_scores(task, runs),
        report.table(
            ("metric", *runs),
            [[_metric_name(line), *_cells(line, intervals=True)] for line in task.lines],
            main=task.lines.index(task.headline),
        ),
    ]
    if len(task.slices) > 1:
        rows: Rows = [[line.slice, str(line.runs[0].items), *_cells(line)] for line in task.slices]
        parts = [(task.task, task.headline, False), *((line.slice, line, True) for line in task.slices)]
        table = report.table(("slice", "items", *runs), rows, left=2)
        charts = _difference_charts(parts, runs, f", {task.primary}")
        blocks.append(report.folded(f"By slice, {task.primary}", [table, *charts]))
    for sample in task.samples:
        answers = [("reference", sample.reference), *zip(runs, sample.answers, strict=True)]
        blocks.append(report.sample(_shorten(sample.prompt), [(source, _shorten(text)) for source, text in answers]))
    return blocks


def _published_scores(task: TaskComparison, runs: Sequence[str]) -> list[Block]:
    """One row per run; nothing without a metric that has such a column."""
    lines = [line for name in SCORE_COLUMNS for line in task.lines if line.metric == name]
    rows = [[run, *(f"{line.runs[index].value:.2f}" for line in lines)] for index, run in enumerate(runs)]
    return [report.table((task.task, *(SCORE_COLUMNS[line.metric] for line in lines)), rows)] if lines else []


def _scores_chart(comparison: Comparison) -> list[Block]:
    """Tasks whose primary metric is out of 100: all runs one below the other."""
    colours = [RUN_COLOURS[number % len(RUN_COLOURS)] for number in range(len(comparison.runs))]
    rows = [
        Interval(
            f"{task.task}, {task.primary}" if not number else "", at.value, at.low, at.high, f"{at.value:.1f}", colour
        )
        for _, tasks in comparison.panels()
        for task in tasks
        if task.headline.per_cent
        for number, (at, colour) in enumerate(zip(task.headline.runs, colours, strict=True))
    ]
    names = list(zip(comparison.runs, colours, strict=True))
    return [report.chart(interval_chart("scores out of 100", rows, names))] if rows else []


def _difference_charts(rows: Sequence[tuple[str, Line, bool]], runs: Sequence[str], what: str) -> list[Block]:
    """For each later run its differences from the first; `rows`: (label, line, is a slice)."""
    charts = []
    for number, run in enumerate(runs[1:]):
        drawn = [_interval(label, line, line.differences[number], is_slice) for label, line, is_slice in rows]
        axis = "worse ← difference (points, or % of the first run) → better"
        charts.append(report.chart(interval_chart(f"{run} − {runs[0]}{what}", drawn, x_label=axis)))
    return charts


def _interval(label: str, line: Line, change: Difference, is_slice: bool) -> Interval:
    scale = 1.0 if line.per_cent else 100 / abs(line.runs[0].value or 1.0)
    value, low, high = (scale * number for number in (change.value, change.low, change.high))
    if not line.more_is_better:
        value, low, high = -value, -high, -low
    note = f"{value:+.1f}{'' if line.per_cent else ' %'}{change.mark}".replace("-", "−")
    return Interval(label, value, low, high, note, VERDICT_COLOURS[_verdict(change)], is_slice)


def _cells(line: Line, intervals: bool = False) -> list[Cell]:
    def number(value: float) -> str:
        return f"{value:.1f}" if line.per_cent else f"{value:.2f}"

    def interval(estimate: Estimate) -> str:
        return f"{number(estimate.low)}, {number(estimate.high)}" if intervals else ""

    first, *others = line.runs
    cells = [Cell(number(first.value), interval(first))]
    for estimate, change in zip(others, line.differences, strict=True):
        text = f"{'+' if change.value >= 0 else '−'}{number(abs(change.value))}{change.mark}"
        cells.append(Cell(number(estimate.value), interval(estimate), text, _verdict(change)))
    return cells


def _metric_name(line: Line) -> str:
    return line.metric if line.more_is_better else f"{line.metric} ↓"


def _verdict(difference: Difference) -> str:
    """gain, loss or even; even if the difference is not significant."""
    return "even" if not difference.mark else "gain" if difference.gain else "loss"


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SAMPLE_CHARS else f"{text[:MAX_SAMPLE_CHARS]}…"
