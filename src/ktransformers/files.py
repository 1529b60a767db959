"""Atomic writes of small files (written under a temporary name, synced, renamed, and the directory synced), and locks
that exclude a second process from a directory.

Large outputs (shards, adapters, directories) are written by their own modules, which use `sync` too. The system
releases a lock when its process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Flushes a file, or a directory's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def write_json(path: Path, value: Any, indent: int = 2) -> None:
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def try_lock(handle: int) -> bool:
    """Locks an open file for this process without waiting; False if another process holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class LockedError(Exception):
    """Another process holds the lock; `holder` is what it wrote of itself."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


@contextmanager
def exclusive_lock(path: Path) -> Iterator[int]:
    """Creates and locks the file `path`, yields its descriptor and removes the file; raises LockedError.

    The file is removed while it is locked, so a process that opened it before may lock a file that has no name any
    more; such a process opens the path again.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not try_lock(handle):
                raise LockedError(os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process")
            if _names(path, handle):
                break
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield handle
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _names(path: Path, handle: int) -> bool:
    """Whether `path` is the name of the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
