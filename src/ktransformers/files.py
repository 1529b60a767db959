"""Atomic writes of small files: written under a temporary name, synced, renamed, and the directory synced.

Large outputs (shards, adapters, directories) are written by their own modules, which use `sync` too.
"""

from __future__ import annotations

import json
import os
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
