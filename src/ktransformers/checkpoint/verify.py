"""Verifies a model on disk: headers of every shard, the index against them, sizes, and hashes where they are known.

A safetensors header says where each tensor ends, so a truncated shard is detected without reading its data. Expected
hashes come from the model registry, the metadata that huggingface_hub writes next to a download, the names of blobs in
its cache, and on request the hub. Nothing is loaded, and nothing is changed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ktransformers.checkpoint.hub import PARTIAL_DIRECTORY, hash_is_wrong
from ktransformers.checkpoint.shards import INDEX_FILE, SINGLE_FILE
from ktransformers.ground import progress
from ktransformers.ground.errors import InputError
from ktransformers.ground.model_registry import FileFacts, split_parts

BITS_BY_DTYPE = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
MANIFEST_FILE = "kt_packed.json"  # of a packed directory
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tiktoken.model")
REFETCH_HINT = "fetch the file again: delete it and run `kt model download`"
MISSING_HINT = "`kt model download` fetches what is missing"


@dataclass(frozen=True)
class FileProblem:
    level: str  # error: the model cannot be used; warning: it can, but something is odd
    file: str
    text: str
    fix: str = ""


@dataclass
class Verified:
    path: str
    files: int = 0  # of weights
    tensors: int = 0
    numbers: int = 0  # elements of all tensors
    bytes: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)  # elements by dtype
    hashed: int = 0  # files whose hash was known and computed
    unknown: int = 0  # weight files without a known hash
    findings: list[FileProblem] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)

    def error(self, file: str, text: str, fix: str = REFETCH_HINT) -> None:
        self.findings.append(FileProblem("error", file, text, fix))

    def warn(self, file: str, text: str, fix: str = "") -> None:
        self.findings.append(FileProblem("warning", file, text, fix))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"whole": self.whole}


def verify(path: Path, known: Mapping[str, FileFacts] | None = None, *, hashes: bool = True) -> Verified:
    """`known`: expected sizes and hashes beyond those stored with the files."""
    report = Verified(str(path))
    of_tree: dict[str, FileFacts] = {}
    if path.is_file():
        _gguf(path, report)
        directory, weights = path.parent, [part for part in split_parts(path) if part.is_file()]
    elif any(path.glob("_layer_*/_numa_*")):
        directory, weights = path, sorted(path.glob("_layer_*/_numa_*/*.kt"))
        of_tree = _tree(path, weights, report)
    elif path.is_dir():
        directory, weights = path, _safetensors(path, report)
    else:
        raise InputError("model", f"{path}, which does not exist", "a model's folder, or a .gguf file")
    expected = {**local_hashes(directory), **_packed(directory, report), **of_tree, **(known or {})}
    names = expected if path.is_dir() else [part.name for part in weights if part.name in expected]
    files = [directory / name for name in names if expected[name].sha256 or expected[name].git_sha1]
    on_bytes = _HashProgress(sum(file.stat().st_size for file in files if file.is_file()))
    for name in names:
        _compare(directory, name, expected[name], report, hashes, on_bytes)
    names_of_weights = [part.relative_to(directory).as_posix() for part in weights]
    report.unknown = sum(not (expected.get(name, FileFacts())).sha256 for name in names_of_weights)
    return report


def _tree(directory: Path, files: list[Path], report: Verified) -> dict[str, FileFacts]:
    """Sizes and hashes in the manifest of a tree of .kt files, after checking that it lists exactly these."""
    from ktransformers.checkpoint.kt_files import MANIFEST_FILE as TREE_MANIFEST  # imports torch
    from ktransformers.checkpoint.kt_files import REMEDY, check_tree, read_kt_manifest

    report.files, report.bytes = len(files), sum(file.stat().st_size for file in files)
    try:
        manifest = read_kt_manifest(directory)
        if manifest is None:
            report.warn(TREE_MANIFEST, "there is none, so nothing is known of the files but their names")
            return {}
        check_tree(directory, manifest)
    except InputError as error:
        report.error(TREE_MANIFEST, str(error), REMEDY)
        return {}
    entries = [entry for layer in manifest.layers for entry in layer.files]
    return {entry.path: FileFacts(entry.size_bytes, entry.sha256) for entry in entries}


def _packed(directory: Path, report: Verified) -> dict[str, FileFacts]:
    """Sizes and hashes in the manifest of a packed directory, after checking that the shards match it."""
    if not (directory / MANIFEST_FILE).is_file():
        return {}
    from ktransformers.checkpoint.packed import REPACK_HINT, check_shards, read_manifest  # imports torch

    try:
        manifest = read_manifest(directory)
        check_shards(directory, manifest)
    except InputError as error:
        report.error(MANIFEST_FILE, str(error), REPACK_HINT)
        return {}
    return {name: FileFacts(record.bytes, record.sha256) for name, record in manifest.shards.items()}


class _HashProgress:
    """Reports the bytes that are hashed."""

    def __init__(self, total: int) -> None:
        self._done, self._total = 0, total

    def __call__(self, count: int) -> None:
        self._done += count
        progress.report("Checking hashes", self._done, self._total, "bytes")


def _compare(
    directory: Path, name: str, known: FileFacts, report: Verified, hashes: bool, on_bytes: Callable[[int], None]
) -> None:
    file = directory / name
    if not file.is_file():
        report.error(name, "it is missing", MISSING_HINT)
    elif known.size is not None and file.stat().st_size != known.size:
        report.error(name, f"{file.stat().st_size} bytes where {known.size} belong")
    elif hashes and (known.sha256 or known.git_sha1):
        report.hashed += 1
        size = file.stat().st_size if known.size is None else known.size  # git's hash includes the size
        if hash_is_wrong(file, FileFacts(size, known.sha256, known.git_sha1), on_bytes):
            report.error(name, "its hash is not the one that was published: the content has changed or decayed")


def local_hashes(directory: Path) -> dict[str, FileFacts]:
    """Hashes stored by huggingface_hub: metadata of a download into a folder, or names of blobs in its cache."""
    facts = {}
    records = directory / ".cache" / "huggingface" / "download"
    for record in records.rglob("*.metadata"):
        lines = record.read_text(errors="replace").splitlines()
        if len(lines) >= 2 and (of_file := _facts_of_etag(lines[1].strip())):
            facts[record.relative_to(records).as_posix().removesuffix(".metadata")] = of_file
    for file in directory.iterdir():
        blob = file.resolve()
        if file.is_symlink() and blob.parent.name == "blobs" and (of_file := _facts_of_etag(blob.name)):
            facts[file.name] = of_file
    return facts


def _facts_of_etag(etag: str) -> FileFacts | None:
    if re.fullmatch(r"[0-9a-f]{64}", etag):
        return FileFacts(sha256=etag)
    return FileFacts(git_sha1=etag) if re.fullmatch(r"[0-9a-f]{40}", etag) else None


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """(tensors by name, offset of the data) of a safetensors file."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"its header should have {length} bytes, and the file has {size}")
        header = json.loads(handle.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    return header, 8 + length


def _shard(file: Path, report: Verified) -> set[str]:
    """Names of its tensors; problems go to the report."""
    report.files += 1
    report.bytes += file.stat().st_size
    try:
        tensors, begin = read_header(file)
        spans = sorted((*tensor["data_offsets"], name) for name, tensor in tensors.items())
        end = 0
        for first, last, name in spans:
            tensor = tensors[name]
            count, bits = math.prod(tensor["shape"]), BITS_BY_DTYPE.get(tensor["dtype"])
            if first != end or last < first:
                raise ValueError(f"{name} begins at {first}, expected {end}")
            if bits is not None and (count * bits + 7) // 8 != last - first:
                raise ValueError(f"{name} has {last - first} bytes, and its shape {tensor['shape']} does not")
            report.dtypes[tensor["dtype"]] = report.dtypes.get(tensor["dtype"], 0) + count
            report.numbers += count
            end = last
    except (ValueError, KeyError, TypeError) as error:
        report.error(file.name, f"a header that cannot be: {error}")
        return set()
    report.tensors += len(spans)
    size = file.stat().st_size
    if size != begin + end:
        problem = "short" if size < begin + end else "long"
        report.error(file.name, f"{abs(begin + end - size)} bytes too {problem}: {size} where {begin + end} belong")
    return set(tensors)


def _safetensors(directory: Path, report: Verified) -> list[Path]:
    if not (directory / "config.json").is_file():
        report.error("config.json", "it is missing", MISSING_HINT)
    else:
        try:
            json.loads((directory / "config.json").read_text())
        except ValueError as error:
            report.error("config.json", f"no JSON: {error}")
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        report.warn("tokenizer", "no tokenizer file", "text cannot be tokenised without one")
    if (directory / PARTIAL_DIRECTORY).is_dir() or any(directory.glob(".cache/huggingface/download/**/*.incomplete")):
        report.warn(directory.name, "a download into it was cut off", "`kt model download` with the same id goes on")
    index = directory / INDEX_FILE
    if not index.is_file():
        if not (directory / SINGLE_FILE).is_file():
            report.error(SINGLE_FILE, f"neither it nor {INDEX_FILE} exists", MISSING_HINT)
            return []
        _shard(directory / SINGLE_FILE, report)
        return [directory / SINGLE_FILE]
    return _indexed(directory, index, report)


def _indexed(directory: Path, index: Path, report: Verified) -> list[Path]:
    try:
        document = json.loads(index.read_text())
        file_of = {str(name): str(file) for name, file in document["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        report.error(INDEX_FILE, f"no index: {type(error).__name__}: {error}")
        return []
    weights, extra = [], 0
    for name in sorted(set(file_of.values())):
        file = directory / name
        if not file.is_file():
            report.error(name, "the index names it, and it is missing", MISSING_HINT)
            continue
        weights.append(file)
        before = len(report.findings)
        inside = _shard(file, report)
        if len(report.findings) > before and not inside:
            continue
        absent = [tensor for tensor, file_name in file_of.items() if file_name == name and tensor not in inside]
        if absent:
            some = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
            report.error(name, f"{len(absent)} tensors of the index are missing in it: {some}")
        extra += len(inside - file_of.keys())
    if extra:
        report.warn(INDEX_FILE, f"{extra} tensors of the shards are not in it, and will not be read")
    unlisted = {file.name for file in directory.glob("*.safetensors")} - set(file_of.values())
    if unlisted:
        report.warn(
            ", ".join(sorted(unlisted)[:3]), "files that the index does not name", "left over from another download"
        )
    return weights


def _gguf(path: Path, report: Verified) -> None:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise InputError("gguf", "no such package", "it installed", "pip install 'ktransformers[gguf]'") from error
    for part in split_parts(path):
        if not part.is_file():
            report.error(part.name, "a part of the model is missing", MISSING_HINT)
            continue
        report.files += 1
        report.bytes += part.stat().st_size
        try:
            tensors = GGUFReader(part).tensors
        except (ValueError, IndexError, OverflowError, OSError, KeyError) as error:
            report.error(part.name, f"no whole GGUF file: {error}")
            continue
        for tensor in tensors:
            count = int(tensor.n_elements)
            report.dtypes[tensor.tensor_type.name] = report.dtypes.get(tensor.tensor_type.name, 0) + count
            report.numbers += count
            if tensor.data_offset + tensor.n_bytes > part.stat().st_size:
                report.error(part.name, f"{tensor.name} ends beyond the end of the file")
        report.tensors += len(tensors)
