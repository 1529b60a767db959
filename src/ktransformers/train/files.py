"""Files that are there whole or not at all: written under another name, synced, renamed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ktransformers.errors import KTError

STAGING = ".kt_saving"  # in the output directory; what is in it was never finished


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def write_text(path: Path, text: str) -> None:
    with saved(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text, encoding="utf-8")
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def saved(folder: Path) -> Iterator[None]:
    """A full disk is the user's to solve: said plainly, without a traceback."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise KTError(
            f"{folder}: no space left; what was saved before is whole, resume_from_checkpoint=true goes on from there"
        ) from error


def move_files(source: Path, target: Path) -> None:
    """Every file of `source` over to `target`, each by one rename."""
    sync_tree(source)
    for path in sorted(source.rglob("*")):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
    _sync(target)
    shutil.rmtree(source)
