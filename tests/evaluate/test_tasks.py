"""Task files: those that come with the package, and what is said about those that cannot be used."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from ktransformers.evaluate.items import read_items
from ktransformers.evaluate.measure import primary_metric, stated_letter, statistics
from ktransformers.evaluate.task import TASK_DIR, load_tasks, task_names
from ktransformers.ground.errors import InputError


def test_every_packaged_task_is_valid() -> None:
    tasks = load_tasks("all")
    without_data = {name for name in task_names() if any(task.data is None for task in load_tasks(name))}
    assert {task.name for task in tasks} | {"all", "unrelated"} | without_data == set(task_names())
    assert all(task.data is not None for task in tasks)
    for task in tasks:
        found = read_items(task)
        assert len(found) >= 60 and task.licence and task.source, task.name
        records = [
            {"reference": item.reference, "prediction": item.reference, "logprobs": [0.0] * len(item.choices),
             "text_logprobs": [float(place == item.answer) for place in range(len(item.choices))],
             "letters": item.letters, "answer": item.answer, "logprob": -1.0, "tokens": 3, "slice": item.slice}
            for item in found
        ]  # fmt: skip
        measured = statistics(task, records)
        assert primary_metric(task) in measured
        for name in ("bleu-4", "rouge-l", "chrf", "exact", "style", "accuracy_generated", "accuracy_text"):
            if name in measured and not (name == "style" and task.name == "style-translation"):
                assert measured[name].value() >= (75 if name == "style" else 99.9), (task.name, name)


def test_unrelated_tasks_form_one_panel() -> None:
    assert {task.name for task in load_tasks("all") if task.unrelated} == {
        task.name for task in load_tasks("unrelated")
    }


def test_task_data_is_small_and_licensed() -> None:
    files = list((TASK_DIR / "data").glob("*.jsonl"))
    assert sum(file.stat().st_size for file in files) < 1_500_000
    told = (TASK_DIR / "data" / "LICENSES.md").read_text()
    assert all(f"`{file.name}`" in told for file in files)


def test_style_translation_data_has_the_expected_form() -> None:
    (task,) = load_tasks("style-translation")
    rows = [json.loads(line) for line in task.data.read_text().split("\n") if line]
    assert all(row["instruction"] == "" and row["input"] for row in rows)
    assert read_items(task)[0].prompt == rows[0]["input"]


def test_afrimed_qa_format_is_read(tmp_path: Path) -> None:
    with (tmp_path / "afrimed.csv").open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["sample_id", "question_type", "question", "answer_options", "correct_answer", "specialty"])
        options = json.dumps({f"option{n}": text for n, text in enumerate(("malaria", "flu", "measles"), 1)})
        writer.writerow(["a1", "MCQ", "Which is it?", options, "option3", "Pathology"])
        writer.writerow(["a2", "SAQ", "What is it?", "", "", "Pathology"])
    (task,) = load_tasks("medical-choice", data=tmp_path / "afrimed.csv")
    (item,) = read_items(task)
    assert (item.answer, item.letters, item.reference, item.slice) == (2, "ABC", "C", "Pathology")
    assert item.prompt == "Which is it?\nA. malaria\nB. flu\nC. measles\nAnswer with the letter."


def test_limit_draws_the_same_sample() -> None:
    (task,), (again,) = load_tasks("world", limit=10), load_tasks("world", limit=10)
    assert [item.id for item in read_items(task)] == [item.id for item in read_items(again)]
    assert len(read_items(task)) == 10


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("kind: generate\ndata: d.jsonl\nmetrics: [letter]", "letter"),
        ("kind: generate\ndata: d.jsonl\nmetrics: [style]", "regular expressions"),
        ("kind: generate\ndata: d.jsonl\nstyle: {a: '('}\nmetrics: [style]", "no regular expression"),
        ("kind: riddle\ndata: d.jsonl", "kind"),
        ("kind: text\ndata: d.jsonl\nmax_tokens: 3", "max_tokens"),
        ("kind: text", "data"),
        ("[1", "YAML"),
        ("- 1", "mapping"),
    ],
)
def test_invalid_task_is_refused(text: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(InputError, match=word):
        load_tasks(str(tmp_path / "t.yaml"))


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([{"question": "q", "choices": ["a"], "answer": "A"}], "1 choices"),
        ([{"question": "q", "choices": ["a", "b"], "answer": "C"}], "row 0.*'C'"),
        ([{"question": "q", "answer": "A"}], "choices"),
        ([{"id": 1, "question": "q", "choices": ["a", "b"], "answer": "A"}] * 2, "row 1.*again"),
        ([], "at least one"),
    ],
)
def test_invalid_rows_are_refused(rows: list[dict[str, object]], word: str, tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(json.dumps(rows))
    (tmp_path / "t.yaml").write_text("kind: choice\ndata: d.json")
    with pytest.raises(InputError, match=word):
        read_items(load_tasks(str(tmp_path / "t.yaml"))[0])


def test_unknown_task_name_lists_the_tasks() -> None:
    with pytest.raises(InputError, match="invented-facts"):
        load_tasks("no-such-task")


@pytest.mark.parametrize(
    ("text", "letter"),
    [("B", "B"), ("(C) because", "C"), ("The answer is D.", "D"), ("Answer: **A**", "A"), ("A cat? The answer: B", "B"),
     ("I do not know", ""), ("E", ""), ("", "")],
)  # fmt: skip
def test_stated_letter_is_extracted(text: str, letter: str) -> None:
    assert stated_letter(text, "ABCD") == letter
