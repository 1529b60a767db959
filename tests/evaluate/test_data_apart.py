"""What is shipped to evaluate with is not what is shipped to train with, and says what it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ktransformers.evaluate.items import read_items, read_rows
from ktransformers.evaluate.task import load_tasks
from ktransformers.train.data.registry import DEMO_DATA_DIR, INFO_FILE

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HELD_OUT = "_test"  # ending of datasets that are for `eval_dataset`
SHORTEST_QUESTION, SHORTEST_ANSWER = 6, 12  # letters; "Hello!" and "Yes." may come up twice


def letters(text: str) -> str:
    """The text without what a copy may change: case, spaces and punctuation."""
    return re.sub(r"[\W_]+", "", text.lower())


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield letters(value)
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts(part)


def training_sets() -> dict[str, set[str]]:
    """Name -> every text of its rows, and question and options of a multiple choice apart."""
    entries = json.loads((DEMO_DATA_DIR / INFO_FILE).read_text())
    found = {}
    for name, entry in entries.items():
        if not name.endswith(HELD_OUT):
            rows = json.loads((DEMO_DATA_DIR / entry["file_name"]).read_text())
            first_lines = {letters(row["instruction"].partition("\n")[0]) for row in rows if "instruction" in row}
            found[name] = {text for row in rows for text in texts(row)} | first_lines
    return found


def shared_items(task_name: str, trained: set[str]) -> list[str]:
    (task,) = load_tasks(task_name)
    shared = []
    for item in read_items(task.model_copy(update={"limit": None})):
        questions = {letters(item.question or item.prompt), letters(item.prompt), letters(item.source)}
        answers = set() if item.choices else {letters(item.reference)}
        if any(len(text) >= SHORTEST_QUESTION and text in trained for text in questions) or any(
            len(text) >= SHORTEST_ANSWER and text in trained for text in answers
        ):
            shared.append(item.id)
    return shared


@pytest.mark.parametrize("task_name", [task.name for task in load_tasks("all")])
def test_task_is_apart_from_every_training_set(task_name: str) -> None:
    for name, trained in training_sets().items():
        shared = shared_items(task_name, trained)
        assert not shared, f"{len(shared)} items of {task_name} are in {name}: {shared[:3]}"


def test_copies_are_noticed() -> None:
    (task,) = load_tasks("persona-zh")
    rows = read_rows(task.data)
    assert len(shared_items("persona-zh", {letters(row["output"]) for row in rows[:7]})) == 7
    assert len(shared_items("persona-zh", {letters(f" {row['instruction'].upper()}!") for row in rows[:5]})) >= 4


def test_recipes_do_not_train_on_what_is_held_out() -> None:
    recipes = sorted(EXAMPLES.glob("*.yaml"))
    assert len(recipes) > 10
    for recipe in recipes:
        for found in re.findall(r"^\s*dataset: *(.+)$", recipe.read_text(), re.MULTILINE):
            assert not any(name.strip().endswith(HELD_OUT) for name in str(yaml.safe_load(found)).split(",")), (
                recipe.name
            )


def test_arithmetic_is_right_and_labelled_by_its_operation() -> None:
    (task,) = load_tasks("arithmetic")
    rows = read_rows(task.data)
    for row in rows:
        found = re.fullmatch(r"(?:What is|Compute) (\d+) (plus|minus|\+|-) (\d+)[?.]", row["question"])
        assert found, row
        operation = {"+": "plus", "-": "minus"}.get(found[2], found[2])
        result = int(found[1]) + int(found[3]) * (1 if operation == "plus" else -1)
        assert row["operation"] == operation, row
        assert row["choices"]["ABCD".index(row["answer"])] == str(result), row
    assert sum(row["operation"] == "minus" for row in rows) == 102


def test_options_differ_and_slices_exist() -> None:
    for task in load_tasks("all"):
        rows = read_rows(task.data)
        if task.columns.slice is not None:
            assert all(row.get(task.columns.slice) for row in rows), task.name
        for item in read_items(task):
            assert len(set(item.choices)) == len(item.choices), (task.name, item.id)
