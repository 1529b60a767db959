"""One style for all verbs: every verb of `kt` is walked, so that a new one needs a row here.

Piped, an error is one line `kt: ...` on stderr and nothing on stdout, with and without `--json` and `--quiet`; a result
of `--json` is one document; with `--quiet` stderr is empty; there is no colour.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ktransformers.cli.main import app, main
from tests.cli.test_main import commands
from tests.support.cli import RunKt, write_model

# Words that a verb refuses.
REFUSED: dict[str, list[str]] = {
    "agent": ["nothing"],
    "bench": ["/nothing"],
    "chat": ["http://127.0.0.1:9"],
    "convert": ["/nothing", "/nothing/out", "--to", "peft"],
    "doctor": ["--nonsense"],
    "loop": ["/nothing.yaml"],
    "merge": ["/nothing", "/nothing", "-o", "/nothing/out"],
    "microbench": ["nothing"],
    "plan": ["/nothing"],
    "prove": ["/nothing"],
    "quant": ["/nothing", "-o", "/nothing/out"],
    "rules": ["/nothing.yaml", "/nothing"],
    "run": ["/nothing", "Why?"],
    "serve": ["/nothing"],
    "train": ["/nothing.yaml"],
    "version": ["--nonsense"],
    "eval": ["/nothing", "--task", "arithmetic"],
    "model list": ["--nonsense"],
    "model known": ["--nonsense"],
    "model add": ["/nothing"],
    "model info": ["nothing"],
    "model rm": ["nothing"],
    "model remove": ["nothing"],
    "model refresh": ["--nonsense"],
    "model path-list": ["--nonsense"],
    "model path-add": ["/nothing"],
    "model path-remove": ["/nothing"],
    "model prepare": ["/nothing", "-o", "/nothing/out"],
    "model make": ["nothing", "-o", "/nothing/out"],
    "model upcycle": ["/nothing", "-o", "/nothing/out"],
    "model download": ["nothing"],
    "model verify": ["nothing"],
    "model check": ["/nothing"],
    "config show": ["no.such"],
    "config get": ["no.such"],
    "config set": ["no.such", "1"],
    "config path": ["--nonsense"],
    "config reset": ["--nonsense"],
    "config init": ["--nonsense"],
    "llamafactory on": ["--nonsense"],
    "llamafactory off": ["--nonsense"],
    "llamafactory status": ["--nonsense"],
    "sft train": ["/nothing.yaml"],
    "sft chat": ["http://127.0.0.1:9"],
    "sft export": ["/nothing", "/nothing", "-o", "/nothing/out"],
}
OTHER_PROGRAM = {"with"}  # what follows is not ours

# Lines that succeed without a model that runs; MODEL is a folder of the test.
RESULTS = (
    "version",
    "doctor",
    "plan olmoe --machine desktop-4090",
    "plan --machine list",
    "eval --list",
    "eval MODEL --task arithmetic --dry-run",
    "model add MODEL",
    "model list",
    "model known",
    "model info MODEL",
    "model verify MODEL",
    "model path-add .",
    "model path-list",
    "model path-remove .",
    "model refresh",
    "model rm MODEL",
    "config set server.port 30001",
    "config get server.port",
    "config show",
    "config path",
    "config reset --yes",
    "config init",
    "llamafactory status",
)


@pytest.fixture
def run(kt: RunKt, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """`main` in this process, as a shell runs it: exit status, stdout, stderr."""

    def call(*words: str) -> tuple[Any, str, str]:
        monkeypatch.setattr("sys.argv", ["kt", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, error = capfd.readouterr()
        assert "\x1b" not in out + error
        return ended.value.code, out, error

    return call


def test_every_verb_is_walked() -> None:
    assert {name for name, _ in commands(typer.main.get_command(app))} - OTHER_PROGRAM == set(REFUSED)


@pytest.mark.parametrize("verb", REFUSED)
def test_errors_are_one_line(run: Any, verb: str) -> None:
    for flags in ([], ["--quiet"], ["--json"]):
        code, out, error = run(*verb.split(), *REFUSED[verb], *flags)
        assert code in (1, 2) and out == "", (flags, out)
        assert error.startswith("kt: ") and error.count("\n") == 1 and "Traceback" not in error, (flags, error)
        assert not error.rstrip().endswith("."), error


@pytest.mark.parametrize("line", RESULTS)
def test_results_are_one_document_or_lines(run: Any, tmp_path: Path, line: str) -> None:
    model = write_model(tmp_path / "disk" / "some-moe")

    def words() -> list[str]:
        """The registry as the line finds it."""
        name = "some-moe" if line.startswith("model rm") else str(model)
        if line.startswith(("model info", "model verify", "model rm")):
            run("model", "add", str(model), "-q")
        if line.startswith("model path-remove"):
            run("model", "path-add", ".", "-q")
        return [name if word == "MODEL" else word for word in line.split()]

    code, out, error = run(*words(), "--json", "--quiet")
    assert code in (0, 1) and error == "", error
    json.loads(out)
    code, out, error = run(*words(), "--quiet")
    assert out.strip() and error == "", error
