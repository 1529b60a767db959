"""Which stages run, which are skipped, and what is left of them.

The verbs are stand-ins (`stand_in.py`): what is tested is the loop between them. Real verbs run in test_tutorial.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ktransformers.evaluate.loop import child
from ktransformers.evaluate.loop.questions import AnswerPair
from ktransformers.evaluate.loop.record import MAX_HASHED_BYTES, Hashes
from ktransformers.evaluate.loop.report import answer_lines, make_report, report_blocks, summary_lines, terminal_lines
from ktransformers.evaluate.loop.run import Listener, Runner
from ktransformers.evaluate.loop.settings import Loop, read_loop
from ktransformers.evaluate.loop.stages import build_stages, run_paths, serve_arguments, to_flags
from ktransformers.ground.errors import InputError
from ktransformers.ground.report import page

STAND_IN = [sys.executable, str(Path(__file__).with_name("stand_in.py"))]
ALL = ["model", "tasks", "plan", "train", "prove", "baseline", "eval", "compare"]  # besides the server


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a loop file and data; `kt` is the stand-in."""
    monkeypatch.setattr(child, "PROGRAM", STAND_IN)
    (tmp_path / "rows.json").write_text("[]")
    (tmp_path / "task.jsonl").write_text("1")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("TASK_DATA", str(tmp_path / "task.jsonl"))
    keys = {"dataset": str(tmp_path / "rows.json"), "learning_rate": 1e-3, "max_steps": 12}
    words = {
        "run": str(tmp_path / "run"),
        "name": "neko",
        "model": {"make": "smollm2-moe", "options": {"top_k": 4}},
        "train": {"keys": keys},
        "eval": {"tasks": ["persona"], "limit": 3},
    }
    (tmp_path / "loop.yaml").write_text(yaml.safe_dump(words))
    return tmp_path


def go(place: Path, *words: str) -> dict[str, str]:
    """Stage -> what became of it."""
    return {step.name: step.status for step in Runner(read_loop(place / "loop.yaml", words), Listener()).run_stages()}


def look(place: Path, *words: str) -> list[str]:
    steps = Runner(read_loop(place / "loop.yaml", words), Listener()).preview()
    return [step.name for step in steps if step.status == "would run"]


def ran(found: dict[str, str]) -> list[str]:
    return [name for name, status in found.items() if status != "skipped" and name != "serve"]


def test_second_run_skips_every_stage(place: Path) -> None:
    assert look(place) == ALL
    assert not (place / "run").exists(), "a look writes nothing"
    assert ran(go(place)) == ALL
    calls = (place / "calls").read_text().splitlines()
    verbs = [line.split()[0] for line in calls]
    assert verbs == ["model", "eval", "train", "train", "serve", "prove", "eval", "eval", "eval"]
    assert calls[0].startswith("model make smollm2-moe --top-k 4 --out ")
    assert yaml.safe_load((place / "run" / "train.yaml").read_text())["max_steps"] == 12
    assert "SERVER" not in "".join(calls) and "http://127.0.0.1:" in calls[5]
    assert look(place) == [] and ran(go(place)) == []
    assert len((place / "calls").read_text().splitlines()) == len(calls), "no server for nothing"


def test_only_stages_affected_by_a_change_run(place: Path) -> None:
    go(place)
    learning = ["plan", "train", "prove", "eval", "compare"]
    assert look(place, "train.keys.learning_rate=0.01")[0] == "plan"
    assert ran(go(place, "train.keys.learning_rate=0.01")) == learning
    settled = ("train.keys.learning_rate=0.01", "train.minutes=0.2")
    assert ran(go(place, *settled)) == [], "an ignored key"
    (place / "rows.json").write_text("[1]")
    assert ran(go(place, *settled)) == ["plan", "train"], "the same adapter came out: nothing after it runs"
    (place / "task.jsonl").write_text("2")
    assert ran(go(place, *settled)) == ["tasks", "baseline", "eval"], "the same answers: the comparison stands"
    os.utime(place / "rows.json")
    assert ran(go(place, *settled)) == [], "a newer time is no change"
    (place / "run" / "prove.json").unlink()
    assert ran(go(place, *settled)) == ["prove"]
    assert ran(go(place, *settled, "model.options.top_k=2")) != []


def test_changed_data_reruns_training_without_a_plan(place: Path) -> None:
    words = ("plan=false", "train.keys.max_steps=3", "prove=false", "eval.tasks=[]")
    assert ran(go(place, *words)) == ["model", "train"] and ran(go(place, *words)) == []
    (place / "rows.json").write_text("[1]")
    assert ran(go(place, *words)) == ["train"]


def test_run_can_be_repeated_from_its_directory(place: Path) -> None:
    go(place, "eval.limit=2")
    run = place / "run"
    assert Loop.model_validate(yaml.safe_load((run / "loop.yaml").read_text())).eval.limit == 2
    assert ran({s.name: s.status for s in Runner(read_loop(run / "loop.yaml"), Listener()).run_stages()}) == []
    script = (run / "commands.sh").read_text()
    assert "kt train" in script and "--server $SERVER --json" in script
    assert subprocess.run(["sh", "-n", run / "commands.sh"]).returncode == 0
    assert {file.stem for file in (run / "logs").glob("*.log")} == {*ALL, "serve", "version"}
    assert (run / "versions.json").is_file()


