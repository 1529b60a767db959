"""The last step of a conversion: index, manifest, configuration and quantization report next to the shards; and the
check whether a directory already holds the same conversion.

config.json names the quantisation method "kt", so that stock transformers leaves the experts to
`modeling/quantizer.py`, and the hash of the manifest. The quantisation of the source is recorded for information only.
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
    PackedLinear,
    SourceFile,
    SourceRecord,
    is_packed,
    manifest_document,
    read_manifest,
)
from ktransformers.checkpoint.shards import INDEX_FILE
from ktransformers.checkpoint.tensorfile import read_layout
from ktransformers.experts.store import LAYOUT_VERSION
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import write_json
from ktransformers.modeling.prepare import QUANT_METHOD
from ktransformers.quant.origin import Origin
from ktransformers.quant.report import QUALITY_FILE, QuantizationReport, read_report


def write_directory(
    origin: Origin,
    journal: ConversionJournal,
    formats: dict[str, str],
    rest: str,
    files: Sequence[SourceFile],
    report: QuantizationReport,
) -> None:
    """Write index, manifest, configuration, tokenizer and quantization report next to the shards, then rename the
    directory to its final name."""
    directory = journal.directory
    layers = [PackedLayer.model_validate(entry["layer"]) for entry in journal.details.values() if "layer" in entry]
    linears = [PackedLinear.model_validate(record) for e in journal.details.values() for record in e.get("linears", [])]
    manifest = Manifest(
        version=VERSION,
        layout=LAYOUT_VERSION,
        conversion=journal.plan["conversion"],
        made_by=f"ktransformers {__version__}",
        formats=formats,
        source=SourceRecord(name=origin.name, files=list(files), quantisation=origin.quantisation),
        layers=sorted(layers, key=lambda layer: layer.file),
        shards=dict(sorted(journal.shards.items())),
        rest=rest,
        linears=sorted(linears, key=lambda linear: linear.name),
    )
    document = manifest_document(manifest)
    origin.write_small_files(directory)
    write_json(directory / INDEX_FILE, _index(directory, manifest))
    write_json(directory / MANIFEST_FILE, document)
    write_json(directory / QUALITY_FILE, report.to_json())
    write_json(directory / "config.json", _configuration(origin, manifest, document["sha256"]))
    journal.publish()


def _configuration(origin: Origin, manifest: Manifest, digest: str) -> dict[str, Any]:
    config = dict(origin.config)
    if "dtype" not in config and "torch_dtype" not in config:
        config["dtype"] = "bfloat16"
    packed: dict[str, Any] = {"manifest": MANIFEST_FILE, "sha256": digest, "layout": manifest.layout}
    packed["formats"] = manifest.formats
    if origin.quantisation is not None:
        packed["source"] = origin.quantisation
    config["quantization_config"] = {"quant_method": QUANT_METHOD, "packed": packed}
    return config


def _index(directory: Path, manifest: Manifest) -> dict[str, Any]:
    names = {name: file for file in manifest.shards for name in read_layout(directory / file).slots}
    size = sum(record.bytes for record in manifest.shards.values())
    return {"metadata": {"total_size": size}, "weight_map": names}


def find_existing(
    out: Path, formats: dict[str, str], rest: str, files: Sequence[SourceFile]
) -> QuantizationReport | None:
    """The report of an earlier conversion of the same files to the same formats; None: there is none in `out`."""
    if not is_packed(out):
        return None
    with contextlib.suppress(InputError):
        manifest = read_manifest(out)
        recorded = [(file.name, file.bytes, file.header_sha256) for file in manifest.source.files]
        same = recorded == [(file.name, file.bytes, file.header_sha256) for file in files]
        if same and (manifest.formats, manifest.rest) == (formats, rest) and manifest.layout == LAYOUT_VERSION:
            return read_report(out)
    return None
