"""kt_manifest.json: every tensor of the directory with shape, dtype, norm and SHA-256.

Reading an adapter compares its files with the manifest, so a tensor that was dropped, changed, or exchanged with
another of the same shape is reported by name. A directory without a manifest can be read too; then only names and
shapes are checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ktransformers.adapters.content import Content
from ktransformers.adapters.write import WrittenTensor, record_tensor
from ktransformers.checkpoint.matrix import SPELLED
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import read_json_object, short, validate, write_text

MANIFEST_FILE = "kt_manifest.json"
MANIFEST_FORMAT = "ktransformers-tensors"
MANIFEST_VERSION = 1
STALE_REMEDY = "restore the file, or delete kt_manifest.json if the change was meant"


class _StoredRecord(BaseModel):
    """A tensor in the file; a manifest of `kt train` says more about it."""

    model_config = ConfigDict(strict=True)

    file: str
    shape: list[int]
    dtype: str
    norm: float
    sha256: str


class _StoredManifest(BaseModel):
    """What is read of a manifest; everything else is for people and for later versions."""

    model_config = ConfigDict(protected_namespaces=())

    tensors: dict[str, _StoredRecord]
    roots: list[str] = []
    model: dict[str, Any] | None = None
    experts: dict[str, Any] | None = None
    lora_dropout: Annotated[float, Field(ge=0, le=1)] = 0.0


def write_manifest(directory: Path, records: Iterable[WrittenTensor], **fields: Any) -> None:
    """`fields` describe the tensors: format, counts, the model."""
    lines = [
        f"{json.dumps(tensor.name)}: "
        + json.dumps({key: value for key, value in asdict(tensor).items() if key != "name"})
        for tensor in sorted(records, key=lambda tensor: tensor.name)
    ]
    head = json.dumps({"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION, **fields}, ensure_ascii=False)
    # one line per tensor: an adapter has up to 60,000, and a line is easy to search
    write_text(directory / MANIFEST_FILE, head[:-1] + ', "tensors": {\n' + ",\n".join(lines) + "\n}}\n")


def write_manifest_of(content: Content, **fields: Any) -> None:
    """Writes a manifest for existing files, such as what PEFT saved."""
    records = [record_tensor(name, stored.file, stored.read()) for name, stored in content.tensors.items()]
    write_manifest(content.directory, records, **fields)


def read_manifest(directory: Path) -> dict[str, Any] | None:
    file = directory / MANIFEST_FILE
    if not file.is_file():
        return None
    document = read_json_object(file, "the manifest of an adapter", remedy=STALE_REMEDY)
    if document.get("format") != MANIFEST_FORMAT or document.get("version") != MANIFEST_VERSION:
        raise InputError(
            str(file),
            f"{short(document.get('format'))} version {short(document.get('version'))}",
            f"{MANIFEST_FORMAT} version {MANIFEST_VERSION}",
        )
    validate(_StoredManifest, document, str(file), STALE_REMEDY)
    return document


def check_manifest(content: Content, document: dict[str, Any]) -> int:
    """Every tensor against the manifest, numbers included; returns how many there are."""
    tensors = document["tensors"]
    missing = sorted(set(tensors) - set(content.tensors))
    if missing:
        raise InputError(
            missing[0], f"no such tensor ({len(missing)} missing in all)", f"what {MANIFEST_FILE} lists", STALE_REMEDY
        )
    extra = sorted(set(content.tensors) - set(tensors))
    if extra:
        raise InputError(
            extra[0], f"a tensor that {MANIFEST_FILE} does not list ({len(extra)} in all)", "none", STALE_REMEDY
        )
    for name, stored in content.tensors.items():
        expected = tensors[name]
        stored_form = (list(stored.shape), SPELLED[stored.dtype])
        if stored_form != (expected["shape"], expected["dtype"]):
            raise InputError(
                name,
                f"{stored_form[1]} {stored_form[0]}",
                f"{expected['dtype']} {expected['shape']}, as {MANIFEST_FILE} says",
                STALE_REMEDY,
            )
        actual = record_tensor(name, stored.file, stored.read())
        if actual.sha256 != expected["sha256"]:
            raise InputError(
                name,
                f"other numbers (norm {actual.norm:.6g})",
                f"those of {MANIFEST_FILE} (norm {expected['norm']:.6g})",
                STALE_REMEDY,
            )
    return len(tensors)
