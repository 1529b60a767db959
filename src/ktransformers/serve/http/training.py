"""A training that runs elsewhere, seen from the server: its log for the page, and its checkpoints as adapters.

`--watch DIR` looks every second at a training output directory. A checkpoint is complete when trainer_state.json lies
in it, which the Trainer writes last; it is served as `checkpoint-N`, and as `final` once kt_manifest.json says that the
run has ended. A checkpoint that training deletes is unloaded. What cannot be read is logged once and tried again when
it has changed.
"""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

from ktransformers.adapters.manifest import MANIFEST_FILE as MANIFEST
from ktransformers.errors import KTError
from ktransformers.log import logger
from ktransformers.serve.http.registry import Registry, UnknownModel

LOG = logger(__name__)
LOG_FILE = "trainer_log.jsonl"
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
FINAL = "final"
LOOK = 1.0  # seconds


class TrainingLog:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def after(self, offset: int) -> dict[str, Any]:
        """Whole lines from that byte on, and where the next ones begin; a log that was begun anew is read anew."""
        lines: list[Any] = []
        file = self.directory / LOG_FILE
        size = file.stat().st_size if file.is_file() else 0
        offset = max(0, offset) if offset <= size else 0
        if size > offset:
            with file.open("rb") as stream:
                stream.seek(offset)
                data = stream.read(2**20)
            whole = data[: data.rfind(b"\n") + 1]
            offset += len(whole)
            for one in whole.splitlines():
                try:
                    lines.append(json.loads(one))
                except ValueError:
                    continue
        return {"directory": str(self.directory), "lines": lines, "next": offset}


class Watch:
    """Looks in a thread of its own until `stop`."""

    def __init__(self, directory: Path, registry: Registry) -> None:
        self._directory, self._registry = directory, registry
        self._seen: dict[str, float] = {}  # name -> when its file was written
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="kt-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._ended.is_set():
            try:
                self.look()
            except OSError as error:  # a directory that is being deleted
                LOG.warning("watching %s: %s", self._directory, error)
            self._ended.wait(LOOK)

    def look(self) -> None:
        found = self._complete()
        for name, (directory, written) in found.items():
            if self._seen.get(name) == written:
                continue
            self._seen[name] = written
            try:
                self._registry.load(name, directory, replacing=True)
                LOG.info("serving %s as %s:%s", directory, self._registry.served, name)
            except (KTError, OSError) as error:
                LOG.warning("%s is not served: %s", directory, error)
        for name in set(self._seen) - set(found):
            del self._seen[name]
            try:
                self._registry.unload(name)
            except UnknownModel:
                continue

    def _complete(self) -> dict[str, tuple[Path, float]]:
        found: dict[str, tuple[Path, float]] = {}
        if not self._directory.is_dir():
            return found
        for directory in self._directory.iterdir():
            state = directory / "trainer_state.json"
            if CHECKPOINT.fullmatch(directory.name) and state.is_file() and _adapter(directory):
                found[directory.name] = (directory, state.stat().st_mtime)
        manifest = self._directory / MANIFEST
        if manifest.is_file() and _adapter(self._directory):
            found[FINAL] = (self._directory, manifest.stat().st_mtime)
        return found


def _adapter(directory: Path) -> bool:
    return (directory / "adapter_config.json").is_file() and (directory / "adapter_model.safetensors").is_file()
