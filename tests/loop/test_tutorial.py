"""docs/tutorial.md, word for word, on a tiny model: every command of the page in the order of the page, in one shell.

The quick run takes the blocks that the road itself needs (train, serve, ask); the slow one takes all, the loop at the
end included, which is thereby also run over the real verbs. Only the port is replaced, by one that is free here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tiny_models import build, save

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
LEFT_OUT = ("--dry-run", "kt prove", "kt eval", "kt loop")  # of the quick run

for package in ("trl", "datasets", "fastapi", "sacrebleu"):
    pytest.importorskip(package)


def blocks() -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs" / "tutorial.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with the model where the page says it is."""
    model = tmp_path / "models" / "my-moe"
    model.mkdir(parents=True)
    save(build("qwen3_moe", vocab_size=6400, max_position_embeddings=512, eos_token_id=2), model)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "minimind_6400" / file, model / file)
    shutil.copy(DATA / "chat_templates" / "qwen3.jinja", model / "chat_template.jinja")
    return tmp_path


def follow(home: Path, wanted: Callable[[str], bool]) -> str:
    """What the shell printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    script = "\n".join(["set -e", *(block for block in blocks() if wanted(block))]).replace("30555", port)
    place = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "HOME": str(home), "PATH": place, "XDG_DATA_HOME": "", "XDG_CONFIG_HOME": ""}
    words = ["bash", "-c", script]
    done = subprocess.run(words, cwd=home, env=variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_tutorial_page_lists_the_commands() -> None:
    text = "".join(blocks())
    for verb in ("model info", "train recipe.yaml", "prove", "serve", "chat", "eval", "loop"):
        assert f"kt {verb}" in text
    assert re.findall(r"```(\w+)", (ROOT / "docs" / "tutorial.md").read_text()) == ["sh"] * len(blocks())


def test_tutorial_commands_train_and_serve(home: Path) -> None:
    said = follow(home, lambda block: not any(words in block for words in LEFT_OUT))
    assert (home / "saves" / "kite" / "adapter_model.safetensors").is_file()
    assert "step 8/8" in said
    answer = json.loads(said[said.index('{"id"') :])
    assert answer["model"] == "my-moe" and answer["usage"]["completion_tokens"] == 8


@pytest.mark.slow
def test_whole_tutorial_runs(home: Path) -> None:
    said = follow(home, lambda block: True)
    assert "proven: what is served is what was trained" in said
    assert (home / "judged" / "report.html").is_file()
    report = json.loads((home / "runs" / "kite" / "report.json").read_text())
    assert report["proven"] is True and report["training"]["steps"] == 8
    assert [step["name"] for step in report["stages"]] == [
        "tasks",
        "plan",
        "train",
        "serve",
        "prove",
        "baseline",
        "eval",
        "compare",
    ]
    assert {row["task"] for row in report["rows"]} == {"world"}
