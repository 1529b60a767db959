"""Evaluates one model on one task: asks, stores every answer, measures.

A run's directory contains `run.json` (what was asked, with a fingerprint), `items.jsonl` (one line per answered item,
in order of answering) and, once complete, `result.json` and LLaMA-Factory's `generated_predictions.jsonl` and
`predict_results.json`. Lines are appended and synced per chunk: a killed run resumes, and a truncated line is asked
again. A directory with other questions is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ktransformers
from ktransformers.evaluate.backend import Backend, EvalPrompt, Likelihood, Question
from ktransformers.evaluate.items import Item, read_items
from ktransformers.evaluate.judge import Judge
from ktransformers.evaluate.measure import Record, copied_input, primary_metric, statistics
from ktransformers.evaluate.statistic import Estimate, Statistic, estimate
from ktransformers.evaluate.task import Task
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import write_json, write_text

CHUNK_ITEMS = 32  # between two progress reports; backends split it into batches
Progress = Callable[[int, int], None]
IRRELEVANT_FIELDS = (
    "data",
    "obtain",
    "title",
    "source",
    "licence",
    "primary",
    "unrelated",
)  # fields of a task that do not affect answers
GENERATED_METRICS = {"bleu", "rouge", "chrf", "exact", "contains", "style", "judge", "generation"}


def evaluate(
    backend: Backend, task: Task, directory: Path, *, judge: Judge | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """The result, as stored in `result.json`."""
    items = read_items(task)
    run_fields = describe_run(backend, task, items, judge)
    directory.mkdir(parents=True, exist_ok=True)
    records = _resume(directory, run_fields)
    pending = [item for item in items if item.id not in records]
    answered = len(items) - len(pending)
    seconds = 0.0
    if progress is not None:
        progress(answered, len(items))
    with (directory / "items.jsonl").open("a") as log:
        for start in range(0, len(pending), CHUNK_ITEMS):
            chunk = pending[start : start + CHUNK_ITEMS]
            started = time.perf_counter()
            answers = _answer_items(backend, task, chunk, judge)
            seconds += time.perf_counter() - started
            for record in answers:
                log.write(json.dumps(record, ensure_ascii=False) + "\n")
                records[record["id"]] = record
            log.flush()
            os.fsync(log.fileno())
            answered += len(chunk)
            if progress is not None:
                progress(answered, len(items))
    ordered = [records[item.id] for item in items]
    result = summarise(task, ordered) | {"model": run_fields["model"], "seconds": round(seconds, 3)}
    write_json(directory / "result.json", result)
    _write_predictions(directory, task, ordered, result)
    return result


def describe_run(backend: Backend, task: Task, items: Sequence[Item], judge: Judge | None) -> dict[str, Any]:
    """What the answers depend on, with its fingerprint."""
    task_fields = json.loads(task.model_dump_json())
    content = json.dumps([dataclasses.asdict(item) for item in items], ensure_ascii=False).encode()
    run_fields = {"model": backend.name, "task": task_fields, "items": hashlib.sha256(content).hexdigest()}
    run_fields["judge"] = None if judge is None else f"{judge.endpoint.url} {judge.model}"
    relevant = {key: value for key, value in task_fields.items() if key not in IRRELEVANT_FIELDS}
    text = json.dumps({**run_fields, "task": relevant}, sort_keys=True)
    return {
        **run_fields,
        "fingerprint": hashlib.sha256(text.encode()).hexdigest(),
        "ktransformers": ktransformers.__version__,
    }


def _resume(directory: Path, run_fields: dict[str, Any]) -> dict[str, Record]:
    """The answers stored so far; writes `run.json` if there are none."""
    head_file, log = directory / "run.json", directory / "items.jsonl"
    if not head_file.is_file():
        log.unlink(missing_ok=True)
        write_json(head_file, run_fields)
        return {}
    previous = json.loads(head_file.read_text())
    if previous.get("fingerprint") != run_fields["fingerprint"]:
        changed = [key for key in ("model", "task", "items", "judge") if previous.get(key) != run_fields[key]]
        raise InputError(
            str(directory), f"a run with another {' and '.join(changed)}", "the same questions", "choose another -o"
        )
    return {record["id"]: record for record in read_records(directory, repair=True)}


def read_records(directory: Path, repair: bool = False) -> list[Record]:
    """The lines of items.jsonl; `repair` removes a truncated last line."""
    log = directory / "items.jsonl"
    if not log.is_file():
        return []
    content = log.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if repair and len(complete) < len(content):
        with log.open("r+b") as handle:
            handle.truncate(len(complete))
    return [json.loads(line) for line in complete.decode().split("\n") if line]


def _answer_items(backend: Backend, task: Task, chunk: Sequence[Item], judge: Judge | None) -> list[Record]:
    chat = task.format == "chat" and task.kind != "text"
    separator = "" if chat or task.kind == "text" else " "
    prompts = [EvalPrompt(item.prompt, item.system or task.system, chat, item.history) for item in chunk]
    records = [_record_of(task, item) for item in chunk]

    def score(
        asked: Sequence[EvalPrompt], answers: Sequence[Sequence[str]]
    ) -> Iterator[tuple[Record, list[Likelihood]]]:
        texts = [tuple(separator + answer for answer in of_item) for of_item in answers]
        return zip(records, backend.likelihoods(list(map(Question, asked, texts))), strict=True)

    if GENERATED_METRICS & set(task.metric_groups):
        for record, text in zip(records, backend.generate(prompts, task.max_new_tokens), strict=True):
            record["prediction"] = text
    if "letter" in task.metric_groups:
        for record, scores in score(prompts, [item.letters for item in chunk]):
            record["logprobs"] = [option.logprob for option in scores]
    if "text" in task.metric_groups:
        bare = [EvalPrompt(item.question, task.system, chat) for item in chunk]
        for record, scores in score(bare, [item.choices for item in chunk]):
            record["text_logprobs"] = [option.logprob / option.tokens for option in scores]
    if "loss" in task.metric_groups:
        for record, (only,) in score(prompts, [(item.reference,) for item in chunk]):
            record |= {"logprob": only.logprob, "tokens": only.tokens}
    if "judge" in task.metric_groups and judge is not None and task.judge is not None:
        for record, marks in zip(records, judge.marks(task.judge, records), strict=True):
            record["marks"] = marks
    return records


def _record_of(task: Task, item: Item) -> Record:
    record: Record = {"id": item.id, "slice": item.slice, "prompt": item.prompt, "reference": item.reference}
    record |= {key: value for key, value in (("system", item.system), ("history", item.history)) if value}
    record |= {"letters": item.letters, "answer": item.answer} if task.kind == "choice" else {}
    return record | ({"source": item.source} if task.copy_input else {})


def summarise(task: Task, records: Sequence[Record]) -> dict[str, Any]:
    """Every metric with its 95 % interval, over all items and over each slice."""
    by_metric = statistics(task, records)
    names = sorted({record["slice"] for record in records} - {""})
    slices = {
        name: _estimate_all(by_metric, [index for index, record in enumerate(records) if record["slice"] == name])
        for name in names
    }
    result: dict[str, Any] = {
        "task": task.name,
        "title": task.title,
        "items": len(records),
        "primary": primary_metric(task),
        "metrics": _estimate_all(by_metric, None),
        "slices": slices,
    }
    if task.copy_input:
        result["copying_the_input"] = {name: found.value() for name, found in copied_input(task, records).items()}
    return result


def _estimate_all(by_metric: dict[str, Statistic], indices: list[int] | None) -> dict[str, dict[str, float]]:
    def estimate_one(statistic: Statistic) -> Estimate:
        return estimate(statistic if indices is None else statistic.take(indices))

    return {name: dataclasses.asdict(estimate_one(statistic)) for name, statistic in by_metric.items()}


def _write_predictions(directory: Path, task: Task, records: Sequence[Record], result: dict[str, Any]) -> None:
    """The two files that LLaMA-Factory's `do_predict` writes."""
    if not records or "prediction" not in records[0]:
        return
    lines = [
        json.dumps(
            {"prompt": record["prompt"], "predict": record["prediction"], "label": record["reference"]},
            ensure_ascii=False,
        )
        for record in records
    ]
    write_text(directory / "generated_predictions.jsonl", "\n".join(lines) + "\n")
    values = {f"predict_{name}": metric["value"] for name, metric in result["metrics"].items()}
    seconds = result["seconds"]
    timing = {
        "predict_runtime": seconds,
        "predict_samples_per_second": round(len(records) / seconds, 3) if seconds else 0.0,
    }
    write_json(directory / "predict_results.json", values | timing)
