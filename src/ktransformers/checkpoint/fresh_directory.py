"""Directories that appear complete or not at all: written under another name next to the target, then renamed."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import sync


def check_target(target: Path, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise InputError(str(target), "a file", "a directory to write, which need not exist")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise InputError(str(target), "a directory that is not empty", "a new one", "--overwrite replaces it")


def check_disjoint(paths: Sequence[Path]) -> None:
    """No output inside an input, around it, or inside another output: --overwrite removes whole directories."""
    for i, path in enumerate(paths):
        for other_path in paths[i + 1 :]:
            a, b = path.resolve(), other_path.resolve()
            if a == b or a in b.parents or b in a.parents:
                raise InputError(
                    str(other_path), f"this path and {path}, one of which contains the other", "separate directories"
                )


@contextlib.contextmanager
def fresh_directory(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary directory next to `target` that replaces it if the block succeeds and is removed otherwise."""
    check_target(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
    temporary.mkdir()
    try:
        yield temporary
        replace_directory(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _remove_leftovers(target: Path) -> None:
    """Removes temporary directories of runs that were killed; those of live processes stay."""
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        pid = leftover.name.split(".")[-2]
        if pid.isdigit() and (int(pid) == os.getpid() or not Path(f"/proc/{pid}").exists()):
            shutil.rmtree(leftover, ignore_errors=True)


def replace_directory(temporary: Path, target: Path) -> None:
    """Rename the directory to `target`, whose directory it replaces, with its files on disk."""
    for entry in temporary.iterdir():
        if entry.is_file() and not entry.is_symlink():
            sync(entry)
    sync(temporary)
    if target.exists():
        old = target.with_name(f".{target.name}.{os.getpid()}.old")
        target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old)
    else:
        temporary.rename(target)
    sync(target.parent)
