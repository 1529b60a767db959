"""Writes files of the output directory atomically, and reports a full disk without a traceback."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ktransformers import files
from ktransformers.errors import KTError

STAGING_DIR = ".kt_saving"  # in the output directory; its contents are incomplete


def sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        files.sync(path)


def write_text(path: Path, text: str) -> None:
    with reporting_full_disk(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text)


def write_json(path: Path, value: Any) -> None:
    with reporting_full_disk(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, value)


@contextmanager
def reporting_full_disk(folder: Path) -> Iterator[None]:
    """Turns a full disk or an exceeded quota into a KTError with what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise KTError(
            f"{folder}: no space left; earlier checkpoints are complete, resume with resume_from_checkpoint=true"
        ) from error


def move_files(source: Path, target: Path) -> None:
    """Moves every file of `source` to `target`, each by one rename."""
    sync_tree(source)
    for path in sorted(source.rglob("*")):
        if path.is_file():
            destination = target / path.relative_to(source)
            destination.parent.mkdir(parents=True, exist_ok=True)
            path.replace(destination)
    files.sync(target)
    shutil.rmtree(source)
