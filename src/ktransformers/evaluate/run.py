"""One model, one task: ask, keep every answer, measure.

A run's directory holds `run.json` (what was asked, and a fingerprint of it), `items.jsonl` (one line per answered item,
in the order of answering) and, when all are answered, `result.json` and LLaMA-Factory's `generated_predictions.jsonl`
and `predict_results.json`. Lines are appended and flushed batch by batch: a killed run goes on where it stopped, and a
line that was cut off by the kill is asked again. A directory of other questions is refused, not mixed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ktransformers
from ktransformers.errors import InputError
from ktransformers.evaluate.backend import Backend, EvalPrompt, Question
from ktransformers.evaluate.items import Item, read_items
from ktransformers.evaluate.judge import Judge
from ktransformers.evaluate.measure import Record, primary_metric, statistics
from ktransformers.evaluate.statistic import Estimate, Statistic, estimate
from ktransformers.evaluate.task import Task
from ktransformers.files import write_json, write_text

CHUNK_ITEMS = 32  # items between two lines of progress; backends cut it into batches
Progress = Callable[[int, int], None]
IRRELEVANT_FIELDS = ("data", "title", "source", "licence", "primary", "unrelated")  # of a task: they change no answer
GENERATED_METRICS = {"bleu", "rouge", "chrf", "exact", "contains", "style", "judge", "generation"}


def evaluate(
    backend: Backend,
    task: Task,
    directory: Path,
    *,
    judge: Judge | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The result, as `result.json` has it."""
    found = read_items(task)
    asked = describe_run(backend, task, found, judge)
    directory.mkdir(parents=True, exist_ok=True)
    records = _resume(directory, asked)
    todo = [item for item in found if item.id not in records]
    done = len(found) - len(todo)
    seconds = 0.0
    if progress is not None:
        progress(done, len(found))
    with (directory / "items.jsonl").open("a") as log:
        for start in range(0, len(todo), CHUNK_ITEMS):
            chunk = todo[start : start + CHUNK_ITEMS]
            began = time.perf_counter()
            answers = _answer_items(backend, task, chunk, judge)
            seconds += time.perf_counter() - began
            for record in answers:
                log.write(json.dumps(record, ensure_ascii=False) + "\n")
                records[record["id"]] = record
            log.flush()
            os.fsync(log.fileno())
            done += len(chunk)
            if progress is not None:
                progress(done, len(found))
    ordered = [records[item.id] for item in found]
    result = summarise(task, ordered) | {"model": asked["model"], "seconds": round(seconds, 3)}
    write_json(directory / "result.json", result)
    _write_predictions(directory, task, ordered, result)
    return result


def describe_run(backend: Backend, task: Task, found: Sequence[Item], judge: Judge | None) -> dict[str, Any]:
    """What the answers depend on."""
    words = json.loads(task.model_dump_json())
    content = json.dumps([dataclasses.asdict(item) for item in found], ensure_ascii=False).encode()
    asked = {"model": backend.name, "task": words, "items": hashlib.sha256(content).hexdigest()}
    asked["judge"] = None if judge is None else f"{judge.endpoint.url} {judge.model}"
    relevant = {key: value for key, value in words.items() if key not in IRRELEVANT_FIELDS}
    text = json.dumps({**asked, "task": relevant}, sort_keys=True)
    return {
        **asked,
        "fingerprint": hashlib.sha256(text.encode()).hexdigest(),
        "ktransformers": ktransformers.__version__,
    }


def _resume(directory: Path, asked: dict[str, Any]) -> dict[str, Record]:
    """The answers that are there already; `run.json` is written where there are none."""
    head, log = directory / "run.json", directory / "items.jsonl"
    if not head.is_file():
        log.unlink(missing_ok=True)
        write_json(head, asked)
        return {}
    before = json.loads(head.read_text())
    if before.get("fingerprint") != asked["fingerprint"]:
        changed = [key for key in ("model", "task", "items", "judge") if before.get(key) != asked[key]]
        raise InputError(
            str(directory), f"a run with another {' and '.join(changed)}", "the same questions", "choose another -o"
        )
    return {record["id"]: record for record in read_records(directory, repair=True)}


