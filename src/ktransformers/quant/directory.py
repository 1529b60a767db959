"""The last step of a conversion: what makes shards a model's directory, and finding one that is made already.

config.json names our method, so that stock transformers hands the experts to us, with the manifest's hash inside; the
source's own quantisation is recorded beside it and means nothing any more to whoever reads the tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ktransformers import __version__
from ktransformers.checkpoint.journal import ConversionJournal
from ktransformers.checkpoint.packed import (
    MANIFEST_FILE,
    VERSION,
    Manifest,
    PackedLayer,
    SourceFile,
    SourceRecord,
    is_packed,
    manifest_document,
    read_manifest,
)
from ktransformers.checkpoint.shards import INDEX_FILE
from ktransformers.checkpoint.tensorfile import read_layout
from ktransformers.errors import InputError
from ktransformers.files import write_json
from ktransformers.nn.prepare import QUANT_METHOD
from ktransformers.nn.store import LAYOUT_VERSION
from ktransformers.quant.origin import Origin
from ktransformers.quant.receipt import QUALITY_FILE, Receipt, read_receipt


def write_directory(
    origin: Origin, journal: ConversionJournal, asked: dict[str, str], files: Sequence[SourceFile], receipt: Receipt
) -> None:
    """All shards are there: index, manifest, configuration, tokenizer, receipt; then the directory gets its name."""
    directory = journal.directory
    layers = [PackedLayer.model_validate(about["layer"]) for about in journal.about.values() if about]
    manifest = Manifest(
        version=VERSION,
        layout=LAYOUT_VERSION,
        conversion=journal.plan["conversion"],
        made_by=f"ktransformers {__version__}",
        formats=asked,
        source=SourceRecord(name=origin.name, files=list(files), quantisation=origin.quantisation),
        layers=sorted(layers, key=lambda layer: layer.file),
        shards=dict(sorted(journal.shards.items())),
    )
    words = manifest_document(manifest)
    origin.write_small_files(directory)
    write_json(directory / INDEX_FILE, _index(directory, manifest))
    write_json(directory / MANIFEST_FILE, words)
    write_json(directory / QUALITY_FILE, receipt.to_json())
    write_json(directory / "config.json", configuration(origin, manifest, words["sha256"]))
    journal.publish()


def configuration(origin: Origin, manifest: Manifest, digest: str) -> dict[str, Any]:
    words = dict(origin.config)
    if "dtype" not in words and "torch_dtype" not in words:
        words["dtype"] = "bfloat16"
    packed: dict[str, Any] = {"manifest": MANIFEST_FILE, "sha256": digest, "layout": manifest.layout}
    packed["formats"] = manifest.formats
    if origin.quantisation is not None:
        packed["source"] = origin.quantisation
    words["quantization_config"] = {"quant_method": QUANT_METHOD, "packed": packed}
    return words


def _index(directory: Path, manifest: Manifest) -> dict[str, Any]:
    names = {name: file for file in manifest.shards for name in read_layout(directory / file).slots}
    size = sum(record.bytes for record in manifest.shards.values())
    return {"metadata": {"total_size": size}, "weight_map": names}


def find_existing(out: Path, asked: dict[str, str], files: Sequence[SourceFile]) -> Receipt | None:
    """The receipt of an earlier conversion of the same files into the same formats."""
    if not is_packed(out):
        return None
    with contextlib.suppress(InputError):
        manifest = read_manifest(out)
        known = [(file.name, file.bytes, file.header_sha256) for file in manifest.source.files]
        same = known == [(file.name, file.bytes, file.header_sha256) for file in files]
        if same and manifest.formats == asked and manifest.layout == LAYOUT_VERSION:
            return read_receipt(out)
    return None
