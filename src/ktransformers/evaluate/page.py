"""`report.html`: a self-contained page with inline figures, for light and dark mode, printable.

All text from models and tasks goes through `escape`, because an answer is untrusted HTML.
"""

from __future__ import annotations

from html import escape

from ktransformers.evaluate import plots
from ktransformers.evaluate.compare import Comparison, Line, TaskComparison
from ktransformers.evaluate.formatting import (
    SIGNIFICANCE_NOTE,
    change_text,
    format_number,
    metric_name,
    score_table,
    shorten,
    verdict,
)
from ktransformers.ground import html_page


def render_page(comparison: Comparison) -> str:
    runs = comparison.runs
    title = f"{runs[1]} against {runs[0]}" if len(runs) == 2 else "Runs compared"
    models = "".join(
        f"<br><b>{escape(run)}</b> {escape(model)}" for run, model in zip(runs, comparison.models, strict=True)
    )
    parts = [f"<h1>{escape(title)}</h1><p class='soft'>{_verdicts(comparison)}{models}</p>"]
    parts += [_summary(comparison)]
    parts += [f"<figure>{plots.bar_chart(comparison)}</figure>"]
    for number in range(1, len(runs)):
        rows = [(task.task, task.headline, False) for _, tasks in comparison.panels() for task in tasks]
        parts.append(f"<figure>{plots.forest_plot(rows, number, f'{runs[number]} − {runs[0]}')}</figure>")
    parts += [_task(comparison, task) for task in comparison.tasks]
    return html_page.render(title, parts)


def _verdicts(comparison: Comparison) -> str:
    summaries = []
    for number, run in enumerate(comparison.runs[1:]):
        states = [verdict(task.headline.differences[number]) for task in comparison.tasks]
        counts = ", ".join(
            f"<span class='{state if states.count(state) else 'even'}'>{states.count(state)} {label}</span>"
            for state, label in (("gain", "better"), ("loss", "worse"), ("even", "not told apart"))
        )
        summaries.append(f"{escape(run)}: {counts} of {len(states)} tasks")
    return "; ".join(summaries) + "."


def _cells(line: Line, intervals: bool) -> str:
    cells = []
    for index, estimate in enumerate(line.runs):
        text = format_number(estimate.value, line)
        if intervals:
            text += f" <small>[{format_number(estimate.low, line)}, {format_number(estimate.high, line)}]</small>"
        if index:
            change = line.differences[index - 1]
            text += f" <span class='{verdict(change)}'>{change_text(change, line)}</span>"
        cells.append(f"<td>{text}</td>")
    return "".join(cells)


def _table(left: tuple[str, ...], comparison: Comparison, rows: list[str]) -> str:
    heads = "".join(f"<th class='left'>{escape(heading)}</th>" for heading in left)
    heads += "".join(f"<th>{escape(run)}</th>" for run in comparison.runs)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _row(left: tuple[str, ...], line: Line, intervals: bool = False, main: bool = False) -> str:
    names = "".join(f"<td class='left'>{escape(label)}</td>" for label in left)
    return f"<tr{' class=main' if main else ''}>{names}{_cells(line, intervals)}</tr>"


def _summary(comparison: Comparison) -> str:
    rows = []
    for heading, tasks in comparison.panels():
        if heading:
            rows.append(f"<tr class='panel'><td class='left' colspan='{2 + len(comparison.runs)}'>{heading}</td></tr>")
        rows += [_row((task.title or task.task, metric_name(task.headline)), task.headline) for task in tasks]
    note = SIGNIFICANCE_NOTE.replace("\\", "").format(first=escape(comparison.runs[0]))
    return _table(("task", "metric"), comparison, rows) + f"<p class='soft'>{note}</p>"


def _scores(task: TaskComparison, runs: tuple[str, ...]) -> str:
    table = score_table(task, runs)
    if not table:
        return ""
    return html_page.table(table[0], table[1:])


def _task(comparison: Comparison, task: TaskComparison) -> str:
    note = f" For orientation: {escape(task.note)}." if task.note else ""
    parts = [
        f"<h2>{escape(task.title or task.task)}</h2>",
        f"<p class='soft'><code>{escape(task.task)}</code>, {task.items} items.{note}</p>",
        _scores(task, comparison.runs),
        _table(
            ("metric",),
            comparison,
            [_row((metric_name(line),), line, intervals=True, main=line.metric == task.primary) for line in task.lines],
        ),
    ]
    if len(task.slices) > 1:
        rows = [_row((line.slice, str(line.runs[0].items)), line) for line in task.slices]
        parts.append(f"<details open><summary>By slice, {escape(task.primary)}</summary>")
        parts.append(_table(("slice", "items"), comparison, rows))
        rows_to_plot = [(task.task, task.headline, False), *((line.slice, line, True) for line in task.slices)]
        for number in range(1, len(comparison.runs)):
            title = f"{comparison.runs[number]} − {comparison.runs[0]}, {task.primary}"
            parts.append(f"<figure>{plots.forest_plot(rows_to_plot, number, title)}</figure>")
        parts.append("</details>")
    for sample in task.samples:
        answers = [("reference", sample.reference), *zip(comparison.runs, sample.answers, strict=True)]
        parts.append(html_page.sample(shorten(sample.prompt), [(source, shorten(text)) for source, text in answers]))
    return "\n".join(parts)
