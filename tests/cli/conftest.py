"""`kt` in this process, with its own XDG folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ktransformers.cli.main import app
from ktransformers.ground.errors import KTError
from tests.support.cli import CommandResult, RunKt


@pytest.fixture
def kt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunKt:
    """`kt("model", "list")`; a KTError becomes code 1 and a line, as in `main`."""
    for name, folder in (("CONFIG", "config"), ("DATA", "data"), ("CACHE", "cache")):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / "xdg" / folder))
    for name in ("HF_ENDPOINT", "HF_TOKEN", "API_HOST", "API_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> CommandResult:
        done = CliRunner().invoke(app, list(words))
        if isinstance(done.exception, KTError):
            return CommandResult(1, done.stdout, str(done.exception))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return CommandResult(done.exit_code, done.stdout, done.stderr)

    return call
