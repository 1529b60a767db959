"""The one report of a sweep: a table with a row for each run (settings, loss, scores, time), and the curves of all.

Everything is read from the sweep's directory, so a report after skipped stages equals the first. `report.md`,
`report.json` and `report.html` are in that directory; every metric with its interval is in `eval/report.html`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ktransformers.evaluate.loop.report import METRIC_LABELS, STARS, MetricRow, format_times, metric_rows
from ktransformers.evaluate.loop.results import TrainingSummary, describe_proof, read_json, summarise_training
from ktransformers.evaluate.loop.run import FAILED, StageStatus
from ktransformers.evaluate.loop.settings import Loop
from ktransformers.evaluate.loop.stages import BASE_NAME, RunPaths, run_paths
from ktransformers.evaluate.loop.sweep import run_settings, sweep_runs
from ktransformers.ground.progress import rough
from ktransformers.ground.report import Block, aligned, chart, code, listed, paragraph, write_report
from ktransformers.ground.report import table as report_table
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
    write_report(shared.run, f"{len(runs)} runs of a sweep", report_blocks(report), asdict(report))
    return report


def _read_run(
    run: Loop, settings: dict[str, Any], paths: RunPaths, comparison: dict[str, Any], failed: set[str]
) -> SweptRun:
    if f"train-{run.name}" in failed:
        reason = f"training failed; logs/train-{run.name}.log says why"
        return SweptRun(run.name, settings, str(paths.adapter), None, None, None, (), None, reason)
    lines = read_log(paths.adapter)
    losses, evaluated = curve(lines, "loss"), curve(lines, "eval_loss")
    proven, proof = None, "not asked for"
    if run.prove:
        proven, proof = describe_proof(paths.document("prove"), failed=f"prove-{run.name}" in failed)
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
        losses = ["" if loss is None else f"{loss:.3g}" for loss in (run.last_loss, run.eval_loss)[: 1 + has_eval_loss]]
        scores = [f"{row.adapter:.1f}{row.mark}" for row in run.scores] or [""] * len(names)
        rate = run.training.tokens_per_second
        rows.append([*cells, str(run.training.steps), *losses, *scores])
        rows[-1] += [f"{rate:.0f}" if rate else "", rough(run.training.seconds)]
    return heads, rows


def terminal_lines(report: SweepReport) -> list[str]:
    lines = ["", *aligned(*table(report)), *([STARS] if any(run.scores for run in report.runs) else [])]
    lines += ["", "Talk to the best:", *(f"  {command}" for command in report.next)] if report.next else []
    return [*lines, "", f"Report: {report.run}/report.html"]


def report_blocks(report: SweepReport) -> list[Block]:
    blocks = [paragraph(report.run), report_table(*table(report))]
    if any(run.scores for run in report.runs):
        blocks.append(paragraph(f"{STARS}. Every metric:", "eval/report.html"))
    curves = {run.name: read_log(Path(run.adapter)) for run in report.runs if run.training is not None}
    blocks += map(chart, compared_panels(curves))
    proofs = [f"{run.name}: {run.proof}" for run in report.runs]
    return [*blocks, listed([*proofs, f"time: {format_times(report.stages)}"]), code(report.next)]
