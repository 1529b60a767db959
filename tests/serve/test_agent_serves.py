"""`kt agent NAME MODEL` with a real server: started for the client on 127.0.0.1 with the flags of the line, ended with
it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.test_chat_serves import running_servers
from tests.support.scripted_model import write_model

KT = "from ktransformers.cli.main import main; main()"
# In place of the client: asks the server that it is told of, and keeps the answer.
CLIENT = f"""#!{sys.executable}
import os, pathlib, sys, urllib.request
listed = urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/models").read()
pathlib.Path(sys.argv[1]).write_bytes(listed)
sys.exit(4)
"""


def test_model_is_served_for_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    model = write_model(tmp_path / "agentic")
    client = tmp_path / "bin" / "qwen"
    client.parent.mkdir()
    client.write_text(CLIENT)
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}:/usr/bin:/bin")
    flags = ["--served-model-name", "coder", "--context-length", "40000", "--max-total-tokens", "40000"]
    command = [sys.executable, "-c", KT, "agent", "qwen", str(model), *flags, "--", str(tmp_path / "listed.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 4, done.stderr
    (entry,) = json.loads((tmp_path / "listed.json").read_text())["data"]
    assert entry["id"] == "coder" and entry["context_length"] == 40000 and "tools" in entry["capabilities"]
    assert running_servers(str(model)) == []
    flags[3] = "8000"
    short = subprocess.run([*command[:5], str(model), *flags], capture_output=True, text=True)
    assert short.returncode == 1 and short.stderr.count("\n") == 1
    assert "given 8000 tokens of coder, expected 32768 or more for Qwen Code" in short.stderr
    assert running_servers(str(model)) == []
