"""Guided commands on a pseudo terminal: questions, the command that is shown, answers that are remembered, the menu."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ktransformers.cli import ask, guide, machine_state
from ktransformers.cli.ask import MenuChoice
from ktransformers.cli.main import app
from ktransformers.serve import running
from tests.support.cli import RunKt, write_model
from tests.support.terminal_session import CTRL_C, TerminalSession

PROGRAM = str(Path(sys.executable).with_name("kt"))


@pytest.fixture
def home(kt: RunKt, tmp_path: Path) -> Path:
    """The working directory of `kt`: a model by name, an adapter of it, recipes of a training and of a loop."""
    kt("model", "add", str(write_model(tmp_path / "disk" / "some-moe")))
    adapter = tmp_path / "saves" / "neko"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "hub/some-moe"}))
    (adapter / "trainer_log.jsonl").write_text('{"current_steps": 4, "total_steps": 9}\n')
    (tmp_path / "recipe.yaml").write_text("model_name_or_path: some-moe\noutput_dir: saves/x\nunknown_key: 1\n")
    (tmp_path / "tune.yaml").write_text("run: r\nmodel: {path: some-moe}\ntrain: {}\nnonsense: 1\n")
    return tmp_path


def answers(home: Path) -> dict[str, object]:
    file = home / "xdg" / "config" / "ktransformers" / "config.yaml"
    return yaml.safe_load(file.read_text())["answers"]


def start(home: Path, *words: str) -> TerminalSession:
    xdg = {f"XDG_{name}_HOME": str(home / "xdg" / name.lower()) for name in ("CONFIG", "DATA", "CACHE")}
    return TerminalSession(*words, columns=150, PWD=str(home), **xdg)


def test_server_is_asked_for_model_adapters_and_port(home: Path) -> None:
    """The model cannot run, so the command that is shown ends with the error of loading it."""
    for verb in ("run", "serve"):
        with start(home, verb) as session:
            session.wait_for(r"^model.*:$")
            assert "1  some-moe  qwen3_moe, 4 experts, top 2" in session.text
            session.type("some-mo\n")
            session.wait_for("did you mean some-moe")
            session.type("1\n")
            session.wait_for("its memory is planned once")  # this config.json is no whole one
            session.wait_for(r"adapters, numbers with commas, or none \[none\]:$")
            assert "1  saves/neko  on some-moe, now" in session.text
            session.type("1\n")
            session.wait_for(r"^port \[\d+\]:$")
            session.type("70000\n")
            session.wait_for("a number from 1 to 65535")
            session.type("30123\n")
            session.wait_for(rf"^\$ kt {verb} some-moe --lora-paths neko=saves/neko --port 30123$")
            session.wait_for(r"run it\? \[Y/n\]:$")
            session.type("\n")
            assert session.wait() == 1 and re.search(r"^kt: ", session.text, re.MULTILINE)
    assert answers(home) == {"model": "some-moe", "port": 30123}
    with start(home, "run") as session:  # and proposed the next time
        session.wait_for(r"^model \[some-moe\]:$")
        session.type("\n")
        session.wait_for("or none")
        session.type("\n")
        session.wait_for(r"^port \[30123\]:$")
        session.type("\n")
        session.wait_for(r"^\$ kt run some-moe --port 30123$")
        session.wait_for(r"run it\?")
        session.type("n\n")
        assert session.wait() == 0
    with start(home, "serve", "--port", "30124", "--lora-paths", "neko=saves/neko") as session:
        session.wait_for(r"^model \[some-moe\]:$")
        session.type("\n")
        session.wait_for(r"^\$ kt serve some-moe --port 30124 --lora-paths neko=saves/neko$")
        session.wait_for(r"run it\?")
        session.type("n\n")
        assert session.wait() == 0


def test_plan_is_shown_before_the_port(home: Path) -> None:
    with start(home, "run") as session:
        session.wait_for(r"^model.*:$")
        session.type("olmoe\n")
        session.wait_for(r"^port \[")
        assert [name for name in ("fits", "time", "memory") if re.search(rf"^{name} ", session.text, re.MULTILINE)] == [
            *("fits", "time", "memory")
        ]
        session.type(CTRL_C)
        assert session.wait() == 130 and session.text.rstrip().endswith("kt: stopped")


@pytest.mark.parametrize(
    ("verb", "typed", "shown", "error"),
    [
        ("plan", ["1"], "kt plan some-moe", "config.json"),
        ("train", ["1", "y"], "kt train recipe.yaml", "unknown_key"),
        ("loop", ["1", "y"], "kt loop tune.yaml", "nonsense"),
        ("prove", ["1"], "kt prove saves/neko", ""),
        ("quant", ["1", "int8", "", "n"], "kt quant some-moe --format int8 -o some-moe-int8", None),
        ("merge", ["1", "1", "m", "n"], "kt merge some-moe saves/neko -o m", None),
        ("eval", ["1", "arithmetic", "none", "n"], "kt eval some-moe --task arithmetic", None),
        ("model download", ["nothing", "m2", "n"], "kt model download m2", None),
        ("model info", ["1"], "kt model info some-moe", ""),
        ("config get", ["server.prot"], "kt config get server.prot", "did you mean server.port"),
        ("chat", ["nothing", "http://127.0.0.1:9"], "kt chat http://127.0.0.1:9", "a server that is running"),
    ],
)
def test_every_verb_asks_for_what_it_needs(
    home: Path, verb: str, typed: list[str], shown: str, error: str | None
) -> None:
    """The last answer runs the command or declines it. What runs fails at once: nothing here is a real model."""
    with start(home, *verb.split()) as session:
        for line in typed:
            session.wait_for_question()
            session.type(f"{line}\n")
        status = session.wait()
        assert f"$ {shown}\n" in f"{session.text}\n", session.text
        if error is None:
            assert status == 0
        elif verb != "model info":
            assert status == 1 and error in session.text.partition(f"$ {shown}")[2], session.text


def test_menu_shows_the_machine_and_runs_a_verb(home: Path) -> None:
    with start(home) as session:
        session.wait_for(r"^what to do \[chat\]:$")
        shown = session.text
        assert re.search(r"^models +some-moe$", shown, re.MULTILINE)
        assert re.search(r"^adapters +saves/neko$", shown, re.MULTILINE)
        assert re.search(r"^servers +none is running$", shown, re.MULTILINE)
        assert re.search(r"^runs +saves/neko \(on some-moe, now\)$", shown, re.MULTILINE)
        assert "7  plan" in shown and "Plan memory by device" in shown
        session.type("config show\n")
        assert session.wait() == 0 and "server.port" in session.text
    with start(home) as session:
        session.wait_for("what to do")
        session.type("quit\n")
        assert session.wait() == 0


def test_nothing_is_asked_without_a_terminal(home: Path) -> None:
    xdg = {f"XDG_{name}_HOME": str(home / "xdg" / name.lower()) for name in ("CONFIG", "DATA", "CACHE")}
    verbs = ["run", "serve", "train", "plan", "bench", "quant", "merge", "prove", "eval", "loop", "chat"]
    for verb in (*verbs, "model download", "model info", "config get"):
        done = subprocess.run(
            [PROGRAM, *verb.split()], stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=home,
            env=os.environ | xdg, timeout=120,
        )  # fmt: skip
        assert done.returncode in (1, 2) and done.stdout == "", verb
        assert done.stderr.startswith("kt: ") and done.stderr.count("\n") == 1, (verb, done.stderr)
    with start(home, "plan", "--json") as session:
        assert session.wait() == 2 and "given nothing" in session.text


def test_given_arguments_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("asked")

    monkeypatch.setattr(guide.ask, "text", refuse)
    monkeypatch.setattr(guide, "_configured_server_answers", lambda: True)
    for line in (
        ["run", "m2"],
        ["run", "--model", "m2", "-v"],
        ["serve", "--tp", "1", "m2", "--quiet"],
        ["eval", "--list"],
        ["plan", "--machine", "list"],
        ["train", "--help"],
        ["chat"],
        ["chat", "--port", "1"],
        ["quant", "m", "-o", "x"],
        ["with", "python", "-c", "1"],
        ["trian"],
        ["model"],
        ["version"],
    ):
        assert guide.complete(app, line) == line


def test_running_servers_are_listed(kt: RunKt, tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        running.record_server("0.0.0.0", port, "some-moe")
        (server,) = running.running_servers()
        assert (server.url, server.model) == (f"http://127.0.0.1:{port}", "some-moe")
        file = tmp_path / "xdg" / "data" / "ktransformers" / "servers" / "999999999.json"
        file.write_text(json.dumps({"pid": 999999999, "host": "127.0.0.1", "port": port, "model": "killed"}))
        assert running.running_servers() == [server] and not file.exists()
    assert running.running_servers() == []  # nothing listens any more
    running.record_server("::", 9, "m")
    running.forget_server()
    assert list((tmp_path / "xdg" / "data" / "ktransformers" / "servers").iterdir()) == []


def test_numbers_are_those_that_python_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A superscript is a digit and no number."""
    words = iter(["\u00b2", "3", "2"])
    monkeypatch.setattr(ask, "text", lambda *_: next(words))
    assert ask.choose("verb", [MenuChoice("a"), MenuChoice("b")]) == "b"


def test_notes_are_cut_at_the_edge_of_the_terminal() -> None:
    choices = [MenuChoice("model download", "Download a model and register it."), MenuChoice("quit")]
    assert ask.choice_lines(choices, 40) == ["  1  model download  Download a model...", "  2  quit"]
    assert ask.choice_lines(choices, 80)[0].endswith("and register it.")
    assert ask.choice_lines(choices, 30)[0] == "  1  model download", "values are whole"


def test_search_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    for name in ("a/one", "a/checkpoint-5", ".hidden/two", "a/b/c/d/e/deep"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "adapter_config.json").write_text("{")
    (tmp_path / "a" / "gone").mkdir()
    (tmp_path / "a" / "gone" / "adapter_config.json").symlink_to(tmp_path / "nothing")
    assert [run.path for run in machine_state.find_adapters()] == [tmp_path / "a" / "one"]
    monkeypatch.setattr(machine_state, "SEARCHED_FOLDERS", 1)
    assert machine_state.find_adapters() == []
    assert [machine_state.age(seconds) for seconds in (5, 600, 7200, 10**6)] == [
        *("now", "10 min ago", "2 h ago", "12 days ago")
    ]
