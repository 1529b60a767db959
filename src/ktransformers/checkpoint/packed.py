"""The packed directory: a complete model whose expert files have the memory layout of the kernels, and its manifest.

    config.json                     quantisation method "kt", with the manifest's hash
    model-00001-of-00002.safetensors   everything but the experts
    packed-00003.safetensors        the experts of layer 3: the bytes of `ExpertStore.memory()`, at page boundaries
    model.safetensors.index.json    names both kinds
    linears-00001-of-00001.safetensors   quantized dense linear layers (`kt quant --rest`), if any
    kt_packed.json                  this manifest: formats, shapes, layout version, sizes and checksums, the source
    quality.json                    the quantization report of the conversion

The packed tensors have the names of the parameters that they replace but another shape, so that a program without the
"kt" method fails on them instead of initialising the experts randomly. Opening checks names, sizes and the hash of
every header, which contains the id of the conversion. Files are hashed only on request, but each packed file also holds
a CRC-32C of every expert, which is compared when the expert is first read; files of ktransformers 0.2 and earlier do
not, and are not compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ktransformers.checkpoint.layout import ExpertTensors, locate
from ktransformers.checkpoint.tensorfile import FileLayout, read_layout, sha256
from ktransformers.ground.errors import InputError

MANIFEST_FILE = "kt_packed.json"
VERSION = 1  # of the manifest
REPACK_HINT = "run kt quant again"


class ManifestModel(BaseModel):
    """A part of the manifest: immutable, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ShardRecord(ManifestModel):
    bytes: int
    header_sha256: str
    sha256: str


class SourceFile(ManifestModel):
    name: str
    bytes: int
    header_sha256: str  # of a safetensors file's header, of the first MiB of any other
    sha256: str | None = None  # of all of it, where the hub's cache or the caller knew it


class SourceRecord(ManifestModel):
    name: str  # of its directory or file
    files: list[SourceFile]
    quantisation: dict[str, Any] | None = None  # as its config.json has it


class PackedLayer(ManifestModel):
    module: str  # the model's: model.layers.3.mlp.experts
    file: str
    experts: int
    hidden: int
    intermediate: int
    gated: bool
    biased: bool
    formats: dict[str, str]  # gate, up, down -> format
    tensors: dict[str, str]  # gate_up, down, gate_up_bias, down_bias -> name in the file
    bytes: dict[str, int]  # of the first two
    layout: dict[str, Any]  # sizes of blocks and strips, as the store gives them


class PackedLinear(ManifestModel):
    """A quantized dense (non-expert) weight, whose bytes are those of the core's `CodedLinear.memory()`."""

    name: str  # of the model's parameter: model.layers.3.self_attn.q_proj.weight
    file: str
    tensor: str  # name of the bytes in the file
    order: str | None  # name of the order of its columns, int64 [columns], where it is not their own
    rows: int
    columns: int
    format: str
    bytes: int
    checksum: int  # CRC-32C


class Manifest(ManifestModel):
    version: int
    layout: int  # version of the kernels' layout
    conversion: str  # random id, repeated in the header of every shard
    made_by: str
    formats: dict[str, str]  # requested formats
    source: SourceRecord
    layers: list[PackedLayer]
    shards: dict[str, ShardRecord]
    rest: str = "bf16"  # requested for dense linear layers
    linears: list[PackedLinear] = []  # quantized dense linear layers

    def locate(self, module: str) -> PackedLayer:
        """The layer of a module of the model; what precedes `layers` in its name may differ."""
        if module in (by_module := {layer.module: layer for layer in self.layers}):
            return by_module[module]
        roots = {layer.module.removesuffix(".experts"): layer for layer in self.layers}
        return roots[locate([ExpertTensors(root, {}, {}) for root in roots], module).root]


def checksums_name(module: str) -> str:
    """Name of the tensor with the CRC-32C of a layer's experts, int64 [E], in the layer's file."""
    return f"{module}.checksums"


