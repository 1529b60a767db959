"""The report of a loop from the stages' documents: a table, sample answers, curves, the proof, speed, next commands.

Everything is read from the run's directory, so a report after skipped stages equals the first. `report.html`,
`report.md` and `report.json` are in that directory; the full comparison, with every metric and slice, is
`eval/report.html`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from ktransformers.evaluate.loop.questions import AnswerPair, read_answers
from ktransformers.evaluate.loop.results import TrainingSummary, describe_proof, read_json, summarise_training
from ktransformers.evaluate.loop.run import ANSWERS_FILE, FAILED, StageStatus
from ktransformers.evaluate.loop.settings import Loop
from ktransformers.evaluate.loop.stages import BASE_NAME, run_paths
from ktransformers.ground import html_page
from ktransformers.ground.files import write_json, write_text
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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_report(loop: Loop, steps: Sequence[StageStatus]) -> LoopReport:
    paths = run_paths(loop)
    comparison = read_json(paths.document("compare"))
    tasks = comparison["tasks"] if comparison else []
    rows = tuple(row for task in sorted(tasks, key=lambda task: bool(task["unrelated"])) for row in metric_rows(task))
    samples = [sample for task in tasks for sample in task["samples"] if sample["prompt"] and _has_text_answers(task)]
    asked = read_answers(paths.run / ANSWERS_FILE)
    drawn = [AnswerPair(sample["prompt"], *sample["answers"][:2]) for sample in samples]
    answers = (*asked, *drawn[: max(0, loop.answers - len(asked))])
    proven, proof = describe_proof(read_json(paths.document("prove"))) if loop.prove else (None, "not asked for")
    if any(step.status == FAILED for step in steps) and proven is not False:
        proven, proof = False, "NOT proven: kt prove did not end well; logs/prove.log says why"
    next_commands = (
        f"kt serve {paths.adapter}",
        f"kt chat --model {Path(paths.model).name}:{loop.name}      (in another terminal)",
    )
    training = summarise_training(paths.adapter)
    report = LoopReport(loop.run, loop.name, rows, answers, proof, proven, training, tuple(steps), next_commands)
    write_json(paths.run / "report.json", report.as_json())
    write_text(paths.run / "report.md", markdown(report))
    write_text(paths.run / "report.html", page(report, run_panels(read_log(paths.adapter))))
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


def format_table(report: LoopReport) -> list[str]:
    """Plain text lines, aligned."""
    width = max([len(row.task) for row in report.rows], default=4)
    named = max([len(METRIC_LABELS.get(row.metric, row.metric)) for row in report.rows], default=4)
    lines = [f"{'':<{width}}  {'':<{named}} {BASE_NAME:>8} {report.name:>10}  change"]
    unrelated = False
    for previous, row in zip((None, *report.rows), report.rows, strict=False):
        if row.unrelated and not unrelated:
            unrelated = True
            lines.append("unrelated: what it cost")
        task = row.task if previous is None or previous.task != row.task else ""
        name = METRIC_LABELS.get(row.metric, row.metric)
        change = f"{row.adapter - row.base:+.1f}{row.mark}"
        lines.append(f"{task:<{width}}  {name:<{named}} {row.base:>8.1f} {row.adapter:>10.1f}  {change}")
    lines.append("* p < 0.05, ** p < 0.01, paired bootstrap; without a star it may be chance")
    return lines


def training_line(training: TrainingSummary) -> str:
    rate = f", {training.tokens_per_second:.0f} tokens/s" if training.tokens_per_second else ""
    loss = f", loss {training.loss:.3g}" if training.loss is not None else ""
    return f"{training.steps} steps in {training.seconds / 60:.1f} min{rate}{loss}"


def terminal_lines(report: LoopReport) -> list[str]:
    """What the terminal shows at the end: the table, the two commands to go on with, the report."""
    lines = ["", *format_table(report)] if report.rows else []
    return [*lines, "", "Talk to it:", *(f"  {line}" for line in report.next), "", f"Report: {report.run}/report.html"]


def answer_lines(pair: AnswerPair, name: str) -> list[str]:
    """Before and after of one question, a line each."""
    width = max(len(word) for word in ("asked", BASE_NAME, name))
    words = (("asked", pair.asked), (BASE_NAME, pair.base), (name, pair.adapter))
    return [f"{word:<{width}}  {shorten(text, MAX_SHOWN_CHARS)}" for word, text in words]


def detail_lines(report: LoopReport) -> list[str]:
    """With -v also: training, proof and times."""
    lines = [f"training  {training_line(report.training)}"]
    return [*lines, f"proof     {report.proof}", f"time      {format_times(report.stages)}"]


def format_times(stages: Sequence[StageStatus]) -> str:
    parts = [f"{step.name} {step.seconds:.0f} s" + (" (before)" if step.status == "skipped" else "") for step in stages]
    now = sum(step.seconds for step in stages if step.status != "skipped")
    return f"{now / 60:.1f} min: {', '.join(parts)}"


def shorten(text: str, limit: int = MAX_ANSWER_CHARS) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else f"{flat[:limit]}…"


def markdown(report: LoopReport) -> str:
    lines = [f"# {report.name}: {report.run}", ""]
    if report.rows:
        lines += [f"| task | metric | {BASE_NAME} | {report.name} |", "|---|---|---:|---:|"]
        for row in report.rows:
            mark = row.mark.replace("*", "\\*")
            task = f"{row.task} (unrelated)" if row.unrelated else row.task
            lines.append(
                f"| {task} | {METRIC_LABELS.get(row.metric, row.metric)} | {row.base:.1f} | {row.adapter:.1f}{mark} |"
            )
        lines += ["", "\\* p < 0.05, \\*\\* p < 0.01, paired bootstrap. Every metric: `eval/report.html`.", ""]
    for sample in report.answers:
        pairs = (("asked", sample.asked), (BASE_NAME, sample.base), (report.name, sample.adapter))
        lines += [line for label, text in pairs for line in (f"**{label}**", "", f"> {shorten(text)}", "")]
    summary = [f"- training: {training_line(report.training)}"]
    lines += [*summary, f"- proof: {report.proof}", f"- time: {format_times(report.stages)}", "", "```"]
    return "\n".join([*lines, *report.next, "```"]) + "\n"


def page(report: LoopReport, charts: Sequence[str]) -> str:
    """The same as HTML, with the curves of training."""
    summary = [f"training: {training_line(report.training)}"]
    summary += [f"proof: {report.proof}", f"time: {format_times(report.stages)}"]
    parts = [f"<h1>{escape(report.name)}</h1><p class='soft'>{escape(report.run)}</p>"]
    if report.rows:
        rows = [
            [
                f"{row.task} (unrelated)" if row.unrelated else row.task,
                METRIC_LABELS.get(row.metric, row.metric),
                *(f"{row.base:.1f}", f"{row.adapter:.1f}", f"{row.adapter - row.base:+.1f}{row.mark}"),
            ]
            for row in report.rows
        ]
        parts.append(html_page.table(["task", "metric", BASE_NAME, report.name, "change"], rows, left=2))
        parts.append(
            "<p class='soft'>* p < 0.05, ** p < 0.01, paired bootstrap. "
            "Every metric: <a href='eval/report.html'>eval/report.html</a>.</p>"
        )
    parts += [html_page.chart(svg) for svg in charts]
    for sample in report.answers:
        answers = [(BASE_NAME, shorten(sample.base)), (report.name, shorten(sample.adapter))]
        parts.append(html_page.sample(shorten(sample.asked), answers))
    parts.append("<ul class='soft'>" + "".join(f"<li>{escape(line)}</li>" for line in summary) + "</ul>")
    parts.append("<pre>" + escape("\n".join(report.next)) + "</pre>")
    return html_page.render(report.name, parts)
