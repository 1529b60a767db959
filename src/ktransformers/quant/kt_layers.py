"""One layer's experts quantised and written in kt-kernel's layout: a safetensors shard, or a folder of `.kt` files.

Parts of matrices arrive from several threads in any order. A shard is laid out before the first one, scales in front of
quantized values, because they need their alignment; each part then is written to its offset. A folder has two files for
each part and is written under another name; SHA-256 of a file is computed from memory. Neither has its final name
before `finish`, which also syncs it to disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ktransformers.checkpoint.encoded import Encoded
from ktransformers.checkpoint.journal import ConversionJournal
from ktransformers.checkpoint.kt_codes import check_size, kept_codes, part_of, quantize_rows, tile, tile_format
from ktransformers.checkpoint.kt_files import (
    ROLES,
    KTHeader,
    KTManifestFile,
    StoredPart,
    bias_name,
    build_manifest,
    read_kt_manifest,
    stored_parts,
    write_manifest,
)
from ktransformers.checkpoint.packed import ShardRecord, content_hash, find_damaged
from ktransformers.checkpoint.recode import Weight
from ktransformers.checkpoint.sources.safetensors import dequantise
from ktransformers.checkpoint.tensorfile import TensorFile, byte_view, plan_layout
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import sync
from ktransformers.quant.conversion_run import shard_record

Write = Callable[[StoredPart, Tensor, Tensor], None]


class LayerWriter(Protocol):
    def write(self, part: StoredPart, qweight: Tensor, scales: Tensor) -> None:
        """Codes in tiles, uint8, and scales, float32, of a part; called by several threads."""
        ...

    def finish(self) -> tuple[ShardRecord, dict[str, Any]]:
        """Give the layer its final name, on disk; returns what the journal records of it."""
        ...

    def close(self) -> None:
        """Release the files of an unfinished layer."""
        ...


def layer_bytes(header: KTHeader, backward: bool, biased: bool = False) -> int:
    """Bytes of values, scales and biases of a layer."""
    form = tile_format(header.bits)
    one = stored_parts(1, header.sizes(), header.parts, backward)
    biases = 4 * sum(rows for rows, _ in header.sizes().values()) if biased else 0
    return header.experts * (biases + sum(form.bytes(part.rows, part.columns) + 4 * part.rows for part in one))


def store_matrix(
    weight: Weight, role: str, expert: int, header: KTHeader, write: Write, backward: bool = False, name: str = ""
) -> None:
    """Quantise one expert's gate, up or down `[1, N, K]` and write its NUMA parts, with `backward` also the transposed
    ones, which are quantised from the same numbers by their own rows."""
    columns_in = header.parts if role == "down" else 1
    kept = kept_codes(weight, header.bits, columns_in) if isinstance(weight, Encoded) else None
    numbers = None
    if kept is None or backward:  # kt-kernel quantises bf16
        numbers = dequantise(weight) if isinstance(weight, Encoded) else weight[0].bfloat16()
    try:
        qweight, scales = kept or _quantized_parts(numbers, header.bits, columns_in)
        for part in range(header.parts):
            piece = part_of(qweight, role, part, header.parts)
            rows = scales[part * len(piece) : (part + 1) * len(piece), 0] if role != "down" else scales[:, part]
            stored = StoredPart(role, False, expert, part, *piece.shape)
            write(stored, tile(piece, header.bits), rows.contiguous())
            if backward and numbers is not None:
                transposed, rows = quantize_rows(part_of(numbers, role, part, header.parts).T, header.bits)
                back = replace(stored, backward=True, rows=stored.columns, columns=stored.rows)
                write(back, tile(transposed, header.bits), rows)
    except InputError as error:
        raise InputError(name or role, str(error), f"what {tile_format(header.bits).method} can hold") from error


def _quantized_parts(numbers: Tensor | None, bits: int, parts: int) -> tuple[Tensor, Tensor]:
    """Codes `[N, K]` and scales `[N, parts]` of equal parts of the columns."""
    assert numbers is not None
    pieces = [quantize_rows(piece, bits) for piece in numbers.chunk(parts, dim=1)]
    return torch.cat([qweight for qweight, _ in pieces], 1), torch.stack([scale for _, scale in pieces], 1)


def write_tree_layer(
    directory: Path, layer: int, experts: Mapping[str, Tensor], bits: int, parts: int, *, backward: bool = False
) -> list[KTManifestFile]:
    """Quantise gate and up `[E, I, H]` and down `[E, H, I]` into `directory/_layer_N`, which is replaced; returns its
    files. The tree is complete when `build_manifest` and `write_manifest` have written what all layers returned."""
    count, intermediate, hidden = experts["gate"].shape
    header = KTHeader(bits, parts, count, hidden, intermediate, conversion="", made_by="")
    for role, (rows, columns) in header.sizes().items():
        if tuple(experts[role].shape) != (count, rows, columns):
            raise InputError(role, f"shape {list(experts[role].shape)}", str([count, rows, columns]))
        check_size(f"layer {layer}", role, rows, columns, bits, parts)
    writer = TreeLayer(directory, layer, header)
    for expert in range(count):
        for role in ROLES:
            store_matrix(experts[role][expert : expert + 1], role, expert, header, writer.write, backward)
    _, details = writer.finish()
    return [KTManifestFile.model_validate(entry) for entry in details["files"]]


def add_tree_layer(root: Path, layer: int, experts: Mapping[str, Tensor], bits: int, parts: int) -> None:
    """Write a layer as `write_tree_layer` does, and list it in the tree's manifest, which a new tree gets. A tree of
    kt-kernel has none, and stays without."""
    root.mkdir(parents=True, exist_ok=True)
    manifest = read_kt_manifest(root)
    layers = {entry.index: entry.files for entry in manifest.layers} if manifest is not None else {}
    unlisted = manifest is None and any(entry.name != f"_layer_{layer}" for entry in root.glob("_layer_*"))
    count, intermediate, hidden = experts["gate"].shape
    header = KTHeader(bits, parts, count, hidden, intermediate, conversion="", made_by="")
    changed = build_manifest(header, {})
    for key in ("expert_weight_format", "threadpool_count", "expert_num", "hidden_size", "intermediate_size"):
        if manifest is not None and getattr(manifest, key) != getattr(changed, key):
            given = f"{getattr(changed, key)}, and {getattr(manifest, key)} in the layers that are there"
            raise InputError(f"{root}: {key}", given, "one tree of one model", "write into an empty directory")
    layers[layer] = write_tree_layer(root, layer, experts, bits, parts)
    if not unlisted:
        write_manifest(root, build_manifest(header, layers))


class MergedLayer:
    def __init__(
        self, directory: Path, file: str, layer: int, header: KTHeader, backward: bool, biased: bool = False
    ) -> None:
        form = tile_format(header.bits)
        parts = list(stored_parts(header.experts, header.sizes(), header.parts, backward))
        entries = [(part.tensor(layer, "scale"), "F32", (part.rows,)) for part in parts]
        for role, (rows, _) in header.sizes().items() if biased else ():
            entries += [(bias_name(layer, role, expert), "F32", (rows,)) for expert in range(header.experts)]
        entries += [(part.tensor(layer, "weight"), "I8", (form.bytes(part.rows, part.columns),)) for part in parts]
        self._layer = layer
        self._file = TensorFile(directory / file, plan_layout(entries, header.metadata()))

    def write(self, part: StoredPart, qweight: Tensor, scales: Tensor) -> None:
        self._file.write(part.tensor(self._layer, "weight"), qweight)
        self._file.write(part.tensor(self._layer, "scale"), scales)

    def write_bias(self, role: str, expert: int, bias: Tensor) -> None:
        self._file.write(bias_name(self._layer, role, expert), bias.float().contiguous())

    def finish(self) -> tuple[ShardRecord, dict[str, Any]]:
        self._file.finish()
        return shard_record(self._file.path), {}

    def close(self) -> None:
        self._file.close()


class TreeLayer:
    def __init__(self, directory: Path, layer: int, header: KTHeader) -> None:
        self._form = tile_format(header.bits)
        self._target = directory / f"_layer_{layer}"
        self._draft = directory / f"._layer_{layer}.partial"
        self._entries: list[KTManifestFile] = []
        self._lock = threading.Lock()
        if self._draft.exists():  # left by a kill
            shutil.rmtree(self._draft)
        for part in range(header.parts):
            (self._draft / f"_numa_{part}").mkdir(parents=True)

    def write(self, part: StoredPart, qweight: Tensor, scales: Tensor) -> None:
        for kind, tensor in (("quant", qweight), ("scale", scales)):
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
