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

CSS = """
:root { color-scheme: light dark; --ink: #1d2127; --soft: #5d646e; --rule: #e2e5e9; --card: #f7f8f9; --paper: #fff;
  --gain: #1a7f4b; --loss: #b3362b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #a3aab4; --rule: #343941; --card: #1f2329;
  --paper: #16191d; --gain: #4cc38a; --loss: #ef7a6d; } figure { background: #fff; border-radius: 8px; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", "Noto Sans CJK SC", sans-serif;
  color: var(--ink); background: var(--paper); max-width: 60rem; margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.6rem 0 .4rem; }
p.soft, .soft { color: var(--soft); } code { font-size: .92em; }
table { border-collapse: collapse; width: 100%; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .34rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: baseline; }
th { font-weight: 600; color: var(--soft); font-size: .86rem; } th.left, td.left { text-align: left; }
td { white-space: nowrap; } td.left { white-space: normal; } tr.panel td { color: var(--soft); padding-top: 1rem; }
td small { color: var(--soft); } tr.main td { font-weight: 600; } tr.main td small { font-weight: 400; }
.gain { color: var(--gain); } .loss { color: var(--loss); } .even { color: var(--soft); }
figure { margin: 1rem 0; padding: .5rem; } figure svg { width: 100%; height: auto; }
.sample { background: var(--card); border-radius: 8px; padding: .8rem 1rem; margin: .8rem 0; }
.sample .asked { margin: 0 0 .6rem; white-space: pre-wrap; }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .8rem; }
.answers > div { background: var(--paper); border: 1px solid var(--rule); border-radius: 6px; padding: .5rem .7rem;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .92rem; }
.answers b { display: block; font-size: .8rem; color: var(--soft); margin-bottom: .2rem; }
details > summary { cursor: pointer; color: var(--soft); margin: .6rem 0; }
"""


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
    body = "\n".join(parts)
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<style>{CSS}</style></head><body>\n{body}\n</body></html>\n"
    )


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
    rows = [
        "".join(f"<{tag}{'' if index else ' class=left'}>{escape(cell)}</{tag}>" for index, cell in enumerate(row))
        for tag, row in zip(("th", *("td" for _ in runs)), table, strict=True)
    ]
    body = "".join(f"<tr>{row}</tr>" for row in rows[1:])
    return f"<table><thead><tr>{rows[0]}</tr></thead><tbody>{body}</tbody></table>"


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
        boxes = "".join(f"<div><b>{escape(source)}</b>{escape(shorten(text))}</div>" for source, text in answers)
        prompt = f"<p class='asked'>{escape(shorten(sample.prompt))}</p>"
        parts.append(f"<div class='sample'>{prompt}<div class='answers'>{boxes}</div></div>")
    return "\n".join(parts)
