"""What keys and values on disk depend on besides tokens and adapter: the weights, and what computes with them.

Weights are not read for this. A file counts by its name, size and header, and by its content hash where the hub's cache
names it so; otherwise by its modification time. A copy of a model with other times is thus another model, and its cache
starts empty: that costs a prefill, while the opposite would cost right answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers

import ktransformers
from ktransformers.quant.origin import fingerprint

# Beginnings of names of files that no key depends on.
TEXT_FILES = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template", "generation_config")
DOCUMENTS = {".md", ".txt", ".jinja", ".png", ".html", ".log"}


def model_identity(paths: Iterable[Path], options: Mapping[str, Any]) -> bytes:
    """A hash of the files of a model, and of its experts if they lie elsewhere; `options` change what is computed."""
    digest = hashlib.blake2b(digest_size=20)
    versions = [ktransformers.__version__, transformers.__version__]
    digest.update(json.dumps([versions, dict(sorted(options.items()))], default=str).encode())
    for path in paths:
        for file in weight_files(path):
            part = fingerprint(file)
            changed = part.sha256 or file.stat().st_mtime_ns
            name = file.name if path.is_file() else str(file.relative_to(path))
            digest.update(json.dumps([name, part.bytes, part.header_sha256, changed]).encode())
    return digest.digest()


def weight_files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.is_file() and not hidden and file.suffix not in DOCUMENTS and not file.name.startswith(TEXT_FILES):
            yield file
