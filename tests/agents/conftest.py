"""A scripted server for real clients, in the network namespace that `make test-agents` makes: nothing outside of it can
be reached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted_model import ScriptedService, scripted_service, write_model
from tests.support.serving import run_app


class Recorder:
    """ASGI middleware that keeps the POST requests of a test."""

    def __init__(self, app: Any) -> None:
        self._app, self.requests = app, list[dict[str, Any]]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        entry: dict[str, Any] = {"path": scope["path"], "body": b"", "status": 0}
        self.requests.append(entry)

        async def received() -> Any:
            message = await receive()
            entry["body"] += message.get("body", b"")
            return message

        async def sent(message: Any) -> None:
            entry["status"] = message.get("status", entry["status"])
            await send(message)

        await self._app(scope, received, sent)

    def take(self) -> list[dict[str, Any]]:
        """The requests since the last call, parsed."""
        taken, self.requests = self.requests, []
        return [{**entry, "body": json.loads(entry["body"])} for entry in taken if entry["status"]]


class Scripted:
    def __init__(self, url: str, service: ScriptedService, recorder: Recorder) -> None:
        self.url, self.service, self.recorder = url, service, recorder


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    from ktransformers.serve.http.api import create_app

    service = scripted_service(write_model(tmp_path_factory.mktemp("model") / "scripted"), lambda _: "nothing")
    recorder = Recorder(create_app(service))
    with run_app(recorder) as url:
        yield Scripted(url, service, recorder)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, so that a client finds no settings, and a folder of its own for temporary files."""
    folder = tmp_path / "home"
    for name, used in (("HOME", folder), ("TMPDIR", tmp_path / "tmp")):
        used.mkdir()
        monkeypatch.setenv(name, str(used))
    for name in ("CONFIG", "DATA", "CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(folder / name.lower()))
    return folder
