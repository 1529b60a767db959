"""Writes a comparison as `report.md`, `report.json` and `report.html`, and as a table for the terminal.

All have the same order: one line per task (gains, then costs), one row per run in the columns of published tables,
every metric, the slices, then sample answers. One star marks p < 0.05 of the paired bootstrap, two stars p < 0.01; a
difference without a star is not significant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ktransformers.evaluate.compare import Comparison, Line, TaskComparison
from ktransformers.evaluate.formatting import (
    SIGNIFICANCE_NOTE,
    change_text,
    format_number,
    metric_name,
    score_table,
    shorten,
    value_text,
    verdict,
)
from ktransformers.evaluate.page import render_page
from ktransformers.evaluate.statistic import Estimate
from ktransformers.ground.files import write_json, write_text


def write_report(comparison: Comparison, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "report.json", comparison.as_json())
    write_text(directory / "report.md", markdown(comparison))
    write_text(directory / "report.html", render_page(comparison))


def summary_table(comparison: Comparison) -> Any:
    from rich.table import Table

    table = Table(title=None, caption="* p < 0.05, ** p < 0.01 (paired bootstrap)", caption_justify="left")
    for heading in ("task", "metric", *comparison.runs):
        table.add_column(heading, justify="left" if heading in ("task", "metric") else "right")
    colours = {"gain": "green", "loss": "red", "even": "default"}
    for heading, tasks in comparison.panels():
        if heading:
            table.add_section()
            table.add_row(f"[dim]{heading}[/dim]")
        for task in tasks:
            line = task.headline
            cells = [format_number(line.runs[0].value, line)]
            for estimate, change in zip(line.runs[1:], line.differences, strict=True):
                colour = colours[verdict(change)]
                cells.append(
                    f"{format_number(estimate.value, line)} [{colour}]({change_text(change, line)})[/{colour}]"
                )
            table.add_row(task.task, metric_name(line), *cells)
    return table


def markdown(comparison: Comparison) -> str:
    first = comparison.runs[0]
    parts = [f"# {' against '.join(reversed(comparison.runs)) if len(comparison.runs) == 2 else 'Runs compared'}", ""]
    parts += [f"- `{run}`: {model}" for run, model in zip(comparison.runs, comparison.models, strict=True)]
    parts += ["", "## Gains and costs", "", *_heading(("task", "metric"), comparison.runs)]
    for heading, tasks in comparison.panels():
        if heading:
            parts.append(f"| *{heading}* |" + " |" * (1 + len(comparison.runs)))
        parts += [_row((task.title or task.task, metric_name(task.headline)), task.headline) for task in tasks]
    parts += ["", SIGNIFICANCE_NOTE.format(first=first)]
    for task in comparison.tasks:
        parts += ["", f"## {task.title or task.task}", "", f"`{task.task}`, {task.items} items."]
        parts += [f"For orientation: {task.note}."] if task.note else []
        if table := score_table(task, comparison.runs):
            lines = [f"| {' | '.join(row)} |" for row in table]
            parts += ["", lines[0], "|---|" + "---:|" * (len(table[0]) - 1), *lines[1:]]
        parts += ["", *_heading(("metric",), comparison.runs)]
        parts += [_row((metric_name(line),), line, intervals=True) for line in task.lines]
        if task.slices:
            parts += ["", f"By slice, {task.primary}:", "", *_heading(("slice", "items"), comparison.runs)]
            parts += [_row((line.slice, str(line.runs[0].items)), line) for line in task.slices]
        parts += _samples(comparison, task)
    return "\n".join(parts) + "\n"


def _heading(left: tuple[str, ...], runs: tuple[str, ...]) -> list[str]:
    return [f"| {' | '.join((*left, *runs))} |", "|" + "---|" * len(left) + "---:|" * len(runs)]


def _row(left: tuple[str, ...], line: Line, intervals: bool = False) -> str:
    def estimate_text(estimate: Estimate) -> str:
        return value_text(estimate, line) if intervals else format_number(estimate.value, line)

    cells = [estimate_text(line.runs[0])]
    for estimate, change in zip(line.runs[1:], line.differences, strict=True):
        text = f"{estimate_text(estimate)} ({change_text(change, line)})".replace("*", "\\*")
        cells.append(f"**{text}**" if verdict(change) == "gain" else text)
    return f"| {' | '.join((*left, *cells))} |"


def _samples(comparison: Comparison, task: TaskComparison) -> list[str]:
    parts = []
    for sample in task.samples:
        parts += ["", f"### {sample.id}", "", *_quoted("asked", sample.prompt), *_quoted("reference", sample.reference)]
        for run, answer in zip(comparison.runs, sample.answers, strict=True):
            parts += _quoted(run, answer)
    return parts


def _quoted(label: str, text: str) -> list[str]:
    lines = shorten(text).splitlines() or [""]
    return [f"**{label}**", "", *(f"> {line}" for line in lines), ""]
