"""The clients of `kt agent`, as npm has them, do a task with files on a scripted model: a file is read and edited, a
command is run, a call fails, a second turn asks about the first, and an answer is cancelled in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.agents.conftest import Scripted
from tests.support.scripted_model import CLIENT_TOOLS, MISSING, FileTask
from tests.support.serving import WAIT_SECONDS
from tests.support.terminal_session import CTRL_C, TerminalSession

pytestmark = pytest.mark.skipif("KT_AGENTS" not in os.environ, reason="make test-agents has the clients")
KT = [sys.executable, "-c", "from ktransformers.cli.main import main; main()", "agent"]
ALLOWED = "Bash Read Edit Write"
CODEX = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
# Arguments of a first turn, and of one that continues the session.
ASK: dict[str, tuple[list[str], list[str]]] = {
    "claude": (["-p", "--allowedTools", ALLOWED, "--"], ["-p", "--continue", "--allowedTools", ALLOWED, "--"]),
    "codex": (["exec", *CODEX], ["exec", "resume", *CODEX, "--last"]),
    "opencode": (["run"], ["run", "--continue"]),
    "qwen": (["--yolo", "-p"], ["--yolo", "--continue", "-p"]),
    "cn": (["--auto", "-p"], ["--auto", "--resume", "-p"]),
    "cline": (["--json"], []),
}
SECOND = "TASK-TWO: what was the sum?"
NOTES = "The meeting is on Monday.\nstate: draft\n"


def start(name: str, url: str, folder: Path, arguments: list[str]) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [*KT, name, "--url", url, "--", *arguments]
    # Some clients ask the shell's variable where they are.
    environment = {**os.environ, "PWD": str(folder)}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, start_new_session=True, **pipes)


def ask(name: str, url: str, folder: Path, arguments: list[str]) -> str:
    process = start(name, url, folder, arguments)
    try:
        out, errors = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, errors = process.communicate()
        raise AssertionError(f"{name} does not end:\n{out[-2000:]}\n{errors[-2000:]}") from None
    assert process.returncode == 0, f"{out[-2000:]}\n{errors[-3000:]}"
    return out


@pytest.mark.parametrize("name", CLIENT_TOOLS)
def test_client_does_its_task(name: str, scripted: Scripted, home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    notes = folder / "notes.txt"
    notes.write_text(NOTES)
    scripted.service.answer = FileTask(CLIENT_TOOLS[name], str(folder))
    first, again = ASK[name]
    said = ask(name, scripted.url, folder, [*first, "TASK-ONE: set the state in notes.txt and tell me the sum."])
    keep(name, "first", scripted)
    assert notes.read_text() == NOTES.replace("draft", "final"), said[-2000:]
    cksum = subprocess.run(["cksum"], stdin=notes.open(), capture_output=True, text=True, check=True).stdout.split()[0]
    assert f"The sum is {cksum}." in said and re.search(f"The other file: {MISSING}", said), said[-2000:]
    if name == "cline":
        ask_on_a_terminal(name, scripted.url, ["--tui", "--cwd", str(folder), "--id", session_id(folder)], cksum)
    else:
        said = ask(name, scripted.url, folder, [*again, SECOND])
        assert f"The sum was {cksum}" in said, said[-2000:]
    keep(name, "second", scripted)
    process = start(name, scripted.url, folder, [*first, "TASK-THREE: talk."])
    try:
        wait_until(lambda: scripted.service.engine.busy)
        wait_until(lambda: generated(scripted) > 50)
        os.killpg(process.pid, signal.SIGINT)
        wait_until(lambda: not scripted.service.engine.busy)
        process.wait(30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert not running_from(folder)
    assert not list(Path(os.environ["TMPDIR"]).glob(f"kt-{name}-*"))
    scripted.recorder.take()


def ask_on_a_terminal(name: str, url: str, arguments: list[str], cksum: str) -> None:
    """The second turn of a client that resumes sessions on a terminal alone."""
    variables = {variable: os.environ[variable] for variable in ("HOME", "PATH", "TMPDIR")}
    with TerminalSession("agent", name, "--url", url, "--", *arguments, **variables) as session:
        session.wait_for(rf"The sum is {cksum}")
        session.type(SECOND)
        session.wait_for(re.escape(SECOND))
        session.type("\r")
        session.wait_for(rf"The sum was {cksum}")
        session.type(CTRL_C)
        session.type(CTRL_C)
        assert session.wait() == 0


def session_id(folder: Path) -> str:
    """Of the one session that Cline has."""
    command, local = ["cline", "history", "--json"], {**os.environ, "CLINE_SESSION_BACKEND_MODE": "local"}
    printed = subprocess.run(
        command, cwd=folder, env=local, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return str(json.loads(printed)[0]["sessionId"])


def running_from(folder: Path) -> list[str]:
    """Processes that name the folder: what a client left behind."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # ended meanwhile
            continue
        if str(folder) in line:
            found.append(line)
    return found


def generated(scripted: Scripted) -> int:
    return max((len(sequence.tokens) - len(sequence.request.prompt) for sequence in running(scripted)), default=0)


def running(scripted: Scripted) -> list[Any]:
    return list(scripted.service.engine.running)


def wait_until(reached: Any, seconds: float = WAIT_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.05)


def keep(name: str, turn: str, scripted: Scripted) -> None:
    """Requests go to files of which `transcripts.py` makes test data."""
    taken = scripted.recorder.take()
    assert {entry["status"] for entry in taken} == {200}, [(entry["path"], entry["status"]) for entry in taken]
    folder = Path(os.environ["KT_AGENTS"]) / "record"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}-{turn}.json").write_text(json.dumps(taken, indent=1))