def start(place: Path) -> subprocess.Popen[bytes]:
    """`kt loop` over the stand-in, in a process that can be killed."""
    code = f"from ktransformers.evaluate.loop import child; child.PROGRAM = {STAND_IN!r}"
    code += "; from ktransformers.cli.main import main; main()"
    return subprocess.Popen([sys.executable, "-c", code, "loop", str(place / "loop.yaml")], stderr=subprocess.PIPE)


def wait_for(file: Path) -> None:
    for _ in range(6000):
        if file.exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"{file} did not appear")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_loop_resumes(place: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    halt = place / "halt"
    halt.touch()
    monkeypatch.setenv("HALT", str(halt))
    words = yaml.safe_load((place / "loop.yaml").read_text())
    words["train"] = {"keys": words["train"]["keys"] | {"max_steps": 5}}
    (place / "loop.yaml").write_text(yaml.safe_dump(words))
    killed = start(place)
    wait_for(place / "run" / "neko" / "checkpoint-1")
    with pytest.raises(InputError, match="another loop is using"):
        go(place)
    killed.send_signal(number)
    _, said = killed.communicate(timeout=30)
    assert killed.returncode == (-number if number == signal.SIGKILL else 130)
    assert number == signal.SIGKILL or b"resumes" in said
    halt.unlink()
    for _ in range(200):  # the orphaned child has been told to end, and holds the lock until it has
        try:
            found = go(place)
            break
        except InputError:
            time.sleep(0.05)
    assert found["train"] == "resumed" and found["model"] == found["plan"] == "skipped"
    assert (place / "run" / "neko" / "checkpoint-1").is_dir(), "nothing of the first part was removed"


def test_key_for_other_servers_does_not_lock_the_loop_out(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "for another server")
    monkeypatch.setattr(child, "SERVER_START_SECONDS", 20.0)
    assert "serve" in go(place)
    assert "unset API_KEY" in (place / "run" / "commands.sh").read_text()
    for word in ("api_key=x", "api-key=x", "port=1", "host=0.0.0.0"):
        with pytest.raises(InputError, match=r"serve: given .*, expected flags of `kt serve` other than api_key, host"):
            read_loop(place / "loop.yaml", [f"serve.{word}"])


def test_changed_recipe_does_not_resume(place: Path) -> None:
    go(place)
    (place / "run" / "neko" / "old").touch()
    go(place, "train.keys.learning_rate=0.5")
    assert not (place / "run" / "neko" / "old").exists()


def test_failed_stage_names_its_log(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN", "eval")
    with pytest.raises(child.StageFailed, match=r"stage baseline ended with code 1; .*baseline.log") as error:
        go(place)
    assert error.value.code == 1
    monkeypatch.delenv("BROKEN")
    assert ran(go(place)) == ALL[ALL.index("baseline") :], "what was trained before it stands"


@pytest.mark.parametrize("broken", ["prove", "verdict"])
def test_failed_proof_does_not_stop_evaluation(broken: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it says what is wrong or just dies; the command ends with 1, and the next one tries again."""
    from typer.testing import CliRunner

    from ktransformers.cli.main import app

    monkeypatch.setenv("BROKEN", broken)
    ended = CliRunner().invoke(app, ["loop", str(place / "loop.yaml")])
    assert ended.exit_code == 1 and "+80.0**" in ended.stdout
    assert ("NOT proven: layer 3" if broken == "verdict" else "NOT proven: kt prove did not end well") in ended.stderr
    assert "failed, and so will the loop" in ended.stdout
    kept = json.loads((place / "run" / "report.json").read_text())
    assert kept["proven"] is False and len(kept["rows"]) == 3
    monkeypatch.delenv("BROKEN")
    assert ran(go(place)) == ["prove"]


def test_report_has_metrics_answers_and_proof(place: Path) -> None:
    loop = read_loop(place / "loop.yaml")
    report = make_report(loop, Runner(loop, Listener()).run_stages())
    assert [(row.task, row.metric, row.better) for row in report.rows] == [
        ("persona", "style", True),
        ("persona", "bleu-1", True),
        ("stories", "perplexity", False),
    ]
    assert report.proven and report.training.tokens_per_second == 200.0
    shown = "\n".join(terminal_lines(report))
    for wanted in ("+80.0**", "unrelated: what it cost", "kt serve", "kt chat"):
        assert wanted in shown
    assert shown.endswith(f"Report: {place}/run/report.html")
    assert report.answers == (AnswerPair("Why?", "So.", "Nya."), AnswerPair("Why?", "So.", "Nya."))
    assert answer_lines(report.answers[0], "neko") == ["asked  Why?", "base   So.", "neko   Nya."]
    details = "\n".join(summary_lines(report))
    assert "proven by 1 checks" in details and "12 steps" in details and re.search(r"train \d+ s", details)
    kept = json.loads((place / "run" / "report.json").read_text())
    html = (place / "run" / "report.html").read_text()
    assert html.count("<figure class='chart'>") == 4 and "+80.0**" in html and "href='eval/report.html'" in html
    hostile = replace(report, answers=(AnswerPair("<script>", "<img src=x onerror=y>", "&"),), name="<b>")
    assert not any(tag in page("", report_blocks(hostile, [])) for tag in ("<script", "<img"))
    assert (
        kept["rows"][0]["adapter"] == 80.0
        and "| persona | style hits % | 0.0 | 80.0" in (place / "run" / "report.md").read_text()
    )


def test_stages_follow_the_settings(place: Path) -> None:
    def names(*words: str) -> list[str]:
        return [stage.name for stage in build_stages(read_loop(place / "loop.yaml", words))]

    assert names() == ALL
    assert names("prove=false", "eval.tasks=[]", "plan=false") == ["model", "train"]
    assert names("quantise.format=int4")[:2] == ["model", "quantise"]
    (quantise,) = [
        s for s in build_stages(read_loop(place / "loop.yaml", ["quantise.format=int4"])) if s.name == "quantise"
    ]
    assert quantise.arguments[0] == "quant" and quantise.arguments[4:6] == ("--format", "int4")
    loop = read_loop(place / "loop.yaml", ["train.keys.kt_weight_path=packed"])
    (baseline,) = [stage for stage in build_stages(loop) if stage.name == "baseline"]
    assert baseline.arguments[:4] == ("eval", "SERVER", "--served-model", "base")
    assert baseline.arguments[-2:] == ("--experts", "packed"), "other experts, other answers"
    words = serve_arguments(loop, run_paths(loop), 1)
    assert words[words.index("--kt-weight-path") + 1] == "packed"
    assert to_flags({"a_b": 1, "c": True, "d": False, "e": [1, 2], "f": None}) == [
        "--a-b",
        "1",
        "--c",
        "--no-d",
        "--e",
        "1",
        "--e",
        "2",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.path=x"], "one of path, make and upcycle"),
        (["trian.minutes=2"], "a key that is not known"),
        (["train.minutes=-1"], "greater than 0"),
        (["name=base"], "a name that is not one of"),
        (["minutes"], "key=value"),
        (["run.x=1", "run=2"], "run"),
        (["train.keys.output_dir=elsewhere"], "follows from the run"),
        (["train.file=nowhere.yaml"], "no such file"),
    ],
)
def test_invalid_settings_are_refused(place: Path, words: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Runner(read_loop(place / "loop.yaml", words), Listener()).run_stages()


def test_the_server_takes_as_many_sequences_as_are_judged_at_once(place: Path) -> None:
    def running(*words: str) -> list[str]:
        loop = read_loop(place / "loop.yaml", words)
        arguments = serve_arguments(loop, run_paths(loop), 1)
        return [arguments[i + 1] for i, word in enumerate(arguments) if word == "--max-running-requests"]

    assert running() == running("eval.options.batch_size=16") == []
    assert running("eval.options.batch_size=48") == ["48"]
    assert running("eval.options.batch_size=48", "serve.max_running_requests=4") == ["4"]


def test_hashes_depend_on_content_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes, folder = Hashes(tmp_path / "known.json"), tmp_path / "model"
    folder.mkdir()
    (folder / "a").write_text("one")
    (folder / ".partial").write_text("not counted")
    first = hashes.of(folder)
    assert hashes.of(tmp_path / "nothing") == "" and first != ""
    (folder / ".partial").write_text("changed")
    assert hashes.of(folder) == first
    (folder / "a").write_text("two")
    assert hashes.of(folder) != first
    hashes.save()
    assert Hashes(tmp_path / "known.json").of(folder) == hashes.of(folder)
    monkeypatch.setattr("ktransformers.evaluate.loop.record.MAX_HASHED_BYTES", 10)
    monkeypatch.setattr("ktransformers.evaluate.loop.record.EDGE_BYTES", 4)
    (folder / "b").write_text("0123456789abcdef")
    before = hashes.of(folder / "b")
    os.utime(folder / "b", ns=(1, 1))
    assert hashes.of(folder / "b") != before and MAX_HASHED_BYTES > 10


def test_loop_command_runs_and_reports(place: Path) -> None:
    from typer.testing import CliRunner

    from ktransformers.cli.main import app

    file = str(place / "loop.yaml")
    looked = json.loads(CliRunner().invoke(app, ["loop", file, "--dry-run", "--json"]).stdout)
    assert [stage["status"] for stage in looked["stages"]] == ["would run"] * len(ALL)
    assert CliRunner().invoke(app, ["loop", file]).exit_code == 0
    found = json.loads(CliRunner().invoke(app, ["loop", file, "--json"]).stdout)
    assert found["proven"] is True and {stage["status"] for stage in found["stages"]} == {"skipped"}
    again = CliRunner().invoke(app, ["loop", file]).stdout
    assert "Training neko: unchanged, done before\n" in again and "asked  Why?" in again
    assert CliRunner().invoke(app, ["loop", file, "--quiet"]).stdout.startswith("asked  Why?")
