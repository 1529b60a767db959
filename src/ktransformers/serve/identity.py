"""What identifies a model's files and what computes with them: for keys and values on disk, and for nodes that share a
model's experts.

Weights are not read for a key of the disk: a file counts by its name, size and header, and by its content hash where
the hub's cache names it so; otherwise by its modification time. A copy of a model with other times is thus another
model, and its cache starts empty: that costs a prefill, while the opposite would cost right answers. Modification times
differ between machines; there sixteen samples of the content count, because two fine-tunings of one model have equal
headers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers

import ktransformers
from ktransformers.experts.partition import ExpertPartition
from ktransformers.experts.store import LAYOUT_VERSION
from ktransformers.quant.origin import fingerprint

SAMPLES, SAMPLE_BYTES = 16, 4096
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


def node_facts(
    paths: Iterable[Path], partition: ExpertPartition, rank: int, expert_format: str | None = None
) -> dict[str, str]:
    """What has to be the same on all nodes, as short texts that a refusal can name. `expert_format`: that experts are
    quantized to on load; None: that of the files."""
    return {
        "rank": str(rank),
        "nodes": str(partition.ranks),
        "ktransformers": ktransformers.__version__,
        "transformers": transformers.__version__,
        "layout of packed experts": str(LAYOUT_VERSION),
        "model files": _hash_files(paths),
        "format of the experts": expert_format or "that of the files",
        "partition of the experts": hashlib.sha256(json.dumps(partition.owners).encode()).hexdigest()[:12],
    }


def _hash_files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        for file in weight_files(path):
            part = fingerprint(file)
            name = file.name if path.is_file() else str(file.relative_to(path))
            digest.update(json.dumps([name, part.bytes, part.header_sha256]).encode())
            digest.update(_samples(file, part.bytes))
    return digest.hexdigest()[:12]


def _samples(file: Path, size: int) -> bytes:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for sample in range(SAMPLES):
            stream.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.digest()
