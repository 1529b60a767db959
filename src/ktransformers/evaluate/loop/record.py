"""Records whether a stage is up to date: hashes of its inputs and its completion, one small file per stage.

A fingerprint covers the stage's arguments, the version of ktransformers and the content of all inputs, never file
times: a stage whose inputs were rebuilt with the same content stays done. Hashes are cached by size and modification
time, so a checkpoint is read once. A file above MAX_HASHED_BYTES is represented by its size, its first and last
megabyte and its modification time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ktransformers
from ktransformers.ground.files import write_json

MAX_HASHED_BYTES = 2**30
EDGE_BYTES = 2**20
BEGUN, DONE = "begun", "done"


@dataclass(frozen=True)
class StageRecord:
    stage: str
    status: str
    words: list[str]
    inputs: dict[str, str]  # path -> hash
    fingerprint: str
    seconds: float = 0.0
    port: int | None = None  # of the server that it used
    ended: str = ""


class Hashes:
    """Content hashes, cached in a file of the run."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, list[Any]] = json.loads(file.read_text()) if file.is_file() else {}

    def of(self, path: Path) -> str:
        """Hash of a file, or of a folder's files except hidden ones; empty if the path does not exist."""
        if path.is_file():
            return self._file_hash(path)
        if not path.is_dir():
            return ""
        digest = hashlib.sha256()
        for file in sorted(path.rglob("*")):
            inside = file.relative_to(path)
            if file.is_file() and not any(part.startswith(".") for part in inside.parts):
                digest.update(f"{inside} {self._file_hash(file)}\n".encode())
        return digest.hexdigest()

    def _file_hash(self, file: Path) -> str:
        state = file.stat()
        key, size_and_time = str(file.resolve()), [state.st_size, state.st_mtime_ns]
        cached = self._known.get(key)
        if cached is not None and cached[:2] == size_and_time:
            return str(cached[2])
        with file.open("rb") as stream:
            if state.st_size <= MAX_HASHED_BYTES:
                file_hash = hashlib.file_digest(stream, "sha256").hexdigest()
            else:
                digest = hashlib.sha256(f"{size_and_time} ".encode() + stream.read(EDGE_BYTES))
                stream.seek(-EDGE_BYTES, 2)
                digest.update(stream.read())
                file_hash = digest.hexdigest()
        self._known[key] = [*size_and_time, file_hash]
        return file_hash

    def save(self) -> None:
        write_json(self._file, self._known)


def fingerprint(arguments: Iterable[str], inputs: dict[str, str]) -> str:
    text = json.dumps([ktransformers.__version__, list(arguments), sorted(inputs.items())])
    return hashlib.sha256(text.encode()).hexdigest()


def read_record(folder: Path, stage: str) -> StageRecord | None:
    file = folder / f"{stage}.json"
    if not file.is_file():
        return None
    try:
        return StageRecord(**json.loads(file.read_text()))
    except (ValueError, TypeError):
        return None  # written by another version: the stage runs again


def write_record(folder: Path, record: StageRecord) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{record.stage}.json", asdict(record))
