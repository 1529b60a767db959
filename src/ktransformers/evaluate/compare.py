"""Compares evaluation runs: gains, costs, and which differences are significant.

The first run is the baseline. For every task that all runs have, over the items that all have answered: each metric of
each run with its interval, the difference from the baseline with the p-value of a paired bootstrap, the same for every
slice, and some answers side by side. A gain is a difference in the metric's better direction: lower perplexity, higher
accuracy.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ktransformers.evaluate.measure import Record, chosen_option, copied_input, primary_metric, statistics
from ktransformers.evaluate.run import read_records
from ktransformers.evaluate.statistic import Difference, Estimate, Statistic, difference, estimate
from ktransformers.evaluate.task import Task
from ktransformers.ground.errors import InputError

SAMPLES_PER_TASK = 3


@dataclass(frozen=True)
class Line:
    """One metric over all items of a task or over one slice; `runs` and `differences` are in the order of the runs."""

    metric: str
    slice: str  # "" for all items
    runs: tuple[Estimate, ...]
    differences: tuple[Difference, ...]  # of the second and later runs from the first
    more_is_better: bool
    per_cent: bool


@dataclass(frozen=True)
class Sample:
    id: str
    prompt: str
    reference: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class TaskComparison:
    task: str
    title: str
    primary: str
    items: int
    lines: tuple[Line, ...]  # all items
    slices: tuple[Line, ...]  # the primary metric of each slice
    samples: tuple[Sample, ...]
    note: str = ""
    unrelated: bool = False

    @property
    def headline(self) -> Line:
        return next(line for line in self.lines if line.metric == self.primary)


@dataclass(frozen=True)
class Comparison:
    runs: tuple[str, ...]
    models: tuple[str, ...]
    tasks: tuple[TaskComparison, ...]

    def panels(self) -> list[tuple[str, list[TaskComparison]]]:
        """(heading, tasks): related tasks, then unrelated ones, which show what training cost."""
        panels = [("", [task for task in self.tasks if not task.unrelated])]
        panels.append(("unrelated: what it cost", [task for task in self.tasks if task.unrelated]))
        return [(heading, tasks) for heading, tasks in panels if tasks]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(directories: Sequence[Path], names: Sequence[str] | None = None, seed: int = 0) -> Comparison:
    """Each directory contains one folder per task, as `kt eval` writes them."""
    if len(directories) < 2:
        raise InputError("compare", f"{len(directories)} run", "two or more")
    tasks_of_runs = [_read_tasks(directory) for directory in directories]
    shared = [name for name in tasks_of_runs[0] if all(name in others for others in tasks_of_runs)]
    if not shared:
        raise InputError("compare", ", ".join(map(str, directories)), "runs that have a task in common")
    models = tuple(next(iter(tasks.values()))[1] for tasks in tasks_of_runs)
    tasks = tuple(_compare_task([tasks[name] for tasks in tasks_of_runs], seed) for name in shared)
    return Comparison(tuple(names or [directory.name for directory in directories]), models, tasks)


def _read_tasks(directory: Path) -> dict[str, tuple[Task, str, dict[str, Record]]]:
    """Task name -> (task, model, records by id)."""
    head_files = sorted(directory.glob("*/run.json"), key=lambda file: (file.stat().st_mtime_ns, file.parent.name))
    if not head_files:
        raise InputError("run", f"{directory}", "a directory that `kt eval` wrote", "give its -o, or a name in it")
    tasks = {}
    for head_file in head_files:
        if not (head_file.parent / "result.json").is_file():
            raise InputError(
                "run",
                f"{head_file.parent}, which is not finished",
                "a finished run",
                "run the same command to finish it",
            )
        head_fields = json.loads(head_file.read_text())
        task = Task.model_validate(head_fields["task"])
        tasks[task.name] = (task, str(head_fields["model"]), {r["id"]: r for r in read_records(head_file.parent)})
    return tasks


def _compare_task(entries: Sequence[tuple[Task, str, dict[str, Record]]], seed: int) -> TaskComparison:
    task = entries[0][0]
    records = [entry[2] for entry in entries]
    ids = [name for name in records[0] if all(name in others for others in records)]
    ids.sort()  # independent of the order of answering
    if not ids:
        raise InputError(task.name, "runs without a common item", "runs over the same data")
    ordered = [[table[name] for name in ids] for table in records]
    statistics_of_runs = [statistics(task, rows) for rows in ordered]
    metrics = [name for name in statistics_of_runs[0] if all(name in others for others in statistics_of_runs)]
    lines = tuple(_compare_metric(name, "", [table[name] for table in statistics_of_runs], seed) for name in metrics)
    primary = primary_metric(task)
    if primary not in metrics:
        raise InputError(f"{task.name}: primary", repr(primary), f"one of {', '.join(metrics)}")
    slices = []
    for name in sorted({record["slice"] for record in ordered[0]} - {""}):
        indices = [index for index, record in enumerate(ordered[0]) if record["slice"] == name]
        slices.append(
            _compare_metric(primary, name, [table[primary].take(indices) for table in statistics_of_runs], seed)
        )
    note = ""
    if task.copy_input:
        copied = copied_input(task, ordered[0])
        if primary in copied:
            note = f"copying the input scores {primary} {copied[primary].value():.1f}"
    samples = _draw_samples(ordered, seed)
    return TaskComparison(task.name, task.title, primary, len(ids), lines, tuple(slices), samples, note, task.unrelated)


def _compare_metric(metric: str, part: str, of_runs: Sequence[Statistic], seed: int) -> Line:
    first = of_runs[0]
    return Line(
        metric,
        part,
        tuple(estimate(statistic, seed) for statistic in of_runs),
        tuple(difference(first, other, seed) for other in of_runs[1:]),
        first.more_is_better,
        first.per_cent,
    )


def _draw_samples(ordered: Sequence[Sequence[Record]], seed: int) -> tuple[Sample, ...]:
    indices = random.Random(seed).sample(range(len(ordered[0])), min(SAMPLES_PER_TASK, len(ordered[0])))
    if not any(key in ordered[0][0] for key in ("prediction", "logprobs", "text_logprobs")):
        return ()
    return tuple(
        Sample(
            ordered[0][index]["id"],
            ordered[0][index]["prompt"],
            ordered[0][index]["reference"],
            tuple(_answer_text(records[index]) for records in ordered),
        )
        for index in sorted(indices)
    )


def _answer_text(record: Record) -> str:
    if "prediction" in record:
        return str(record["prediction"])
    return str(record["letters"][chosen_option(record)])