def read_records(directory: Path, repair: bool = False) -> list[Record]:
    """The lines of items.jsonl; `repair` cuts off a last line that a kill left half-written."""
    log = directory / "items.jsonl"
    if not log.is_file():
        return []
    whole = log.read_bytes()
    complete = whole[: whole.rfind(b"\n") + 1]
    if repair and len(complete) < len(whole):
        with log.open("r+b") as handle:
            handle.truncate(len(complete))
    return [json.loads(line) for line in complete.decode().split("\n") if line]


def _answer_items(backend: Backend, task: Task, chunk: Sequence[Item], judge: Judge | None) -> list[Record]:
    chat = task.format == "chat" and task.kind != "text"
    prompts = [EvalPrompt(item.prompt, task.system, chat) for item in chunk]
    records: list[Record] = [
        {"id": item.id, "slice": item.slice, "prompt": item.prompt, "reference": item.reference} for item in chunk
    ]
    if GENERATED_METRICS & set(task.asked):
        for record, text in zip(records, backend.generate(prompts, task.max_new_tokens), strict=True):
            record["prediction"] = text
    if task.kind == "choice":
        for record, item in zip(records, chunk, strict=True):
            record |= {"letters": item.letters, "answer": item.answer}
    if "letter" in task.asked:
        lead = "" if chat else " "
        questions = [
            Question(prompt, tuple(lead + letter for letter in item.letters))
            for prompt, item in zip(prompts, chunk, strict=True)
        ]
        for record, scores in zip(records, backend.likelihoods(questions), strict=True):
            record["logprobs"] = [score.logprob for score in scores]
    if "text" in task.asked:
        lead = "" if chat else " "
        questions = [
            Question(EvalPrompt(item.question, task.system, chat), tuple(lead + choice for choice in item.choices))
            for item in chunk
        ]
        for record, scores in zip(records, backend.likelihoods(questions), strict=True):
            record["text_logprobs"] = [score.logprob / score.tokens for score in scores]
    if "loss" in task.asked:
        lead = "" if chat or task.kind == "text" else " "
        questions = [Question(p, (lead + item.reference,)) for p, item in zip(prompts, chunk, strict=True)]
        for record, (score,) in zip(records, backend.likelihoods(questions), strict=True):
            record |= {"logprob": score.logprob, "tokens": score.tokens}
    if "judge" in task.asked and judge is not None and task.judge is not None:
        for record, marks in zip(records, judge.marks(task.judge, records), strict=True):
            record["marks"] = marks
    if task.copy_input:
        for record, item in zip(records, chunk, strict=True):
            record["source"] = item.source
    return records


def summarise(task: Task, records: Sequence[Record]) -> dict[str, Any]:
    """Every metric with its 95 % interval, over all items and over each slice."""
    whole = statistics(task, records)
    names = sorted({record["slice"] for record in records} - {""})
    slices = {
        name: _estimate_all(whole, [place for place, record in enumerate(records) if record["slice"] == name])
        for name in names
    }
    result: dict[str, Any] = {
        "task": task.name,
        "title": task.title,
        "items": len(records),
        "primary": primary_metric(task),
        "metrics": _estimate_all(whole, None),
        "slices": slices,
    }
    if task.copy_input:
        words = [group for group in task.asked if group in ("bleu", "rouge", "chrf", "exact")]
        copied = task.model_copy(update={"metrics": tuple(words)})
        same = [{**record, "prediction": record["source"]} for record in records]
        result["copying_the_input"] = {name: found.value() for name, found in statistics(copied, same).items()}
    return result


def _estimate_all(whole: dict[str, Statistic], places: list[int] | None) -> dict[str, dict[str, float]]:
    def of(statistic: Statistic) -> Estimate:
        return estimate(statistic if places is None else statistic.take(places))

    return {name: dataclasses.asdict(of(statistic)) for name, statistic in whole.items()}


def _write_predictions(directory: Path, task: Task, records: Sequence[Record], result: dict[str, Any]) -> None:
    """The two files that LLaMA-Factory's `do_predict` leaves, for whoever reads those."""
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
    values = {f"predict_{name}": found["value"] for name, found in result["metrics"].items()}
    seconds = result["seconds"]
    pace = {
        "predict_runtime": seconds,
        "predict_samples_per_second": round(len(records) / seconds, 3) if seconds else 0.0,
    }
    write_json(directory / "predict_results.json", values | pace)
