"""`kt` across verbs: JSON output, prompts only on a terminal, exit codes, completion, and docs that list everything."""

from __future__ import annotations

import errno
import functools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

from ktransformers.cli import ask
from ktransformers.cli.main import app, main
from ktransformers.ground import settings
from ktransformers.ground.errors import InputError, KTError
from tests.support.cli import RunKt, model_files, write_model
from tests.support.hub import Hub

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(Path(sys.executable).with_name("kt"))
PASSED_ON = {"with"}  # what follows belongs to another program


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def test_every_verb_has_json_and_help() -> None:
    actual = dict(commands(typer.main.get_command(app)))
    assert {"run", "chat", "doctor", "version", "bench", "microbench", "config set", "model verify"} <= set(actual)
    for name, command in actual.items():
        options = {word for parameter in command.params for word in parameter.opts}
        assert "--json" in options or name in PASSED_ON, name
        assert command.help and "coming soon" not in command.help.lower(), name


def test_help_of_verbs_fits_80_columns() -> None:
    group: Any = typer.main.get_command(app)
    longest = max(map(len, group.commands))
    room = 80 - 2 - 6 - longest  # as click has it
    cut = {name for name, command in group.commands.items() if command.get_short_help_str(room).endswith("...")}
    assert len(group.commands) > 15 and not cut


