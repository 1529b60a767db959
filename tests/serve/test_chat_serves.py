"""`kt chat MODEL` with a real server: started for the chat on 127.0.0.1, ended with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ktransformers.serve.running import running_servers as running_list

KT = "from ktransformers.cli.main import main; main()"


def chat(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", KT, "chat", *words, "--json", "--max-tokens", "4", "-t", "0"]
    return subprocess.run(command, input="Hello\n", capture_output=True, text=True)


def running_servers(word: str) -> list[str]:
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # ended meanwhile
            continue
        if "serve" in words and word in words:
            lines.append(" ".join(words))
    return lines


def test_recipe_is_served_for_the_chat(
    model_directory: Path, adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("uvicorn")
    monkeypatch.setenv("API_KEY", "a key of another server")
    recipe = tmp_path / "train.yaml"
    recipe.write_text(f"model_name_or_path: {model_directory}\ndo_train: true\noutput_dir: {adapters['one']}\n")
    done = chat(str(recipe))
    assert done.returncode == 0, done.stderr
    (answer,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert answer["model"] == "tiny:one" and answer["tokens"] == 4
    assert running_servers(str(recipe)) == []
    recipe.write_text(f"model_name_or_path: {model_directory}\ndo_train: true\noutput_dir: {tmp_path}/none\n")
    refused = chat(str(recipe))
    assert (refused.returncode, refused.stdout) == (1, "") and refused.stderr.count("\n") == 1
    assert refused.stderr.startswith("kt: ") and f"run `kt train {recipe}` first" in refused.stderr


@pytest.mark.parametrize("verb", ["serve", pytest.param("run", marks=pytest.mark.slow)])
def test_address_is_a_document(
    verb: str, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a program reads that starts a server on any free port; the server is listed while it runs."""
    pytest.importorskip("uvicorn")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    words = [sys.executable, "-c", KT, verb, str(model_directory), "--port", "0", "--json", "--quiet"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        document = json.loads(process.stdout.readline())
        assert document["model"] == "tiny" and document["pid"] == process.pid
        assert [(server.url, server.pid) for server in running_list()] == [(document["url"], process.pid)]
    finally:
        process.terminate()
        process.wait(60)
    assert process.stderr.read() == "" and running_list() == []
