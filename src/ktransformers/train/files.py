"""The files of an output directory, there whole or not at all; a full disk is said plainly."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ktransformers import files
from ktransformers.errors import KTError

STAGING_DIR = ".kt_saving"  # in the output directory; what is in it was never finished


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
    files.sync(target)
    shutil.rmtree(source)