@pytest.mark.parametrize("line", ["serve", "run", "bench", "quant", "plan", "train", "loop", "merge", "model info"])
def test_a_missing_argument_ends_with_2(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kt", *line.split()])
    monkeypatch.setattr(ask, "can_ask", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_docs_list_every_verb_and_setting() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for name, command in commands(typer.main.get_command(app)):
        word = name.removeprefix("model ").removeprefix("config ")
        assert command.hidden or f"`{word}" in page or f"`kt {name}" in page or f", {word}" in page, name
    assert all(key in page or key.partition(".")[2] in page for key in settings.keys())  # noqa: SIM118 (a function)


def test_links_in_docs_resolve() -> None:
    for page in ("cli.md", "environment.md"):
        for target in re.findall(r"\]\(([\w-]+\.md)", (ROOT / "docs" / page).read_text()):
            assert (ROOT / "docs" / target).is_file(), target


def test_missing_argument_without_a_terminal_is_refused(kt: RunKt, tmp_path: Path) -> None:
    kt("model", "add", str(write_model(tmp_path / "disk" / "m")))
    for words in (("plan",), ("run",), ("bench",), ("model", "download")):
        done = kt(*words)
        assert done.code == 1 and "given nothing" in done.error, words


def test_missing_argument_on_a_terminal_is_prompted(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    monkeypatch.setattr(ask, "can_ask", lambda: True)
    asked = typer.Typer()

    @asked.command()
    def choose() -> None:
        model, repo = ask.for_choice("MODEL", None, ["a", "b", "c"], "one"), ask.for_text("REPO", None, "id", "an id")
        typer.echo(f"{model} {repo}")
        ask.for_consent("delete?", yes=False)
        typer.echo("deleted")

    done = CliRunner().invoke(asked, [], input="7\nb\nowner/name\ny\n")
    lines = done.stdout.splitlines()  # the runner shows what was typed among them
    assert "b owner/name" in lines and lines[-1] == "deleted" and "a number from 1 to 3" in done.stderr
    done = CliRunner().invoke(asked, [], input="3\nx/y\nn\n")
    assert "c x/y" in done.stdout.splitlines() and "deleted" not in done.stdout and done.exit_code == 1
    with pytest.raises(InputError):  # --json never prompts
        ask.for_text("REPO", None, "id", "an id", quiet=True)
    with pytest.raises(InputError):  # nothing to choose from
        ask.for_choice("MODEL", None, [], "one")


def on_terminal(words: list[str], environment: dict[str, str], typed: str = "") -> tuple[int, str]:
    """Exit status and output of a command on its own pseudo-terminal."""
    ours, theirs = pty.openpty()
    running = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | environment)
    os.close(theirs)
    os.write(ours, typed.encode())
    shown = b""
    while True:
        try:
            block = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        shown += block
    os.close(ours)
    return running.wait(), shown.decode()


def test_pseudo_terminal_is_prompted_without_colours(kt: RunKt, tmp_path: Path) -> None:
    """`kt plan` without a model, the answer typed; the model is too small to plan, so it ends with an InputError."""
    kt("model", "add", str(write_model(tmp_path / "disk" / "some-moe")))
    status, shown = on_terminal([PROGRAM, "plan"], {"NO_COLOR": "1", "TERM": "xterm-256color"}, "1\n")
    assert status == 1 and "1  some-moe" in shown and "kt: config.json" in shown
    status, helped = on_terminal([PROGRAM, "--help"], {"NO_COLOR": "1", "TERM": "xterm-256color"})
    assert status == 0 and "doctor" in helped and "\x1b[" not in shown + helped


def test_exit_codes(kt: RunKt, tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([PROGRAM, *words], capture_output=True, text=True)

    refused = run("config", "get", "no.such")
    assert (refused.returncode, refused.stdout) == (1, "") and refused.stderr.startswith("kt: key: given 'no.such'")
    usage = run("model", "dowload")
    assert usage.returncode == 2 and "download" in usage.stderr
    assert run("model", "list", "--nonsense").returncode == 2
    assert run("config", "path").returncode == 0


def test_full_disk_is_reported_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ktransformers.cli import main

    def fail(number: int) -> None:
        def refuse(**options: object) -> None:
            raise OSError(number, os.strerror(number), "/models/x")

        monkeypatch.setattr(main, "app", refuse)
        main.main()

    for number in (errno.ENOSPC, errno.EFBIG, errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        with pytest.raises(SystemExit) as ended:
            fail(number)
        assert ended.value.code == 1 and capsys.readouterr().err == f"kt: /models/x: {os.strerror(number)}\n"
    with pytest.raises(OSError, match="Invalid"):  # this one is
        fail(errno.EINVAL)


def test_interrupted_download_exits_with_130(kt: RunKt, tmp_path: Path) -> None:
    files = model_files() | {"model-00001-of-00002.safetensors": bytes(1 << 20)}
    with Hub(files, cut=1000, cuts=10**6) as hub:
        words = [PROGRAM, "model", "download", hub.repo, "--json"]
        environment = os.environ | {"HF_ENDPOINT": hub.url}
        # Tests that a shell has put into the background ignore interrupts, and so would what they start.
        heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        running = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, preexec_fn=heed)
        end = time.monotonic() + 60
        while time.monotonic() < end and not hub.asked:
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)  # at once: it gives up by itself after a few tries
        assert running.wait(30) == 130
    assert running.stdout is not None and running.stdout.read() == b""


def test_shell_completion_lists_names(kt: RunKt, tmp_path: Path) -> None:
    kt("model", "add", str(write_model(tmp_path / "disk" / "some-moe")))

    def complete(*words: str) -> list[str]:
        line = {"_KT_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        done = subprocess.run([PROGRAM], capture_output=True, text=True, env=os.environ | line)
        return done.stdout.split()

    assert complete("kt", "model", "inf") == ["info"]
    assert complete("kt", "model", "info", "so") == ["some-moe"]
    assert complete("kt", "config", "get", "server.") == ["server.host", "server.port"]


def test_chat_prints_json_lines(kt: RunKt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Questions are piped in and answers out; the conversation is saved and continued."""
    from typer.testing import CliRunner

    from ktransformers.ground.client import Client

    bodies: list[dict[str, Any]] = []

    def stream(_: Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        bodies.append(json.loads(json.dumps(body)))
        yield {"choices": [{"delta": {"content": "an "}}]}
        yield {"choices": [{"delta": {"content": "answer"}}], "usage": {"completion_tokens": 2}}

    monkeypatch.setattr(Client, "template_origins", lambda _: {"base": None, "base:neko": "adapter"})
    monkeypatch.setattr(Client, "stream", stream)
    history = tmp_path / "talk.json"
    words = ["chat", "-m", "base:neko", "-t", "0", "--json", "--history-file", str(history)]
    done = CliRunner().invoke(app, words, input="one\n\n/two\n")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["model"], one["content"], one["tokens"]) for one in answers] == [("base:neko", "an answer", 2)] * 2
    assert "base:neko is asked with the chat template that it was trained with" in done.stderr
    assert [one["content"] for one in json.loads(history.read_text())] == ["one", "an answer", "/two", "an answer"]
    CliRunner().invoke(app, words, input="three\n")
    assert [one["content"] for one in bodies[-1]["messages"]][-1] == "three" and len(bodies[-1]["messages"]) == 5
    plain = CliRunner().invoke(app, ["chat", "-s", "be brief"], input="hi\n/exit\n")
    assert "an answer\n[2 tokens" in plain.stdout and bodies[-1]["messages"][0]["role"] == "system"
    history.write_text("[1]")
    assert "history-file" in str(CliRunner().invoke(app, words, input="").exception)


@pytest.mark.parametrize("verb", ["run", "train", "eval", "prove"])
def test_no_verify_reaches_every_model_of_the_command(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from ktransformers.ground import env

    monkeypatch.setenv("KT_VERIFY", "1")
    arguments = {"run": ["a prompt"], "eval": ["--task", "arithmetic"]}.get(verb, [])
    failed = CliRunner().invoke(app, [verb, "/nothing/here", *arguments, "--no-verify"])
    assert failed.exit_code and not env.verify_enabled(), failed.output


def test_every_command_can_be_quiet() -> None:
    found = dict(commands(typer.main.get_command(app)))
    without = [name for name, command in found.items() if not any("--quiet" in part.opts for part in command.params)]
    assert len(found) > 30 and without == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train"], "kt: train: missing argument 'file'; see kt train --help"),
        (["doctr"], "kt: no such command 'doctr'. Did you mean 'doctor'? see kt --help"),
        (["model", "lst"], "kt: model: no such command 'lst'. Did you mean 'list'? see kt model --help"),
        (["plan", "--zzzzzz"], "kt: plan: no such option: --zzzzzz; see kt plan --help"),
    ],
)
def test_usage_errors_are_one_line(
    words: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ktransformers.cli.main import main

    monkeypatch.setattr("sys.argv", ["kt", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and capsys.readouterr() == ("", line + "\n")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [(None, 3, ""), (KeyboardInterrupt(), 130, "kt: stopped\n"), (KTError("no"), 1, "kt: no\n")],
)
def test_other_ends_have_codes(
    error: BaseException | None,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from ktransformers.cli import main

    def end(**options: object) -> int:
        if error is not None:
            raise error
        return 3

    monkeypatch.setattr(main, "app", end)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == code and capsys.readouterr().err == line
