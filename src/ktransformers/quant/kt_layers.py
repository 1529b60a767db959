"""Writers of one layer's experts in kt-kernel's layout: a safetensors shard, or a folder of `.kt` files.

Parts of matrices arrive from several threads in any order. A shard is laid out before the first one, scales in front of
codes, because they need their alignment; each part then is written to its offset. A folder has two files for each part
and is written under another name; SHA-256 of a file is computed from memory. Neither has its final name before
`finish`, which also syncs it to disk.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ktransformers.checkpoint.journal import ConversionJournal
from ktransformers.checkpoint.kt_codes import tile_format
from ktransformers.checkpoint.kt_files import ROLES, KTHeader, KTManifestFile, StoredPart, stored_parts
from ktransformers.checkpoint.packed import ShardRecord, content_hash, find_damaged
from ktransformers.checkpoint.tensorfile import TensorFile, byte_view, plan_layout, read_layout, sha256
from ktransformers.files import sync


class LayerWriter(Protocol):
    def write(self, part: StoredPart, codes: Tensor, scales: Tensor) -> None:
        """Codes in tiles, uint8, and scales, float32, of a part; called by several threads."""
        ...

    def finish(self) -> tuple[ShardRecord, dict[str, Any]]:
        """Give the layer its final name, on disk; returns what the journal records of it."""
        ...

    def close(self) -> None:
        """Release the files of an unfinished layer."""
        ...


def layer_sizes(header: KTHeader) -> dict[str, tuple[int, int]]:
    """Rows and columns of gate, up and down."""
    inner = (header.intermediate, header.hidden)
    return dict(zip(ROLES, (inner, inner, inner[::-1]), strict=True))


def layer_bytes(header: KTHeader, backward: bool) -> int:
    """Of codes and scales of a layer."""
    form = tile_format(header.bits)
    one = stored_parts(1, layer_sizes(header), header.parts, backward)
    return header.experts * sum(form.bytes(part.rows, part.columns) + 4 * part.rows for part in one)


class MergedLayer:
    def __init__(self, directory: Path, file: str, layer: int, header: KTHeader, backward: bool) -> None:
        form = tile_format(header.bits)
        parts = list(stored_parts(header.experts, layer_sizes(header), header.parts, backward))
        entries = [(part.tensor(layer, "scale"), "F32", (part.rows,)) for part in parts]
        entries += [(part.tensor(layer, "weight"), "I8", (form.bytes(part.rows, part.columns),)) for part in parts]
        self._layer = layer
        self._file = TensorFile(directory / file, plan_layout(entries, header.metadata()))

    def write(self, part: StoredPart, codes: Tensor, scales: Tensor) -> None:
        self._file.write(part.tensor(self._layer, "weight"), codes)
        self._file.write(part.tensor(self._layer, "scale"), scales)

    def finish(self) -> tuple[ShardRecord, dict[str, Any]]:
        self._file.finish()
        return shard_record(self._file.path), {}

    def close(self) -> None:
        self._file.close()


def shard_record(file: Path) -> ShardRecord:
    header = read_layout(file).header
    return ShardRecord(
        bytes=file.stat().st_size, header_sha256=hashlib.sha256(header).hexdigest(), sha256=sha256(file)
    )


class TreeLayer:
    def __init__(self, directory: Path, layer: int, header: KTHeader) -> None:
        self._form = tile_format(header.bits)
        self._target = directory / f"_layer_{layer}"
        self._draft = directory / f"._layer_{layer}.partial"
        self._entries: list[KTManifestFile] = []
        self._lock = threading.Lock()
        for part in range(header.parts):
            (self._draft / f"_numa_{part}").mkdir(parents=True)

    def write(self, part: StoredPart, codes: Tensor, scales: Tensor) -> None:
        for kind, tensor in (("quant", codes), ("scale", scales)):
            name = part.file(self._form, kind)
            data = byte_view(tensor)
            (self._draft / name).write_bytes(data)
            entry = KTManifestFile(
                path=f"{self._target.name}/{name}", size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
            )
            with self._lock:
                self._entries.append(entry)

    def finish(self) -> tuple[ShardRecord, dict[str, Any]]:
        for folder, _, names in os.walk(self._draft):
            for name in names:
                sync(Path(folder) / name)
            sync(Path(folder))
        if self._target.exists():  # complete, but not recorded before a kill
            shutil.rmtree(self._target)
        self._draft.rename(self._target)
        sync(self._target.parent)
        files = [entry.model_dump() for entry in sorted(self._entries, key=lambda entry: entry.path)]
        digest = content_hash({"files": files})
        size = sum(entry.size_bytes for entry in self._entries)
        return ShardRecord(bytes=size, header_sha256=digest, sha256=digest), {"files": files}

    def close(self) -> None:
        """Nothing is held open."""


def drop_damaged_layers(journal: ConversionJournal, threads: int) -> list[str]:
    """Forget what is recorded and is missing or changed, shards as well as folders of files; returns their names."""
    shards = {name: record for name, record in journal.shards.items() if not journal.details[name].get("files")}
    damaged = find_damaged(journal.directory, shards, threads)
    for name in journal.shards.keys() - shards.keys():
        files = [KTManifestFile.model_validate(entry) for entry in journal.details[name]["files"]]
        records = {
            file.path: ShardRecord(bytes=file.size_bytes, header_sha256="", sha256=file.sha256) for file in files
        }
        if find_damaged(journal.directory, records, threads):
            damaged.append(name)
    journal.forget(damaged)
    return damaged
