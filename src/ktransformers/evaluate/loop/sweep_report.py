"""The one report of a sweep: a table with a row for each run (settings, loss, scores, time), and the curves of all.

Everything is read from the sweep's directory, so a report after skipped stages equals the first. `report.md`,
`report.json` and `report.html` are in that directory; every metric with its interval is in `eval/report.html`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from ktransformers.evaluate.loop.report import METRIC_LABELS, MetricRow, format_times, metric_rows
from ktransformers.evaluate.loop.results import TrainingSummary, describe_proof, read_json, summarise_training
from ktransformers.evaluate.loop.run import FAILED, StageStatus
from ktransformers.evaluate.loop.settings import Loop
from ktransformers.evaluate.loop.stages import BASE_NAME, RunPaths, run_paths
from ktransformers.evaluate.loop.sweep import run_settings, sweep_runs
from ktransformers.ground import html_page
from ktransformers.ground.files import write_json, write_text
from ktransformers.ground.progress import rough
from ktransformers.ground.training_charts import compared_panels, curve, read_log


@dataclass(frozen=True)
class SweptRun:
    name: str
    settings: dict[str, Any]  # axis -> value
    adapter: str
    training: TrainingSummary | None  # None: training has failed
    last_loss: float | None
    eval_loss: float | None
    scores: tuple[MetricRow, ...]
    proven: bool | None  # None: not asked for, or not there
    proof: str  # or why training has failed


@dataclass(frozen=True)
class SweepReport:
    run: str
    runs: tuple[SweptRun, ...]
    stages: tuple[StageStatus, ...]
    next: tuple[str, ...]

    @property
    def failures(self) -> list[str]:
        """What makes the command exit with an error."""
        return [f"{run.name}: {run.proof}" for run in self.runs if run.training is None or run.proven is False]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_sweep_report(loop: Loop, steps: Sequence[StageStatus]) -> SweepReport:
    shared, settings = run_paths(loop), run_settings(loop)
    failed = {step.name for step in steps if step.status == FAILED}
    comparison = read_json(shared.document("compare")) or {"tasks": [], "runs": []}
    runs = tuple(
        _read_run(run, settings[run.name], run_paths(run, shared), comparison, failed) for run in sweep_runs(loop)
    )
    best = _best(runs)
    commands = (
        () if best is None else (f"kt serve {best.adapter}", f"kt chat --model {Path(shared.model).name}:{best.name}")
    )
    report = SweepReport(loop.run, runs, tuple(steps), commands)
    write_json(shared.run / "report.json", report.as_json())
    write_text(shared.run / "report.md", markdown(report))
    write_text(shared.run / "report.html", page(report, shared))
    return report


def _read_run(
    run: Loop, settings: dict[str, Any], paths: RunPaths, comparison: dict[str, Any], failed: set[str]
) -> SweptRun:
    if f"train-{run.name}" in failed:
        reason = f"training failed; logs/train-{run.name}.log says why"
        return SweptRun(run.name, settings, str(paths.adapter), None, None, None, (), None, reason)
    lines = read_log(paths.adapter)
    losses, evaluated = curve(lines, "loss"), curve(lines, "eval_loss")
    proven, proof = describe_proof(read_json(paths.document("prove"))) if run.prove else (None, "not asked for")
    if f"prove-{run.name}" in failed and proven is not False:
        proven, proof = False, f"NOT proven: kt prove did not end well; logs/prove-{run.name}.log says why"
    compared = list(comparison["runs"])
    scores: tuple[MetricRow, ...] = ()
    if run.name in compared:
        index = compared.index(run.name)
        scores = tuple(row for task in comparison["tasks"] for row in metric_rows(task, index))
    return SweptRun(
        run.name,
        settings,
        str(paths.adapter),
        summarise_training(paths.adapter),
        losses[-1][1] if losses else None,
        evaluated[-1][1] if evaluated else None,
        scores,
        proven,
        proof,
    )


def _best(runs: Sequence[SweptRun]) -> SweptRun | None:
    """The run whose adapter the next commands name: most scores better than the base's, then the smaller loss."""
    trained = [run for run in runs if run.training is not None]

    def order(run: SweptRun) -> tuple[float, float]:
        loss = run.eval_loss if run.eval_loss is not None else run.last_loss
        gains = sum(1 if row.better else -1 for row in run.scores if row.mark and not row.unrelated)
        return -gains, math.inf if loss is None or not math.isfinite(loss) else loss  # NaN is neither less nor more

    return min(trained, key=order, default=None)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def table(report: SweepReport) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row for each run; the base first where there are scores."""
    axes = list(report.runs[0].settings)
    scored = next((run.scores for run in report.runs if run.scores), ())
    names = [f"{row.task} {METRIC_LABELS.get(row.metric, row.metric)}" for row in scored]
    has_eval_loss = any(run.eval_loss is not None for run in report.runs)
    heads = ["run", *axes, "steps", "loss", *(["eval loss"] if has_eval_loss else []), *names, "tokens/s", "time"]
    rows = []
    if scored:
        blanks = [""] * (len(axes) + 2 + has_eval_loss)
        rows.append([BASE_NAME, *blanks, *(f"{row.base:.1f}" for row in scored), "", ""])
    for run in report.runs:
        cells = [run.name, *(str(value) for value in run.settings.values())]
        if run.training is None:
            rows.append([*cells, "failed", *[""] * (len(heads) - len(cells) - 1)])
            continue
        losses = [_number(run.last_loss), *([_number(run.eval_loss)] if has_eval_loss else [])]
        scores = [f"{row.adapter:.1f}{row.mark}" for row in run.scores] or [""] * len(names)
        rate = run.training.tokens_per_second
        rows.append([*cells, str(run.training.steps), *losses, *scores])
        rows[-1] += [f"{rate:.0f}" if rate else "", rough(run.training.seconds)]
    return heads, rows


STARS = "* p < 0.05, ** p < 0.01 against the base, paired bootstrap; without a star it may be chance"


def terminal_lines(report: SweepReport) -> list[str]:
    heads, rows = table(report)
    widths = [max(len(row[index]) for row in (heads, *rows)) for index in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    lines = ["", line(heads), *(line(row) for row in rows)]
    lines += [STARS] if any(run.scores for run in report.runs) else []
    lines += ["", "Talk to the best:", *(f"  {command}" for command in report.next)] if report.next else []
    return [*lines, "", f"Report: {report.run}/report.html"]


def _markdown_cell(text: str) -> str:
    return re.sub(r"[*|]", r"\\\g<0>", text)


def markdown(report: SweepReport) -> str:
    heads, rows = table(report)
    lines = [f"# Sweep: {report.run}", "", f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    lines += [f"| {' | '.join(_markdown_cell(cell) for cell in row)} |" for row in rows]
    lines += ["", STARS.replace("*", "\\*") + ".", ""] if any(run.scores for run in report.runs) else [""]
    lines += [f"- {run.name}: {run.proof}" for run in report.runs]
    lines += [f"- time: {format_times(report.stages)}", "", "```", *report.next, "```"]
    return "\n".join(lines) + "\n"


def page(report: SweepReport, paths: RunPaths) -> str:
    heads, rows = table(report)
    curves = {run.name: read_log(Path(run.adapter)) for run in report.runs if run.training is not None}
    scored = any(run.scores for run in report.runs)
    parts = [f"<h1>{escape(f'{len(report.runs)} runs of a sweep')}</h1><p class='soft'>{escape(report.run)}</p>"]
    parts.append(html_page.table(heads, rows))
    parts += (
        [f"<p class='soft'>{escape(STARS)}. Every metric: <a href='eval/report.html'>eval/report.html</a>.</p>"]
        if scored
        else []
    )
    parts += [html_page.chart(svg) for svg in compared_panels(curves)]
    proofs = "".join(f"<li>{escape(run.name)}: {escape(run.proof)}</li>" for run in report.runs)
    parts.append(f"<ul class='soft'>{proofs}<li>{escape(format_times(report.stages))}</li></ul>")
    return html_page.render(f"Sweep {paths.run.name}", parts)