def content_hash(document: Mapping[str, Any]) -> str:
    """Hash of a JSON document, independent of whitespace and key order."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def manifest_document(manifest: Manifest) -> dict[str, Any]:
    """The manifest as it is written, with its own hash. Without quantized linear layers it has no fields for them:
    earlier versions open it."""
    without = {"rest", "linears"} if manifest.rest == "bf16" else None
    document = manifest.model_dump(mode="json", exclude=without)
    return document | {"sha256": content_hash(document)}


def is_packed(directory: Path) -> bool:
    return (directory / MANIFEST_FILE).is_file()


def read_manifest(directory: Path) -> Manifest:
    """The manifest; its version, its hash and the hash in config.json are checked."""
    file = directory / MANIFEST_FILE
    try:
        document = json.loads(file.read_text())
        given = document.pop("sha256")
        version = document["version"]
    except FileNotFoundError:
        raise InputError(str(directory), f"no {MANIFEST_FILE}", "a packed directory", REPACK_HINT) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        given = f"{type(error).__name__}: {error}"
        raise InputError(str(file), given, "the manifest of a packed directory", REPACK_HINT) from error
    if version != VERSION:
        raise InputError(str(file), f"a manifest of version {version}", f"version {VERSION}", REPACK_HINT)
    if given != content_hash(document):
        raise InputError(str(file), "contents that do not fit its hash: it was altered", "it as written", REPACK_HINT)
    try:
        manifest = Manifest.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            str(file), f"{where}: {first['msg']}", "the manifest of a packed directory", REPACK_HINT
        ) from error
    named = read_packed_section(directory).get("sha256")
    if named != given:
        raise InputError(
            str(directory / "config.json"),
            f"the hash {str(named)[:12]} of a manifest",
            f"{given[:12]}, that of the {MANIFEST_FILE} in its directory",
            f"the directory has files of two conversions; {REPACK_HINT}",
        )
    return manifest


def read_packed_section(directory: Path) -> dict[str, Any]:
    """The section of config.json about the packed experts; empty if there is none."""
    try:
        config = json.loads((directory / "config.json").read_text())
        section = config["quantization_config"]["packed"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return section if isinstance(section, dict) else {}


def check_shards(directory: Path, manifest: Manifest) -> dict[str, FileLayout]:
    """Check existence, size and header of every file, as opening always does; returns file -> layout."""
    layouts = {}
    for name, record in manifest.shards.items():
        file = directory / name
        if not file.is_file():
            raise InputError(
                str(file), "no such file", f"a part of the packed model, {record.bytes} bytes", REPACK_HINT
            )
        size = file.stat().st_size
        if size != record.bytes:
            problem = "truncated" if size < record.bytes else "too long"
            raise InputError(str(file), f"{size} bytes, {problem}", f"{record.bytes} bytes", REPACK_HINT)
        layouts[name] = layout = read_layout(file)
        if hashlib.sha256(layout.header).hexdigest() != record.header_sha256:
            given = "a header that is not its own: altered, or of another conversion"
            raise InputError(str(file), given, f"the file that {MANIFEST_FILE} describes", REPACK_HINT)
    return layouts


def find_damaged(
    directory: Path, shards: Mapping[str, ShardRecord], threads: int = 4, names: Iterable[str] | None = None
) -> list[str]:
    """Files that are missing or have a wrong checksum; reads all of them."""
    files = list(shards if names is None else names)

    def is_intact(name: str) -> bool:
        return (directory / name).is_file() and sha256(directory / name) == shards[name].sha256

    with ThreadPoolExecutor(threads) as pool:
        return [name for name, intact in zip(files, pool.map(is_intact, files), strict=True) if not intact]


def verify_packed(directory: Path, threads: int = 4) -> Manifest:
    """Check manifest, sizes, headers and the checksum of every file; an error names the first damaged one."""
    manifest = read_manifest(directory)
    check_shards(directory, manifest)
    damaged = find_damaged(directory, manifest.shards, threads)
    if damaged:
        given = f"contents that do not fit their checksum ({len(damaged)} of {len(manifest.shards)} files)"
        raise InputError(str(directory / damaged[0]), given, f"the file that {MANIFEST_FILE} describes", REPACK_HINT)
    return manifest
