"""What has to be the same on all hosts, as short texts that a refusal can name: versions, the model's files, the
partition.

A file of weights counts by its name, size and header, and by sixteen samples of its content: two fine-tunings of one
model have equal headers. Modification times differ between machines and do not count."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import transformers

import ktransformers
from ktransformers.experts.partition import ExpertPartition
from ktransformers.experts.store import LAYOUT_VERSION
from ktransformers.quant.origin import fingerprint
from ktransformers.serve.cache_identity import weight_files

SAMPLES, SAMPLE_BYTES = 16, 4096


def host_facts(
    paths: Iterable[Path], partition: ExpertPartition, rank: int, expert_format: str | None = None
) -> dict[str, str]:
    """`expert_format`: that experts are encoded in on load; None: that of the files."""
    return {
        "rank": str(rank),
        "hosts": str(partition.ranks),
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
