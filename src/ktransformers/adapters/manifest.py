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

from ktransformers.adapters.content import SPELLED, Content
from ktransformers.adapters.write import WrittenTensor, record
from ktransformers.errors import InputError
from ktransformers.files import write_text

FILE = "kt_manifest.json"
FORMAT = "ktransformers-tensors"
VERSION = 1
STALE = "restore the file, or delete kt_manifest.json if the change was meant"


def write_manifest(directory: Path, records: Iterable[WrittenTensor], **about: Any) -> None:
    """`about` says what the tensors are: dialect, counts, the model."""
    lines = [
        f"{json.dumps(one.name)}: "
        + json.dumps({"file": one.file, "shape": one.shape, "dtype": one.dtype, "norm": one.norm, "sha256": one.sha256})
        for one in sorted(records, key=lambda one: one.name)
    ]
    head = json.dumps({"format": FORMAT, "version": VERSION, **about}, ensure_ascii=False)
    # a line for each tensor: an adapter has up to 60,000, and people look for one of them
    write_text(directory / FILE, head[:-1] + ', "tensors": {\n' + ",\n".join(lines) + "\n}}\n")


def describe(content: Content, **about: Any) -> None:
    """A manifest for tensors that lie there already, such as what PEFT has saved."""
    records = [record(name, stored.file, stored.read()) for name, stored in content.tensors.items()]
    write_manifest(content.directory, records, **about)


def read_manifest(directory: Path) -> dict[str, Any] | None:
    file = directory / FILE
    if not file.is_file():
        return None
    try:
        document: dict[str, Any] = json.loads(file.read_text())
        if document["format"] != FORMAT or document["version"] != VERSION:
            raise InputError(
                str(file), f"{document['format']} version {document['version']}", f"{FORMAT} version {VERSION}"
            )
        dict(document["tensors"])
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(str(file), f"a manifest that does not parse ({error!r})", "what was written", STALE) from error
    return document


def check_manifest(content: Content, document: dict[str, Any]) -> int:
    """Every tensor against the manifest, numbers included; returns how many there are."""
    tensors = document["tensors"]
    missing = sorted(set(tensors) - set(content.tensors))
    if missing:
        raise InputError(missing[0], f"no such tensor ({len(missing)} missing in all)", f"what {FILE} lists", STALE)
    extra = sorted(set(content.tensors) - set(tensors))
    if extra:
        raise InputError(extra[0], f"a tensor that {FILE} does not list ({len(extra)} in all)", "none", STALE)
    for name, stored in content.tensors.items():
        expected = tensors[name]
        found = (list(stored.shape), SPELLED[stored.dtype])
        if found != (expected["shape"], expected["dtype"]):
            raise InputError(
                name, f"{found[1]} {found[0]}", f"{expected['dtype']} {expected['shape']}, as {FILE} says", STALE
            )
        now = record(name, stored.file, stored.read())
        if now.sha256 != expected["sha256"]:
            raise InputError(
                name,
                f"other numbers (norm {now.norm:.6g})",
                f"those of {FILE} (norm {expected['norm']:.6g})",
                STALE,
            )
    return len(tensors)
