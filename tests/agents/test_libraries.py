"""Libraries run a turn with a tool against the scripted model. What the tool says stands in no request before, so the
answer has it from the result."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.agents.conftest import Scripted
from tests.agents.tool_loops import LOOPS
from tests.support.scripted_model import RESULT, call

pytestmark = pytest.mark.skipif("KT_AGENTS" not in os.environ, reason="make test-agents has the packages")
FOLDER = Path(__file__).parent
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def answer(prompt: str) -> str:
    if results := RESULT.findall(prompt):
        return f"The sum is {results[-1].split('=')[-1].rstrip()}."
    # A library may ask for an answer without thinking; then the prompt ends with an empty block.
    thought = "" if prompt.endswith("</think>\n\n") else "<think>\nA tool knows.\n</think>\n\n"
    return thought + call("sum", {"path": "notes.txt"})


def command_of(loop: str) -> list[str]:
    packages = Path(os.environ["KT_AGENTS"])
    if loop in LOOPS:
        return [str(packages / "venv" / "bin" / "python"), str(FOLDER / "tool_loops.py"), loop]
    # A module finds its packages above its own folder.
    script = shutil.copy(FOLDER / "tool_loop.mjs", packages / "npm")
    return ["node", str(script), loop]


@pytest.mark.parametrize("loop", [*LOOPS, "ai-sdk-chat", "ai-sdk-messages"])
def test_library_runs_its_tool(loop: str, scripted: Scripted, home: Path) -> None:
    scripted.service.answer = answer
    scripted.recorder.take()
    number = str(random.Random(loop).randrange(10**8, 10**9))
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [*command_of(loop), scripted.url, number]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    requests = scripted.recorder.take()
    assert done.stdout.strip() == f"The sum is {number}.", done.stdout[-2000:]
    path = PATHS.get(loop.rpartition("-")[2], PATHS["responses"])
    assert [(entry["path"], entry["status"]) for entry in requests] == [(path, 200)] * 2
    assert number not in json.dumps(requests[0]["body"]) and number in json.dumps(requests[1]["body"])
