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
    "cline": (["--json"], ["--json"]),
}
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
        again = [*again, "--id", session_id(folder)]
    said = ask(name, scripted.url, folder, [*again, "TASK-TWO: what was the sum?"])
    keep(name, "second", scripted)
    assert f"The sum was {cksum}" in said, said[-2000:]
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
    assert not list(Path("/tmp").glob(f"kt-{name}-*"))
    scripted.recorder.take()


def session_id(folder: Path) -> str:
    """Of the one session that Cline has."""
    command = ["cline", "history", "--json"]
    printed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60).stdout
    return str(json.loads(printed)[0]["sessionId"])


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
