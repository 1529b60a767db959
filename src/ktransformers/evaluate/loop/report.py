"""The report of a loop from the stages' documents: a table, curves, sample answers, the proof, speed, next commands.

Everything is read from the run's directory, so a report after skipped stages equals the first. `report.html`,
`report.md` and `report.json` are in that directory; the full comparison, with every metric and slice, is
`eval/report.html`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ktransformers.evaluate.loop.questions import AnswerPair, read_answers
from ktransformers.evaluate.loop.results import (
    TrainingSummary,
    describe_proof,
    read_json,
    summarise_training,
    training_lines,
)
from ktransformers.evaluate.loop.run import ANSWERS_FILE, FAILED, StageStatus
from ktransformers.evaluate.loop.settings import Loop
from ktransformers.evaluate.loop.stages import BASE_NAME, run_paths
from ktransformers.ground.report import Block, aligned, chart, code, listed, paragraph, sample, write_report
from ktransformers.ground.report import table as report_table
from ktransformers.ground.training_charts import read_log, run_panels

# Metrics in the table, if the task has them; otherwise its primary metric.
SHOWN_METRICS = ("style", "bleu-1", "bleu-4", "rouge-l", "exact", "accuracy_text", "accuracy")
METRIC_LABELS = {
    "style": "style hits %",
    "bleu-1": "BLEU-1",
    "bleu-4": "BLEU-4",
    "rouge-l": "ROUGE-L",
    "accuracy": "right by letter %",
    "accuracy_text": "right by text %",
}
STARS = "* p < 0.05, ** p < 0.01, paired bootstrap; without a star it may be chance"
MAX_ANSWER_CHARS = 400  # of an answer in the report
MAX_SHOWN_CHARS = 200  # of an answer on the terminal


@dataclass(frozen=True)
class MetricRow:
    task: str
    metric: str
    base: float
    adapter: float
    p: float  # of the difference, paired bootstrap
    better: bool  # the adapter is better, in the metric's direction
    unrelated: bool

    @property
    def mark(self) -> str:
        return "**" if self.p < 0.01 else "*" if self.p < 0.05 else ""


@dataclass(frozen=True)
class LoopReport:
    run: str
    name: str
    rows: tuple[MetricRow, ...]
    answers: tuple[AnswerPair, ...]
    proof: str
    proven: bool | None
    training: TrainingSummary
    stages: tuple[StageStatus, ...]
    next: tuple[str, ...]

    @property
    def failures(self) -> list[str]:
        """What makes the command exit with an error."""
        return [self.proof] if self.proven is False else []


def make_report(loop: Loop, steps: Sequence[StageStatus]) -> LoopReport:
    paths = run_paths(loop)
    comparison = read_json(paths.document("compare"))
    tasks = comparison["tasks"] if comparison else []
    rows = tuple(row for task in sorted(tasks, key=lambda task: bool(task["unrelated"])) for row in metric_rows(task))
    samples = [sample for task in tasks for sample in task["samples"] if sample["prompt"] and _has_text_answers(task)]
    asked = read_answers(paths.run / ANSWERS_FILE)
    drawn = [AnswerPair(sample["prompt"], *sample["answers"][:2]) for sample in samples]
    answers = (*asked, *drawn[: max(0, loop.answers - len(asked))])
    proven, proof = None, "not asked for"
    if loop.prove:
        failed = any(step.status == FAILED for step in steps)
        proven, proof = describe_proof(paths.document("prove"), failed=failed)
    next_commands = (
        f"kt serve {paths.adapter}",
        f"kt chat --model {Path(paths.model).name}:{loop.name}      (in another terminal)",
    )
    training = summarise_training(paths.adapter)
    report = LoopReport(loop.run, loop.name, rows, answers, proof, proven, training, tuple(steps), next_commands)
    write_report(paths.run, report.name, report_blocks(report, run_panels(read_log(paths.adapter))), asdict(report))
    return report


def _has_text_answers(task: dict[str, Any]) -> bool:
    return any(line["metric"] in ("bleu-1", "rouge-l") for line in task["lines"])


def metric_rows(task: dict[str, Any], index: int = 1) -> list[MetricRow]:
    """The shown metrics of a compared task; `index` of the compared run, the base is 0."""
    lines = {line["metric"]: line for line in task["lines"]}
    metrics = [metric for metric in SHOWN_METRICS if metric in lines] or [task["primary"]]
    rows = []
    for metric in metrics:
        line = lines[metric]
        base, adapter = line["runs"][0]["value"], line["runs"][index]["value"]
        better = (adapter > base) == line["more_is_better"] and adapter != base
        p = line["differences"][index - 1]["p"]
        rows.append(MetricRow(task["task"], metric, base, adapter, p, better, bool(task["unrelated"])))
    return rows


def table(report: LoopReport) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: a task stands in the first of its rows, unrelated tasks below a heading."""
    rows: list[list[str]] = []
    for previous, row in zip((None, *report.rows), report.rows, strict=False):
        if row.unrelated and not (previous and previous.unrelated):
            rows.append(["unrelated: what it cost"])
        task = "" if previous is not None and previous.task == row.task else row.task
        values = f"{row.base:.1f}", f"{row.adapter:.1f}", f"{row.adapter - row.base:+.1f}{row.mark}"
        rows.append([task, METRIC_LABELS.get(row.metric, row.metric), *values])
    return ["task", "metric", BASE_NAME, report.name, "change"], rows


def terminal_lines(report: LoopReport) -> list[str]:
    """What the terminal shows at the end: the table, the two commands to go on with, the report."""
    lines = ["", *aligned(*table(report), left=2), STARS] if report.rows else []
    return [*lines, "", "Talk to it:", *(f"  {line}" for line in report.next), "", f"Report: {report.run}/report.html"]


def answer_lines(pair: AnswerPair, name: str) -> list[str]:
    """Before and after of one question, a line each."""
    width = max(len(word) for word in ("asked", BASE_NAME, name))
    words = (("asked", pair.asked), (BASE_NAME, pair.base), (name, pair.adapter))
    return [f"{word:<{width}}  {shorten(text, MAX_SHOWN_CHARS)}" for word, text in words]


def summary_lines(report: LoopReport) -> list[str]:
    """Training, proof and times, on the terminal with -v alone."""
    (training,) = training_lines(Path(report.run) / report.name)
    return [f"training: {training}", f"proof: {report.proof}", f"time: {format_times(report.stages)}"]


def format_times(stages: Sequence[StageStatus]) -> str:
    parts = [f"{step.name} {step.seconds:.0f} s" + (" (before)" if step.status == "skipped" else "") for step in stages]
    now = sum(step.seconds for step in stages if step.status != "skipped")
    return f"{now / 60:.1f} min: {', '.join(parts)}"


def shorten(text: str, limit: int = MAX_ANSWER_CHARS) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else f"{flat[:limit]}…"


def report_blocks(report: LoopReport, charts: Sequence[str]) -> list[Block]:
    """`charts`: the curves of training."""
    blocks = [paragraph(report.run)]
    if report.rows:
        blocks += [report_table(*table(report), left=2), paragraph(f"{STARS}. Every metric:", "eval/report.html")]
    blocks += map(chart, charts)
    for pair in report.answers:
        answers = [(BASE_NAME, shorten(pair.base)), (report.name, shorten(pair.adapter))]
        blocks.append(sample(shorten(pair.asked), answers))
    return [*blocks, listed(summary_lines(report)), code(report.next)]
