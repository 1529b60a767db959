"""Writes files of the output directory atomically, and reports a full disk without a traceback."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ktransformers.ground import files
from ktransformers.ground.errors import KTError

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


RUST_ERRORS = ("SafetensorError", "Exception")  # of safetensors and of tokenizers
OS_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)")  # in their messages
TORCH_WRITERS = ("PytorchStreamWriter", "inline_container")  # in messages of torch.save, which tell no reason
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
WRITE_ERRORS = (*FULL_DISK, errno.EFBIG, errno.EIO, errno.EROFS)


def _write_error(error: Exception) -> str | None:
    """Why a file could not be written, None if the error is another one."""
    number = error.errno if isinstance(error, OSError) else None
    if type(error).__name__ in RUST_ERRORS and (match := OS_ERROR_NUMBER.search(str(error))):
        number = int(match[1])
    if number in FULL_DISK:
        return "no space left"
    if number in WRITE_ERRORS:
        return f"a file could not be written ({os.strerror(number)})"
    if isinstance(error, RuntimeError) and any(writer in str(error) for writer in TORCH_WRITERS):
        return "a file could not be written completely; is the disk full?"
    return None


@contextmanager
def reporting_full_disk(folder: Path) -> Iterator[None]:
    """Turns a full disk, an exceeded quota or another failed write into a KTError with what to do. safetensors,
    tokenizers and torch.save raise exceptions of their own for them."""
    try:
        yield
    except Exception as error:
        reason = _write_error(error)
        if reason is None:
            raise
        raise KTError(
            f"{folder}: {reason}; earlier checkpoints are complete, resume with resume_from_checkpoint=true"
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
