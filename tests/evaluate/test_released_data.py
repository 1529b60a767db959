"""Tasks over public data sets that are not part of the package: made-up rows in the columns of the released files."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ktransformers.evaluate.backend import EvalPrompt, Likelihood, Question
from ktransformers.evaluate.compare import compare
from ktransformers.evaluate.items import read_items
from ktransformers.evaluate.judge import Judge, judge_prompt
from ktransformers.evaluate.remote import connect
from ktransformers.evaluate.report import write_report
from ktransformers.evaluate.run import evaluate, read_records
from ktransformers.evaluate.task import TASK_DIR, load_tasks, task_names
from ktransformers.ground.errors import InputError

RELEASED = ("afrimed-short", "beyond-dialogue", "llemr", "translational-style")
SCORES = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-1", "ROUGE-2", "ROUGE-L")
AFRIMED = {
    "sample_id": "s1", "question_type": "saq", "tier": "expert", "question": "Which  vitamin?",
    "question_clean": "Which vitamin do the invented leaves of Oru hold?", "answer_options": "", "correct_answer": "",
    "answer_rationale": "The leaves of Oru hold vitamin Q.", "specialty": "Botany", "country": "NIL",
}  # fmt: skip
ROWS: dict[str, list[dict[str, Any]]] = {
    "afrimed-short": [
        AFRIMED,
        {**AFRIMED, "sample_id": "s2", "question_type": "mcq", "correct_answer": "option1"},
        {**AFRIMED, "sample_id": "s3", "answer_rationale": "N/A"},
        {**AFRIMED, "sample_id": "s4", "specialty": "", "question_clean": "What helps?",
         "answer_rationale": "Rest, and a glass of water."},
    ],
    "translational-style": [
        {"instruction": "", "input": "你吃过蓝色的面包吗", "output": "哦，我的老伙计，我敢打赌那是面包师的玩笑！"},
        {"instruction": "", "input": "今天要带伞吗", "output": "看在老天的份上，亲爱的，带上它吧。"},
    ],
    "beyond-dialogue": [
        {"instruction": "And the lamp?", "input": "", "output": "The lamp stays lit.", "system": "You are Vell.",
         "history": [["Who is there?", "Only the keeper."], ["Is it late?", "It is early."]]},
        {"instruction": "Good day.", "input": "", "output": "Is it?", "system": "You are Morn.", "history": []},
    ],
    "llemr": [
        {"hadm_id": 1, "q": "How long was the stay?", "a": "It lasted 12.50 hours.", "event_type": "transfers"},
        {"hadm_id": 1, "q": "Was a scan made?", "a": "Affirmative, one was.", "event_type": "procedureevents"},
    ],
}  # fmt: skip


def write(name: str, rows: Sequence[dict[str, Any]], directory: Path) -> Path:
    """The rows in the kind of file that is released under this name."""
    if name == "afrimed-short":
        file = directory / "afri_med_qa.csv"
        with file.open("w", newline="") as handle:
            writer = csv.DictWriter(handle, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif name == "llemr":
        file = directory / "qa_event.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        file = directory / "set.json"
        file.write_text(json.dumps(list(rows), ensure_ascii=False))
    return file


class Answers:
    """Gives the reference to some prompts and another sentence to the rest; keeps the prompts."""

    def __init__(self, references: dict[str, str], right: int) -> None:
        self.name, self.references, self.right = f"answers {right}", references, right
        self.prompts: list[EvalPrompt] = []

    def generate(self, prompts: Sequence[EvalPrompt], max_new_tokens: int) -> list[str]:
        self.prompts += prompts
        known = list(self.references)[: self.right]
        return [self.references[p.text] if p.text in known else "something else entirely" for p in prompts]

    def likelihoods(self, questions: Sequence[Question]) -> list[list[Likelihood]]:
        return [[Likelihood(-1.0, 1) for _ in question.continuations] for question in questions]


def test_no_released_data_is_shipped() -> None:
    without_data = {name for name in task_names() if any(task.data is None for task in load_tasks(name))}
    assert without_data == set(RELEASED)
    assert not {task.name for task in load_tasks("all")} & without_data
    shipped = {file.stem.replace("_", "-") for file in (TASK_DIR / "data").iterdir()}
    assert not shipped & without_data


@pytest.mark.parametrize("name", RELEASED)
def test_task_without_its_file_says_where_it_comes_from(name: str) -> None:
    (task,) = load_tasks(name)
    assert task.obtain and task.source and task.licence
    with pytest.raises(InputError, match="--data FILE") as caught:
        read_items(task)
    assert task.obtain in str(caught.value)


def test_afrimed_short_answers_are_read(tmp_path: Path) -> None:
    (task,) = load_tasks("afrimed-short", data=write("afrimed-short", ROWS["afrimed-short"], tmp_path))
    first, last = read_items(task)
    assert (first.id, first.slice) == ("s1", "Botany")
    assert first.prompt == AFRIMED["question_clean"] and first.reference == AFRIMED["answer_rationale"]
    assert (last.id, last.slice) == ("s4", "(none)")
    older = [{key: value for key, value in row.items() if key != "question_clean"} for row in ROWS["afrimed-short"]]
    (task,) = load_tasks("afrimed-short", data=write("afrimed-short", older, tmp_path))
    assert read_items(task)[0].prompt == AFRIMED["question"]


def test_afrimed_choices_are_read_from_the_same_file(tmp_path: Path) -> None:
    options = json.dumps({"option1": "vitamin Q", "option2": "iron"})
    rows = [{**row, "answer_options": options} for row in ROWS["afrimed-short"]]
    (task,) = load_tasks("medical-choice", data=write("afrimed-short", rows, tmp_path))
    (item,) = read_items(task)
    assert (item.id, item.reference, item.choices) == ("s2", "A", ("vitamin Q", "iron"))
    assert item.question == AFRIMED["question_clean"]


def test_translational_style_is_read(tmp_path: Path) -> None:
    (task,) = load_tasks("translational-style", data=write("x", ROWS["translational-style"], tmp_path))
    assert [item.prompt for item in read_items(task)] == [row["input"] for row in ROWS["translational-style"]]


def test_llemr_is_read(tmp_path: Path) -> None:
    (task,) = load_tasks("llemr", data=write("llemr", ROWS["llemr"], tmp_path))
    assert [(item.prompt, item.reference, item.slice) for item in read_items(task)] == [
        (row["q"], row["a"], row["event_type"]) for row in ROWS["llemr"]
    ]
    notes = [
        {"hadm_id": 1, "q": "Why?", "a": "Because."},
        {"hadm_id": 1, "q": "Why?", "a": "So.", "input": "1 h: scan"},
    ]
    (task,) = load_tasks("llemr", data=write("llemr", notes, tmp_path))
    assert [(item.prompt, item.slice) for item in read_items(task)] == [
        ("Why?", "(none)"),
        ("Why?\n1 h: scan", "(none)"),
    ]


def test_beyond_dialogue_asks_with_profile_and_earlier_turns(tmp_path: Path) -> None:
    rows = ROWS["beyond-dialogue"]
    (task,) = load_tasks("beyond-dialogue", data=write("x", rows, tmp_path))
    backend = Answers({row["instruction"]: row["output"] for row in rows}, right=2)
    evaluate(backend, task, tmp_path / "run")
    assert backend.prompts[0].messages() == [
        {"role": "system", "content": "You are Vell."},
        {"role": "user", "content": "Who is there?"},
        {"role": "assistant", "content": "Only the keeper."},
        {"role": "user", "content": "Is it late?"},
        {"role": "assistant", "content": "It is early."},
        {"role": "user", "content": "And the lamp?"},
    ]
    assert [message["role"] for message in backend.prompts[1].messages()] == ["system", "user"]
    assert task.judge is not None
    first, second = read_records(tmp_path / "run")
    shown = judge_prompt(task.judge, first)
    assert "You are Vell." in shown and "Assistant: It is early." in shown
    assert "Conversation so far" not in judge_prompt(task.judge, second)


def test_history_of_another_form_is_refused(tmp_path: Path) -> None:
    rows = [{**ROWS["beyond-dialogue"][0], "history": ["Who is there?"]}]
    with pytest.raises(InputError, match=r"row 0.*\[question, answer\]"):
        read_items(load_tasks("beyond-dialogue", data=write("x", rows, tmp_path))[0])


@pytest.mark.parametrize(
    ("name", "missing", "renamed"),
    [
        ("afrimed-short", "answer_rationale", {"answer_rationale": "rationale"}),
        ("afrimed-short", r"question_clean\|question", {"question": "text", "question_clean": "text_clean"}),
        ("afrimed-short", "question_type", {"question_type": "kind"}),
        ("translational-style", "input, output", {"input": "问", "output": "答"}),
        ("beyond-dialogue", "system, history", {"system": "profile", "history": "turns"}),
        ("llemr", "q, a", {"q": "question", "a": "answer"}),
    ],
)
def test_other_columns_are_refused_by_name(name: str, missing: str, renamed: dict[str, str], tmp_path: Path) -> None:
    rows = [{renamed.get(key, key): value for key, value in row.items()} for row in ROWS[name]]
    (task,) = load_tasks(name, data=write(name, rows, tmp_path))
    with pytest.raises(InputError, match=missing) as caught:
        read_items(task)
    assert all(column in str(caught.value) for column in (*renamed.values(), task.obtain))


@pytest.mark.parametrize("name", RELEASED)
def test_report_has_the_columns_of_published_tables(name: str, tmp_path: Path, serving: tuple[str, Any]) -> None:
    (task,) = load_tasks(name, data=write(name, ROWS[name], tmp_path))
    references = {item.prompt: item.reference for item in read_items(task)}
    assert task.judge is not None
    serving[1].judge_says = [json.dumps(dict.fromkeys(task.judge.criteria, 4))]
    judge = Judge(connect(serving[0]), "base")
    for run, right in (("base", 0), ("tuned", len(references))):
        evaluate(Answers(references, right), task, tmp_path / run / name, judge=judge)
    comparison = compare([tmp_path / "base", tmp_path / "tuned"])
    write_report(comparison, tmp_path / "report")
    lines = (tmp_path / "report" / "report.md").read_text().splitlines()
    head = lines.index(f"| {' | '.join((name, *SCORES, 'Judge'))} |")
    assert lines[head + 2].startswith("| base | ") and "100.00" not in lines[head + 2]
    assert lines[head + 3] == f"| tuned | {'100.00 | ' * len(SCORES)}4.00 |"
    assert "<th>BLEU-4</th>" in (tmp_path / "report" / "report.html").read_text()
