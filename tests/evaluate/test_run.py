"""A run from question to report: kept, resumed, judged, compared; and the command that does it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ktransformers.cli.main import main
from ktransformers.evaluate import run as run_module
from ktransformers.evaluate.backend import EvalPrompt, Likelihood, Question
from ktransformers.evaluate.compare import compare
from ktransformers.evaluate.judge import Judge, parse_marks
from ktransformers.evaluate.local import LocalModel
from ktransformers.evaluate.remote import RemoteBackend, connect
from ktransformers.evaluate.report import write_report
from ktransformers.evaluate.run import evaluate, read_records
from ktransformers.evaluate.task import Rubric, Task, load_tasks
from ktransformers.ground.errors import InputError

TASK = """
title: Greetings <b>
kind: generate
data: data.jsonl
columns: {slice: tone}
max_new_tokens: 8
metrics: [bleu, rouge, chrf, exact, contains, style, loss, judge]
style: {vowel: '[aeiou]'}
copy_input: true
primary: rouge-l
judge: {criteria: {good: It is good.}}
"""


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / "greet.yaml").write_text(TASK)
    rows = [
        {"id": f"g{n}", "instruction": "", "input": f"say hello {n} <i>", "output": f"hello {n}", "tone": tone}
        for n, tone in enumerate(["even", "odd"] * 5)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_tasks(str(tmp_path / "greet.yaml"))[0]


class Scripted:
    """Answers from a table; dies at the call that it is told to die at."""

    name = "scripted"

    def __init__(self, right: int = 10, dies_at: int = 99) -> None:
        self.right, self.dies_at, self.calls, self.asked = right, dies_at, 0, 0

    def generate(self, prompts: Sequence[EvalPrompt], max_new_tokens: int) -> list[str]:
        self.calls += 1
        if self.calls == self.dies_at:
            raise KeyboardInterrupt
        self.asked += len(prompts)
        numbers = [int(prompt.text.split()[2]) for prompt in prompts]
        return [f"hello {number}" if number < self.right else "good day" for number in numbers]

    def likelihoods(self, questions: Sequence[Question]) -> list[list[Likelihood]]:
        return [[Likelihood(-float(len(text)), len(text)) for text in q.continuations] for q in questions]


def test_result_has_metrics_and_files(task: Task, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    result = evaluate(Scripted(right=6), task, tmp_path / "r", progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, 10) and seen[-1] == (10, 10)
    metrics = result["metrics"]
    assert metrics["exact"]["value"] == metrics["contains"]["value"] == pytest.approx(60)
    assert metrics["loss"]["value"] == pytest.approx(1)
    assert metrics["perplexity"]["value"] == pytest.approx(2.718281828)
    assert metrics["style"]["value"] == 100
    assert "judge" not in metrics
    assert metrics["exact"]["low"] < 60 < metrics["exact"]["high"]
    assert result["slices"]["even"]["exact"]["value"] == pytest.approx(60)
    assert result["copying_the_input"]["exact"] == 0
    assert json.loads((tmp_path / "r" / "result.json").read_text()) == result
    lines = [json.loads(line) for line in (tmp_path / "r" / "generated_predictions.jsonl").read_text().splitlines()]
    assert lines[0] == {"prompt": "say hello 0 <i>", "predict": "hello 0", "label": "hello 0"}
    predicted = json.loads((tmp_path / "r" / "predict_results.json").read_text())
    assert predicted["predict_bleu-4"] == metrics["bleu-4"]["value"]
    assert {"predict_rouge-1", "predict_rouge-2", "predict_rouge-l", "predict_runtime"} <= set(predicted)


def test_killed_run_resumes(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "CHUNK_ITEMS", 4)
    whole = evaluate(Scripted(right=6), task, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        evaluate(Scripted(right=6, dies_at=3), task, tmp_path / "r")
    log = tmp_path / "r" / "items.jsonl"
    assert len(read_records(tmp_path / "r")) == 8 and not (tmp_path / "r" / "result.json").exists()
    log.write_bytes(log.read_bytes()[:-7])  # killed in the middle of a line
    second = Scripted(right=6)
    result = evaluate(second, task, tmp_path / "r")
    assert second.asked == 3
    assert result["metrics"] == whole["metrics"]
    third = Scripted(right=6)
    evaluate(third, task, tmp_path / "r")
    assert third.asked == 0


def test_run_directory_with_other_questions_is_refused(task: Task, tmp_path: Path) -> None:
    evaluate(Scripted(), task, tmp_path / "r")
    with pytest.raises(InputError, match="another task"):
        evaluate(Scripted(), task.model_copy(update={"max_new_tokens": 9}), tmp_path / "r")
    other = Scripted()
    other.name = "other"
    with pytest.raises(InputError, match="another model"):
        evaluate(other, task, tmp_path / "r")


def test_judge_marks_are_recorded(task: Task, tmp_path: Path, serving: tuple[str, Any]) -> None:
    judge = Judge(connect(serving[0]), "base")
    serving[1].judge_says = ["I would say it is fine.", 'Well: {"good": 4}.']
    result = evaluate(Scripted(), task, tmp_path / "a", judge=judge)
    assert result["metrics"]["judge"]["value"] == result["metrics"]["judge.good"]["value"] == 4
    serving[1].judge_says = ['{"good": 9}']
    assert "judge" not in evaluate(Scripted(), task, tmp_path / "b", judge=judge)["metrics"]


def test_marks_are_parsed_from_replies() -> None:
    rubric = Rubric(criteria={"a": "", "b": ""})
    assert parse_marks(rubric, 'first {"a": 1} then {"a": "2", "b": 5}') == {"a": 2, "b": 5}
    assert parse_marks(rubric, '{"a": 0, "b": 5}') is None
    assert parse_marks(rubric, "{not json}") is None


class Inside(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [value for key, value in attrs if key in ("src", "href", "data") and value and value[0] != "#"]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_comparison_reports_gains_and_costs(task: Task, tmp_path: Path) -> None:
    better = Scripted(right=10)
    better.name = "better"
    evaluate(Scripted(right=2), task, tmp_path / "base" / "greet")
    evaluate(better, task, tmp_path / "tuned" / "greet")
    found = compare([tmp_path / "base", tmp_path / "tuned"])
    (only,) = found.tasks
    assert found.panels() == [("", [only])]
    assert found.runs == ("base", "tuned") and found.models == ("scripted", "better")
    (change,) = only.headline.differences
    assert change.value == pytest.approx(80) and change.mark == "**" and change.gain
    assert [line.slice for line in only.slices] == ["even", "odd"]
    loss = next(line for line in only.lines if line.metric == "loss")
    assert (loss.differences[0].value, loss.differences[0].mark, loss.more_is_better) == (0, "", False)
    assert len(only.samples) == 3 and only.note.startswith("copying the input scores rouge-l")
    write_report(found, tmp_path)
    words = (tmp_path / "report.md").read_text()
    assert "| **100.0 (+80.0\\*\\*)** |" in words
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["tasks"][0]["lines"][0]["metric"] == "bleu-1"
    page = Inside()
    page.feed((tmp_path / "report.html").read_text())
    assert page.tags.count("svg") == 3 and not page.outside
    assert "i" not in page.tags and "b" in page.tags  # the task's <i> is text, our own <b> is not
    assert "say hello" in page.text and "Greetings <b>" in page.text


def test_comparison_of_incompatible_runs_is_refused(task: Task, tmp_path: Path) -> None:
    evaluate(Scripted(), task, tmp_path / "base" / "greet")
    with pytest.raises(InputError, match="two or more"):
        compare([tmp_path / "base"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="kt eval"):
        compare([tmp_path / "base", tmp_path / "empty"])
    (tmp_path / "base" / "greet" / "result.json").unlink()
    with pytest.raises(InputError, match="not finished"):
        compare([tmp_path / "base", tmp_path / "base"])


def test_in_process_and_server_results_are_equal(
    model_directory: Path, serving: tuple[str, Any], tmp_path: Path
) -> None:
    local = LocalModel.open(model_directory, dtype="float32", batch_size=5)
    remote = RemoteBackend(connect(serving[0]), "base", local.tokens)
    for name, metrics in (
        ("persona", ("bleu", "rouge", "chrf", "style", "loss")),
        ("arithmetic", ("letter", "generation")),
        ("invented-facts", ("text", "letter")),
        ("stories", ("loss",)),
    ):
        (task,) = load_tasks(name, limit=4)
        task = task.model_copy(update={"max_new_tokens": 6, "metrics": metrics})
        here = evaluate(local.backend(), task, tmp_path / "here" / name)
        there = evaluate(remote, task, tmp_path / "there" / name)
        for metric, found in here["metrics"].items():
            assert found == pytest.approx(there["metrics"][metric], rel=1e-5), (name, metric)


class Knowing:
    """Likes longer options for their length alone, and knows one short one."""

    name = "knowing"

    def __init__(self) -> None:
        self.questions: list[Question] = []

    def generate(self, prompts: Sequence[EvalPrompt], max_new_tokens: int) -> list[str]:
        raise AssertionError("nothing is to be written")

    def likelihoods(self, questions: Sequence[Question]) -> list[list[Likelihood]]:
        self.questions += questions
        found = []
        for question in questions:
            words = [text.split() for text in question.continuations]
            found.append([Likelihood(-2.0 if "tea" in some else -1.5 * len(some), len(some)) for some in words])
        return found


def test_choices_are_scored_by_text(tmp_path: Path) -> None:
    """Asked without the options, and by the mean over an option's tokens: the sum would take the shortest."""
    rows = [
        {"id": "a", "question": "What is drunk?", "choices": ["water", "a cup of green tea"], "answer": "B"},
        {"id": "b", "question": "What is eaten?", "choices": ["bread", "a loaf of bread"], "answer": "B"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "drinks.yaml").write_text("kind: choice\ndata: rows.jsonl\nmetrics: [text]\n")
    (task,) = load_tasks(str(tmp_path / "drinks.yaml"))
    assert task.scores_chats
    backend = Knowing()
    result = evaluate(backend, task, tmp_path / "run" / "drinks")
    assert [question.prompt.text for question in backend.questions] == ["What is drunk?", "What is eaten?"]
    assert backend.questions[0].continuations == ("water", "a cup of green tea")
    first, second = read_records(tmp_path / "run" / "drinks")
    assert first["text_logprobs"] == [-1.5, -0.4] and second["text_logprobs"] == [-1.5, -1.5]
    assert result["primary"] == "accuracy_text" and result["metrics"]["accuracy_text"]["value"] == 50.0
    (sample, _) = compare([tmp_path / "run", tmp_path / "run"]).tasks[0].samples
    assert sample.id == "a" and sample.answers == ("B", "B")


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def kt(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command in this process, where torch is loaded already."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["kt", "eval", *words])
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out = capfd.readouterr()
        return Done(int(left.value.code or 0), out.out, out.err)

    return call


def test_eval_command_writes_results(
    kt: Callable[..., Done], model_directory: Path, adapter_directory: Path, task: Task, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = [str(model_directory), "--task", str(tmp_path / "greet.yaml"), "--dtype", "float32", "-o", str(out)]
    done = kt(*words, "--adapter", f"tuned={adapter_directory}", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["runs"] == ["base", "tuned"] and told["tasks"][0]["task"] == "greet"
    assert {"report.md", "report.json", "report.html", "base", "tuned"} <= {file.name for file in out.iterdir()}
    again = kt("--compare", "base", "tuned", "-o", str(out))
    assert again.returncode == 0, again.stderr
    assert "rouge-l" in again.stdout and "report.html" in again.stdout


def test_eval_command_accepts_a_url(
    kt: Callable[..., Done], model_directory: Path, serving: tuple[str, Any], task: Task, tmp_path: Path
) -> None:
    words = ["--task", str(tmp_path / "greet.yaml"), "--tokenizer", str(model_directory), "-o", str(tmp_path / "out")]
    done = kt(serving[0], *words, "--adapter", "mine=tuned", "--no-base", "--limit", "3")
    assert done.returncode == 0, done.stderr
    assert "mine: greet, 3 items" in done.stdout
    blind = kt(serving[0], "--task", str(tmp_path / "greet.yaml"), "-o", str(tmp_path / "out"))
    assert blind.returncode == 1 and "--tokenizer" in blind.stderr
    missing = kt(serving[0], *words, "--adapter", "other")
    assert missing.returncode == 1 and "base, tuned" in missing.stderr


@pytest.mark.parametrize(
    ("words", "said", "status"),
    [
        (["--task", "world"], "MODEL|URL", 2),
        (["m"], "--list", 2),
        (["m", "--task", "wrld"], "world", 1),
        (["--compare", "a"], "two", 1),
    ],
)
def test_eval_command_refuses_invalid_arguments(
    kt: Callable[..., Done], words: list[str], said: str, status: int
) -> None:
    done = kt(*words)
    assert done.returncode == status and said in done.stderr and "Traceback" not in done.stderr


def test_list_shows_every_task(kt: Callable[..., Done]) -> None:
    rows = {row["name"]: row for row in json.loads(kt("--list", "--json").stdout)}
    assert rows["unrelated"]["suite"] == ["world", "reasoning", "stories"]
    assert rows["persona"]["items"] == 108
    assert rows["llemr"]["items"] is None and rows["all"]["items"] > 1000
    assert re.search(r"^llemr +--data  ", kt("--list").stdout, re.MULTILINE)


def test_task_over_released_data_needs_the_file(kt: Callable[..., Done], tmp_path: Path) -> None:
    file = tmp_path / "qa_event.jsonl"
    file.write_text('{"hadm_id": 1, "q": "Was a scan made?", "a": "No.", "event_type": "procedureevents"}\n')
    asked = kt("no-model", "--task", "llemr", "--data", str(file), "--dry-run")
    assert asked.returncode == 0 and "1 items" in asked.stdout
    missing = kt("no-model", "--task", "llemr", "--dry-run")
    assert missing.returncode == 1 and "--data FILE" in missing.stderr and "PhysioNet" in missing.stderr


def test_dry_run_counts_items_and_asks_nothing(kt: Callable[..., Done]) -> None:
    """The model does not exist, and need not."""
    words = ("no-model", "--task", "persona", "--task", "unrelated", "--limit", "6", "--dry-run")
    rows = json.loads(kt(*words, "--json").stdout)["tasks"]
    assert [(row["name"], row["items"]) for row in rows] == [
        (n, 6) for n in ("persona", "world", "reasoning", "stories")
    ]
    assert rows[0]["new_tokens"] == 6 * 96 and rows[1]["new_tokens"] == 0
    assert all(row["characters"] > 0 and row["work"] > row["characters"] / 4 for row in rows)
    assert "persona                  6 items" in kt(*words).stdout
    assert kt("no-model", "--task", "no-task", "--dry-run").returncode == 1
