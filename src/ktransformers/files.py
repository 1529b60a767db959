"""Small files that are there whole or not at all: written under another name, synced, renamed, and the rename synced.

What is large (shards, adapters, whole directories) is written by those who know it, who sync with `sync` too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """A file, or a directory's entries, onto the disk."""
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
