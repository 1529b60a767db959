"""The report of a loop from the stages' documents: a table, sample answers, the proof, speed, next commands.

Everything is read from the run's directory, so a report after skipped stages equals the first. `report.md` and
`report.json` are in that directory; the full comparison, with every metric and slice, is `eval/report.html`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ktransformers.files import write_json, write_text
from ktransformers.loop.pace import read_decision
from ktransformers.loop.run import FAILED, StageStatus
from ktransformers.loop.settings import Loop
from ktransformers.loop.stages import BASE_NAME, run_paths

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
MAX_ANSWER_CHARS = 400  # of an answer


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
class AnswerPair:
    asked: str
    base: str
    adapter: str


@dataclass(frozen=True)
class TrainingSummary:
    steps: int
    seconds: float
    tokens_per_second: float | None
    loss: float | None
    said: str  # why this number of steps


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
    comparison = _document(paths.document("compare"))
    tasks = comparison["tasks"] if comparison else []
    rows = tuple(row for task in sorted(tasks, key=lambda task: bool(task["unrelated"])) for row in _rows(task))
    samples = [sample for task in tasks for sample in task["samples"] if sample["prompt"] and _has_text_answers(task)]
    answers = tuple(AnswerPair(sample["prompt"], *sample["answers"][:2]) for sample in samples[: loop.answers])
    proven, proof = _describe_proof(_document(paths.document("prove"))) if loop.prove else (None, "not asked for")
    if any(step.status == FAILED for step in steps) and proven is not False:
        proven, proof = False, "NOT proven: kt prove did not end well; logs/prove.log says why"
    pace = read_decision(loop.train, paths.run) if loop.train.minutes is not None else None
    next_commands = (
        f"kt serve {paths.adapter}",
        f"kt chat --model {Path(paths.model).name}:{loop.name}      (in another terminal)",
        f'kt run {paths.adapter} "Why are cats important?"',
    )
    training = _summarise_training(paths.adapter, pace[1] if pace else "")
    report = LoopReport(loop.run, loop.name, rows, answers, proof, proven, training, tuple(steps), next_commands)
    write_json(paths.run / "report.json", report.as_json())
    write_text(paths.run / "report.md", markdown(report))
    return report


def _document(file: Path) -> Any:
    return json.loads(file.read_text()) if file.is_file() else None


def _has_text_answers(task: dict[str, Any]) -> bool:
    return any(line["metric"] in ("bleu-1", "rouge-l") for line in task["lines"])


def _rows(task: dict[str, Any]) -> list[MetricRow]:
    lines = {line["metric"]: line for line in task["lines"]}
    metrics = [metric for metric in SHOWN_METRICS if metric in lines] or [task["primary"]]
    rows = []
    for metric in metrics:
        line = lines[metric]
        base, adapter = (run["value"] for run in line["runs"][:2])
        better = (adapter > base) == line["more_is_better"] and adapter != base
        p = line["differences"][0]["p"]
        rows.append(MetricRow(task["task"], metric, base, adapter, p, better, bool(task["unrelated"])))
    return rows


def _describe_proof(document: Any) -> tuple[bool | None, str]:
    if not document:
        return None, "not there"
    if not document["passed"]:
        return False, f"NOT proven: {document.get('culprit') or 'see prove.json'}"
    checks = [check for check in document["checks"] if check["passed"]]
    floor, effect = document["floor"]["max"], document["effect"]["max"]
    return True, (
        f"proven by {len(checks)} checks on {document['tokens']} tokens: what is served is what was trained, and the "
        f"base is the base (log-probabilities move by up to {effect:.2g} with the adapter, by {floor:.2g} with noise)"
    )


def _summarise_training(adapter: Path, pace_note: str) -> TrainingSummary:
    """The rate is the mean of the logged steps after the first; for very short runs that of the whole run."""
    results = _document(adapter / "all_results.json") or {}
    steps = int((_document(adapter / "trainer_state.json") or {}).get("global_step", 0))
    log = adapter / "trainer_log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    rates = [line["throughput"] for line in lines if line.get("throughput")]
    seconds, tokens = float(results.get("train_runtime", 0.0)), float(results.get("num_tokens", 0.0))
    rate = sum(rates) / len(rates) if rates else tokens / seconds if tokens and seconds else None
    return TrainingSummary(steps, seconds, rate, results.get("train_loss"), pace_note)


def format_table(report: LoopReport) -> list[str]:
    """Plain text lines, aligned."""
    width = max([len(row.task) for row in report.rows], default=4)
    lines = [f"{'':<{width}}  {'':<14} {'base':>8} {report.name:>10}  change"]
    unrelated = False
    for previous, row in zip((None, *report.rows), report.rows, strict=False):
        if row.unrelated and not unrelated:
            unrelated = True
            lines.append("unrelated: what it cost")
        task = row.task if previous is None or previous.task != row.task else ""
        name = METRIC_LABELS.get(row.metric, row.metric)
        change = f"{row.adapter - row.base:+.1f}{row.mark}"
        lines.append(f"{task:<{width}}  {name:<14} {row.base:>8.1f} {row.adapter:>10.1f}  {change}")
    lines.append("* p < 0.05, ** p < 0.01, paired bootstrap; without a star it may be chance")
    return lines


def training_line(training: TrainingSummary) -> str:
    rate = f", {training.tokens_per_second:.0f} tokens/s" if training.tokens_per_second else ""
    loss = f", loss {training.loss:.3g}" if training.loss is not None else ""
    return f"{training.steps} steps in {training.seconds / 60:.1f} min{rate}{loss}"


def terminal_lines(report: LoopReport) -> list[str]:
    """What the terminal shows at the end."""
    lines: list[str] = []
    if report.rows:
        lines += ["", *format_table(report)]
    for pair in report.answers:
        lines += ["", f"asked  {shorten(pair.asked)}", f"base   {shorten(pair.base)}"]
        lines.append(f"{report.name:<6} {shorten(pair.adapter)}")
    lines += ["", f"training  {training_line(report.training)}"]
    lines += [f"pace      {report.training.said}"] if report.training.said else []
    lines += [f"proof     {report.proof}", f"time      {format_times(report.stages)}"]
    comparison_page = f", {report.run}/eval/report.html" if report.rows else ""
    lines += [
        f"report    {report.run}/report.md{comparison_page}",
        "",
        "talk to it:",
        *(f"  {line}" for line in report.next),
    ]
    return lines


def format_times(stages: Sequence[StageStatus]) -> str:
    parts = [f"{step.name} {step.seconds:.0f} s" + (" (before)" if step.status == "skipped" else "") for step in stages]
    now = sum(step.seconds for step in stages if step.status != "skipped")
    return f"{now / 60:.1f} min: {', '.join(parts)}"


def shorten(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= MAX_ANSWER_CHARS else f"{flat[:MAX_ANSWER_CHARS]}…"


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
    summary += [f"- pace: {report.training.said}"] if report.training.said else []
    lines += [*summary, f"- proof: {report.proof}", f"- time: {format_times(report.stages)}", "", "```"]
    return "\n".join([*lines, *report.next, "```"]) + "\n"
