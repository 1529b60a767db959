"""kt_manifest.json: every tensor beside it with shape, dtype, norm and sha256.

What lies in the directory is compared with it whenever an adapter is read, so a tensor that was dropped, changed, or
swapped with another of the same shape is found, by name. A directory without a manifest is read too; then only what the
names and shapes tell can be checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ktransformers.adapters.content import SAFETENSORS_DTYPES, Content
from ktransformers.adapters.write import WrittenTensor, record_tensor
from ktransformers.errors import InputError
from ktransformers.files import write_text

MANIFEST_FILE = "kt_manifest.json"
MANIFEST_FORMAT = "ktransformers-tensors"
MANIFEST_VERSION = 1
STALE_REMEDY = "restore the file, or delete kt_manifest.json if the change was meant"


def write_manifest(directory: Path, records: Iterable[WrittenTensor], **about: Any) -> None:
    """`about` says what the tensors are: dialect, counts, the model."""
    lines = [
        f"{json.dumps(one.name)}: "
        + json.dumps({"file": one.file, "shape": one.shape, "dtype": one.dtype, "norm": one.norm, "sha256": one.sha256})
        for one in sorted(records, key=lambda one: one.name)
    ]
    head = json.dumps({"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION, **about}, ensure_ascii=False)
    # a line for each tensor: an adapter has up to 60,000, and people look for one of them
    write_text(directory / MANIFEST_FILE, head[:-1] + ', "tensors": {\n' + ",\n".join(lines) + "\n}}\n")


def write_manifest_of(content: Content, **about: Any) -> None:
    """A manifest for tensors that lie there already, such as what PEFT has saved."""
    records = [record_tensor(name, stored.file, stored.read()) for name, stored in content.tensors.items()]
    write_manifest(content.directory, records, **about)


def read_manifest(directory: Path) -> dict[str, Any] | None:
    file = directory / MANIFEST_FILE
    if not file.is_file():
        return None
    try:
        document: dict[str, Any] = json.loads(file.read_text())
        if document["format"] != MANIFEST_FORMAT or document["version"] != MANIFEST_VERSION:
            raise InputError(
                str(file),
                f"{document['format']} version {document['version']}",
                f"{MANIFEST_FORMAT} version {MANIFEST_VERSION}",
            )
        dict(document["tensors"])
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            str(file), f"a manifest that does not parse ({error!r})", "what was written", STALE_REMEDY
        ) from error
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
        found = (list(stored.shape), SAFETENSORS_DTYPES[stored.dtype])
        if found != (expected["shape"], expected["dtype"]):
            raise InputError(
                name,
                f"{found[1]} {found[0]}",
                f"{expected['dtype']} {expected['shape']}, as {MANIFEST_FILE} says",
                STALE_REMEDY,
            )
        now = record_tensor(name, stored.file, stored.read())
        if now.sha256 != expected["sha256"]:
            raise InputError(
                name,
                f"other numbers (norm {now.norm:.6g})",
                f"those of {MANIFEST_FILE} (norm {expected['norm']:.6g})",
                STALE_REMEDY,
            )
    return len(tensors)
