"""Reads the rows of a task's data as items: prompt and reference.

Supports JSON lists, JSON lines and CSV. A file without the task's columns is an error that lists both; an unusable row
is one with file and row number. Options of multiple choice may have AfriMed-QA's form: an object `{"option1": ...}` as
JSON text, with the key as the answer.
"""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformers.evaluate.task import Task, TaskColumns
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import parse_json, path_exists, read_json, read_text, short

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
EMPTY_REFERENCES = ("", "N/A")
KIND_COLUMNS = {
    "generate": ("instruction", "input", "output"),
    "choice": ("question", "choices", "answer"),
    "text": ("text",),
}
MAX_NAMED_COLUMNS = 40  # of a file, in an error
OPTIONAL_COLUMNS = {"id", "slice"}  # may be missing even if the task names them
PROMPT_COLUMNS = {"instruction", "input"}  # of which one is enough


@dataclass(frozen=True)
class Item:
    id: str
    slice: str  # "" without slices
    prompt: str  # "" for kind text
    reference: str
    source: str = ""  # the input without the instruction
    choices: tuple[str, ...] = ()
    answer: int = -1  # index of the correct choice
    question: str = ""  # of kind choice: the prompt without the options
    system: str | None = None  # of the row; None: the task's
    history: tuple[tuple[str, str], ...] = ()

    @property
    def letters(self) -> str:
        return LETTERS[: len(self.choices)]


def read_rows(file: Path) -> list[dict[str, Any]]:
    if not path_exists(file):
        raise InputError("data", f"{file}, which does not exist", "a .json, .jsonl or .csv file")
    rows: Any
    try:
        if file.suffix == ".csv":
            with file.open(newline="", encoding="utf-8-sig") as handle:
                rows = list(csv.DictReader(handle))
        elif file.suffix == ".jsonl":
            lines = enumerate(read_text(file, "JSON lines").split("\n"), 1)
            rows = [parse_json(line, f"{file}, line {number}") for number, line in lines if line.strip()]
        elif file.suffix == ".json":
            rows = read_json(file)
        else:
            raise InputError("data", str(file), "a .json, .jsonl or .csv file")
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(str(file), f"no CSV ({error})", "rows of comma-separated values") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(str(file), "something else", "a list of at least one object")
    return rows


def read_items(task: Task) -> list[Item]:
    """Items in file order; a sample keeps that order."""
    build = {"generate": _generate_item, "choice": _choice_item, "text": _text_item}[task.kind]
    if task.data is None:
        raise InputError(
            "data", f"none for {task.name}", "--data FILE", f"it is not part of the package; {task.obtain}"
        )
    rows = read_rows(task.data)
    task = task.model_copy(update={"columns": _resolve_columns(task, rows)})
    items: list[Item] = []
    ids: set[str] = set()
    for number, row in enumerate(rows):
        if not all(str(row.get(column)) in (value, *value.split("|")) for column, value in task.where.items()):
            continue
        if task.skip_empty and str(row.get(task.columns.output) or "").strip() in EMPTY_REFERENCES:
            continue
        try:
            item = build(task, row, str(row.get(task.columns.id or "", number)))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            expected = ", ".join(getattr(task.columns, column) for column in KIND_COLUMNS[task.kind])
            given = f"{type(error).__name__}: {error}"
            raise InputError(f"{task.data}, row {number}", given, f"the columns {expected}") from error
        if item.id in ids:
            raise InputError(f"{task.data}, row {number}", f"the id {item.id!r} again", "ids that differ")
        ids.add(item.id)
        items.append(item)
    if not items:
        raise InputError(str(task.data), f"no row with {task.where}", "at least one")
    if task.limit is not None and task.limit < len(items):
        indices = sorted(random.Random(task.seed).sample(range(len(items)), task.limit))
        items = [items[index] for index in indices]
    return items


def _resolve_columns(task: Task, rows: list[dict[str, Any]]) -> TaskColumns:
    """The names that this file has; a file without a needed column is an error that names its columns."""
    present = list(dict.fromkeys(key for row in rows for key in row if key))
    names: dict[str, str | None] = task.columns.model_dump()
    chosen = {
        field: next((part for part in name.split("|") if part in present), name)
        for field, name in names.items()
        if name
    }
    needed = {*KIND_COLUMNS[task.kind]} - PROMPT_COLUMNS | task.columns.model_fields_set - OPTIONAL_COLUMNS
    missing = [names[field] for field in names if field in needed and field in chosen and chosen[field] not in present]
    missing += [column for column in task.where if column not in present]
    if task.kind == "generate" and not {chosen["instruction"], chosen["input"]} & set(present):
        missing.append(f"{names['instruction']} or {names['input']}")
    if missing:
        raise InputError(
            str(task.data),
            f"the columns {', '.join(present[:MAX_NAMED_COLUMNS])}",
            f"also {', '.join(map(str, dict.fromkeys(missing)))}, which {task.name} reads",
            task.obtain or "`columns` in the task file names those of the data",
        )
    return task.columns.model_copy(update=chosen)


def _history(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in value):
        raise ValueError(f"{short(value)} as the earlier turns, expected a list of [question, answer]")
    return tuple((str(question), str(answer)) for question, answer in value)


def _slice(task: Task, row: dict[str, Any]) -> str:
    return "" if task.columns.slice is None else str(row.get(task.columns.slice) or "(none)")


def _generate_item(task: Task, row: dict[str, Any], name: str) -> Item:
    columns = task.columns
    parts = [str(row.get(key) or "") for key in (columns.instruction, columns.input)]
    prompt = "\n".join(part for part in parts if part)
    if not prompt:
        raise ValueError(f"{columns.instruction} and {columns.input} are both empty")
    system = str(row.get(columns.system) or "") if columns.system else ""
    turns = _history(row.get(columns.history) or []) if columns.history else ()
    return Item(
        name,
        _slice(task, row),
        prompt,
        str(row[columns.output]),
        source=parts[1] or parts[0],
        system=system or None,
        history=turns,
    )


def _choice_item(task: Task, row: dict[str, Any], name: str) -> Item:
    columns = task.columns
    raw_options = row[columns.choices]
    options = parse_json(raw_options, columns.choices) if isinstance(raw_options, str) else raw_options
    if not isinstance(options, (dict, list)):
        raise ValueError(f"{columns.choices}: {short(options)}, expected a list or an object")
    by_key = options if isinstance(options, dict) else dict(zip(LETTERS, options, strict=False))
    choices = [str(text) for text in by_key.values()]
    if not 2 <= len(choices) <= len(LETTERS):
        raise ValueError(f"{len(choices)} choices")
    answer_text = str(row[columns.answer]).strip()
    keys = list(by_key)
    if answer_text in keys:
        answer = keys.index(answer_text)
    elif answer_text in choices:
        answer = choices.index(answer_text)
    elif answer_text in LETTERS[: len(choices)]:
        answer = LETTERS.index(answer_text)
    else:
        raise ValueError(f"the answer {answer_text!r} is none of {keys}")
    question = str(row[columns.question])
    lines = [question, *(f"{letter}. {text}" for letter, text in zip(LETTERS, choices, strict=False))]
    lines.append("Answer with the letter." if task.format == "chat" else "Answer:")
    prompt, reference = "\n".join(lines), LETTERS[answer]
    return Item(name, _slice(task, row), prompt, reference, "", tuple(choices), answer, question)


def _text_item(task: Task, row: dict[str, Any], name: str) -> Item:
    text = str(row[task.columns.text])
    if not text.strip():
        raise ValueError("an empty text")
    return Item(name, _slice(task, row), "", text)
