"""Has a stage to run? What it read, by hash, and whether it came to its end: one small file for each stage.

A fingerprint covers the stage's words, the version of ktransformers and the content of all its inputs, never times of
files: a stage whose inputs were made anew with the same content stays done. Hashes are remembered by size and time, so
that a checkpoint is read once. A file beyond LARGE is not read whole: its size, its first and its last megabyte and its
time of change stand for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ktransformers
from ktransformers.files import write_json

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
    port: int | None = None  # of the server, where it spoke to one
    ended: str = ""


class Hashes:
    """Content hashes, remembered in a file of the run."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, list[Any]] = json.loads(file.read_text()) if file.is_file() else {}

    def of(self, path: Path) -> str:
        """Of a file, or of a folder's files (not those that begin with a dot); empty where there is nothing."""
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
        key, now = str(file.resolve()), [state.st_size, state.st_mtime_ns]
        known = self._known.get(key)
        if known is not None and known[:2] == now:
            return str(known[2])
        with file.open("rb") as stream:
            if state.st_size <= MAX_HASHED_BYTES:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            else:
                digest = hashlib.sha256(f"{now} ".encode() + stream.read(EDGE_BYTES))
                stream.seek(-EDGE_BYTES, 2)
                digest.update(stream.read())
                found = digest.hexdigest()
        self._known[key] = [*now, found]
        return found

    def save(self) -> None:
        write_json(self._file, self._known)


def fingerprint(words: Iterable[str], inputs: dict[str, str]) -> str:
    text = json.dumps([ktransformers.__version__, list(words), sorted(inputs.items())])
    return hashlib.sha256(text.encode()).hexdigest()


def read_record(folder: Path, stage: str) -> StageRecord | None:
    file = folder / f"{stage}.json"
    if not file.is_file():
        return None
    try:
        return StageRecord(**json.loads(file.read_text()))
    except (ValueError, TypeError):
        return None  # of another version: the stage runs again


def write_record(folder: Path, record: StageRecord) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{record.stage}.json", asdict(record))
