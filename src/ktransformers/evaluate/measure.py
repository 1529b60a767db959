"""Turns answers into statistics: the metrics of each task, and the counts that each record contributes.

A record is what `run` stores for an item: `{"id", "slice", "prompt", "reference", "prediction", "logprobs", ...}`. A
record without the fields of a metric (an answer that the judge did not mark) contributes neither to its sum nor to its
count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy

from ktransformers.evaluate import text_metrics
from ktransformers.evaluate.statistic import Statistic, bleu, chrf, mean, perplexity, ratio
from ktransformers.evaluate.task import Task
from ktransformers.ground.patterns import FilePatterns

Record = dict[str, Any]
# A letter after the word "answer" or "option", or at the start; the last such phrase counts.
STATED_LETTER = re.compile(r"(?:answer|option)(?:\s+is|\s*:)?\s*[:\-]?\s*\(?\**([A-Z])\b", re.IGNORECASE)
LEADING_LETTER = re.compile(r"^\W*([A-Z])\b")


def statistics(task: Task, records: Sequence[Record]) -> dict[str, Statistic]:
    """Name of the metric -> its counts over these records."""
    by_metric: dict[str, Statistic] = {}
    for group in task.metric_groups:
        by_metric |= METRIC_GROUPS[group](task, records)
    return by_metric


def copied_input(task: Task, records: Sequence[Record]) -> dict[str, Statistic]:
    """What answers that repeat the input would score."""
    metrics = tuple(group for group in task.metric_groups if group in ("bleu", "rouge", "chrf", "exact"))
    copies = [{**record, "prediction": record["source"]} for record in records]
    return statistics(task.model_copy(update={"metrics": metrics}), copies)


def primary_metric(task: Task) -> str:
    """The metric that represents the task in a summary."""
    if task.primary:
        return task.primary
    first = {"letter": "accuracy", "generation": "accuracy_generated", "text": "accuracy_text", "loss": "perplexity"}
    order = ("style", "letter", "generation", "text", "exact", "contains")
    preferred = [group for group in order if group in task.metric_groups]
    if preferred:
        return first.get(preferred[0], preferred[0])
    return {"rouge": "rouge-l", "bleu": "bleu-4", "loss": "perplexity"}.get(
        task.metric_groups[0], task.metric_groups[0]
    )


def chosen_option(record: Record) -> int:
    """The option with the most likely letter, or text if letters were not scored; the first of equals."""
    return int(numpy.argmax(record["logprobs"] if "logprobs" in record else record["text_logprobs"]))


def stated_letter(text: str, letters: str) -> str:
    """The letter that a generated answer states, "" if none."""
    phrases = [letter.upper() for letter in STATED_LETTER.findall(text) if letter.upper() in letters]
    if phrases:
        return str(phrases[-1])
    start = LEADING_LETTER.match(text)
    return start[1] if start and start[1] in letters else ""


def _array(values: list[list[float]]) -> Any:
    return numpy.array(values, dtype=numpy.float64)


def _mean_of(values: Sequence[float | None]) -> Statistic:
    return Statistic(_array([[0.0, 0.0] if value is None else [float(value), 1.0] for value in values]), mean)


def _bleu(_task: Task, records: Sequence[Record]) -> dict[str, Statistic]:
    rows = _array([[*text_metrics.bleu_counts(record["prediction"], record["reference"])] for record in records])
    return {f"bleu-{order}": Statistic(rows, bleu(order)) for order in range(1, text_metrics.BLEU_ORDERS + 1)}


def _rouge(_task: Task, records: Sequence[Record]) -> dict[str, Statistic]:
    scores = [text_metrics.rouge(record["prediction"], record["reference"]) for record in records]
    return {f"rouge-{name}": _mean_of([score[index] for score in scores]) for index, name in enumerate("12l")}


def _chrf(_task: Task, records: Sequence[Record]) -> dict[str, Statistic]:
    return {
        "chrf": Statistic(_array([[*text_metrics.chrf_counts(r["prediction"], r["reference"])] for r in records]), chrf)
    }


def _extract(pattern: FilePatterns | None, text: str) -> str:
    return text if pattern is None else (pattern.last(text) or "").replace(",", "")


def _exact(task: Task, records: Sequence[Record]) -> dict[str, Statistic]:
    _, pattern = task.patterns(f"task {task.name}")
    if pattern is not None:
        pattern.prefetch(record[key] for record in records for key in ("reference", "prediction"))

    def same(record: Record) -> bool:
        expected = text_metrics.normalise(_extract(pattern, record["reference"]))
        return bool(expected) and text_metrics.normalise(_extract(pattern, record["prediction"])) == expected

    return {"exact": _mean_of([same(record) for record in records])}


def _contains(_task: Task, records: Sequence[Record]) -> dict[str, Statistic]:
    return {
        "contains": _mean_of(
            [text_metrics.normalise(r["reference"]) in text_metrics.normalise(r["prediction"]) for r in records]
        )
    }


def _style(task: Task, records: Sequence[Record]) -> dict[str, Statistic]:
    """Each pattern on its own, and `style`: the share of answers that match all of them."""
    style, _ = task.patterns(f"task {task.name}")
    for pattern in style.values():
        pattern.prefetch(record["prediction"] for record in records)
    hits = {name: [pattern.fits(record["prediction"]) for record in records] for name, pattern in style.items()}
    result = {"style": _mean_of([all(column) for column in zip(*hits.values(), strict=True)])}
    return result | {f"style.{name}": _mean_of(values) for name, values in hits.items()}


def _loss(_task: Task, records: Sequence[Record]) -> dict[str, Statistic]:
    rows = _array([[-record["logprob"], record["tokens"]] for record in records])
    per_byte = _array([[-r["logprob"] / numpy.log(2), len(r["reference"].encode())] for r in records])
    common = partial(Statistic, more_is_better=False, per_cent=False)
    return {
        "loss": common(rows, ratio),
        "perplexity": common(rows, perplexity),
        "bits_per_byte": common(per_byte, ratio),
    }


def _letter(_task: Task, records: Sequence[Record]) -> dict[str, Statistic]:
    return {"accuracy": _mean_of([chosen_option(record) == record["answer"] for record in records])}


def _text(_task: Task, records: Sequence[Record]) -> dict[str, Statistic]:
    right = [int(numpy.argmax(record["text_logprobs"])) == record["answer"] for record in records]
    return {"accuracy_text": _mean_of(right)}


def _generation(_task: Task, records: Sequence[Record]) -> dict[str, Statistic]:
    letters = [stated_letter(record["prediction"], record["letters"]) for record in records]
    return {
        "accuracy_generated": _mean_of([s == r["reference"] for s, r in zip(letters, records, strict=True)]),
        "answered": _mean_of([bool(letter) for letter in letters]),
    }


def _judge(task: Task, records: Sequence[Record]) -> dict[str, Statistic]:
    """Marks from 1 to 5; no metrics without a judge."""
    if task.judge is None or not any(record.get("marks") for record in records):
        return {}
    marks = [record.get("marks") or {} for record in records]
    by_criterion = {}
    for name in task.judge.criteria:
        rows = _array([[mark[name], 1.0] if name in mark else [0.0, 0.0] for mark in marks])
        by_criterion[f"judge.{name}"] = Statistic(rows, ratio, per_cent=False)
    means = _array([[sum(mark.values()) / len(mark), 1.0] if mark else [0.0, 0.0] for mark in marks])
    return {"judge": Statistic(means, ratio, per_cent=False), **by_criterion}


METRIC_GROUPS = {
    "bleu": _bleu,
    "rouge": _rouge,
    "chrf": _chrf,
    "exact": _exact,
    "contains": _contains,
    "style": _style,
    "loss": _loss,
    "letter": _letter,
    "generation": _generation,
    "text": _text,
    "judge": _judge,
}
