"""Is a model on disk whole? Headers of every shard, the index against them, sizes, and hashes where they are known.

A safetensors file says in its header where each tensor ends, so a shard that was cut short is found without reading
its data. Hashes come from four places: the registry, what huggingface_hub left beside a download, the names of blobs in
its cache, and the hub itself when asked. Nothing is loaded, and nothing is changed.
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
from ktransformers.errors import InputError
from ktransformers.model_registry import FileFacts, split_parts

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
MAX_HEADER_BYTES = 100_000_000  # bytes, the format's own
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tiktoken.model")
REPACK_HINT = "fetch the file again: delete it and run `kt model download`"


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
    numbers: int = 0  # of all tensors together
    bytes: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)  # numbers by dtype
    hashed: int = 0  # files whose hash was known and computed
    unknown: int = 0  # weight files without a known hash
    findings: list[FileProblem] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)

    def error(self, file: str, text: str, fix: str = REPACK_HINT) -> None:
        self.findings.append(FileProblem("error", file, text, fix))

    def warn(self, file: str, text: str, fix: str = "") -> None:
        self.findings.append(FileProblem("warning", file, text, fix))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"whole": self.whole}


def verify(
    path: Path,
    known: Mapping[str, FileFacts] | None = None,
    *,
    hashes: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Verified:
    """`known`: what is known of the files beside what lies with them."""
    found = Verified(str(path))
    if path.is_file():
        _gguf(path, found)
        directory, weights = path.parent, [part for part in split_parts(path) if part.is_file()]
    elif path.is_dir():
        directory, weights = path, _safetensors(path, found)
    else:
        raise InputError("model", f"{path}, which does not exist", "a model's folder, or a .gguf file")
    expected = {**local_hashes(directory), **_packed(directory, found), **(known or {})}
    names = expected if path.is_dir() else [part.name for part in weights if part.name in expected]
    for name in names:
        _compare(directory, name, expected[name], found, hashes, progress)
    found.unknown = sum(not (expected.get(part.name, FileFacts())).sha256 for part in weights)
    return found


def _packed(directory: Path, found: Verified) -> dict[str, FileFacts]:
    """What the manifest of a packed directory says of its files; that the two fit is looked at here."""
    if not (directory / MANIFEST_FILE).is_file():
        return {}
    from ktransformers.checkpoint.packed import REPACK_HINT as ANEW
    from ktransformers.checkpoint.packed import check_shards, read_manifest  # they bring torch

    try:
        manifest = read_manifest(directory)
        check_shards(directory, manifest)
    except InputError as error:
        found.error(MANIFEST_FILE, str(error), ANEW)
        return {}
    return {name: FileFacts(record.bytes, record.sha256) for name, record in manifest.shards.items()}


def _compare(
    directory: Path, name: str, known: FileFacts, found: Verified, hashes: bool, progress: Callable[[str], None] | None
) -> None:
    file = directory / name
    if not file.is_file():
        found.error(name, "it is missing", "`kt model download` fetches what is missing")
    elif known.size is not None and file.stat().st_size != known.size:
        found.error(name, f"{file.stat().st_size} bytes where {known.size} belong")
    elif hashes and (known.sha256 or known.git_sha1):
        if progress is not None:
            progress(name)
        found.hashed += 1
        # git's id has the size in it
        if hash_is_wrong(file, known if known.size is not None else FileFacts(file.stat().st_size, *_sums(known))):
            found.error(name, "its hash is not the one that was published: the content has changed or decayed")


def _sums(known: FileFacts) -> tuple[str | None, str | None]:
    return known.sha256, known.git_sha1


def local_hashes(directory: Path) -> dict[str, FileFacts]:
    """Hashes that huggingface_hub left: metadata of a download into a folder, or names of blobs in its cache."""
    found = {}
    records = directory / ".cache" / "huggingface" / "download"
    for record in records.rglob("*.metadata"):
        lines = record.read_text(errors="replace").splitlines()
        if len(lines) >= 2 and (sums := _of_etag(lines[1].strip())):
            found[record.relative_to(records).as_posix().removesuffix(".metadata")] = sums
    for file in directory.iterdir():
        if file.is_symlink() and file.resolve().parent.name == "blobs" and (sums := _of_etag(file.resolve().name)):
            found[file.name] = sums
    return found


def _of_etag(word: str) -> FileFacts | None:
    if re.fullmatch(r"[0-9a-f]{64}", word):
        return FileFacts(sha256=word)
    return FileFacts(git_sha1=word) if re.fullmatch(r"[0-9a-f]{40}", word) else None


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """(tensors by name, where their data begins) of a safetensors file."""
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


def _shard(file: Path, found: Verified) -> set[str]:
    """Names of its tensors; what is wrong with it is noted."""
    found.files += 1
    found.bytes += file.stat().st_size
    try:
        tensors, begin = read_header(file)
        spans = sorted((*tensor["data_offsets"], name) for name, tensor in tensors.items())
        end = 0
        for first, last, name in spans:
            tensor = tensors[name]
            count, bits = math.prod(tensor["shape"]), BITS_BY_DTYPE.get(tensor["dtype"])
            if first != end or last < first:
                raise ValueError(f"{name} begins at {first}, where {end} was to be expected")
            if bits is not None and (count * bits + 7) // 8 != last - first:
                raise ValueError(f"{name} has {last - first} bytes, and its shape {tensor['shape']} does not")
            found.dtypes[tensor["dtype"]] = found.dtypes.get(tensor["dtype"], 0) + count
            found.numbers += count
            end = last
    except (ValueError, KeyError, TypeError) as error:
        found.error(file.name, f"a header that cannot be: {error}")
        return set()
    found.tensors += len(spans)
    size = file.stat().st_size
    if size != begin + end:
        word = "short" if size < begin + end else "long"
        found.error(file.name, f"{abs(begin + end - size)} bytes too {word}: {size} where {begin + end} belong")
    return set(tensors)


def _safetensors(directory: Path, found: Verified) -> list[Path]:
    if not (directory / "config.json").is_file():
        found.error("config.json", "it is missing", "`kt model download` fetches what is missing")
    else:
        try:
            json.loads((directory / "config.json").read_text())
        except ValueError as error:
            found.error("config.json", f"no JSON: {error}")
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        found.warn("tokenizer", "there is none", "text cannot be put in or out without one")
    if (directory / PARTIAL_DIRECTORY).is_dir() or any(directory.glob(".cache/huggingface/download/**/*.incomplete")):
        found.warn(directory.name, "a download into it was cut off", "`kt model download` with the same id goes on")
    index = directory / INDEX_FILE
    if not index.is_file():
        if not (directory / SINGLE_FILE).is_file():
            found.error(
                SINGLE_FILE, f"neither it nor {INDEX_FILE} is here", "`kt model download` fetches what is missing"
            )
            return []
        _shard(directory / SINGLE_FILE, found)
        return [directory / SINGLE_FILE]
    return _indexed(directory, index, found)


def _indexed(directory: Path, index: Path, found: Verified) -> list[Path]:
    try:
        document = json.loads(index.read_text())
        homes = {str(name): str(file) for name, file in document["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found.error(INDEX_FILE, f"no index: {type(error).__name__}: {error}")
        return []
    weights, extra = [], 0
    for name in sorted(set(homes.values())):
        file = directory / name
        if not file.is_file():
            found.error(name, "the index names it, and it is missing", "`kt model download` fetches what is missing")
            continue
        weights.append(file)
        before = len(found.findings)
        inside = _shard(file, found)
        if len(found.findings) > before and not inside:
            continue
        absent = [tensor for tensor, home in homes.items() if home == name and tensor not in inside]
        if absent:
            some = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
            found.error(name, f"{len(absent)} tensors that the index puts here are not: {some}")
        extra += len(inside - homes.keys())
    if extra:
        found.warn(INDEX_FILE, f"{extra} tensors of the shards are not in it, and will not be read")
    others = {file.name for file in directory.glob("*.safetensors")} - set(homes.values())
    if others:
        found.warn(
            ", ".join(sorted(others)[:3]), "files that the index does not name", "left over from another download"
        )
    return weights


def _gguf(path: Path, found: Verified) -> None:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise InputError("gguf", "no such package", "it installed", "pip install 'ktransformers[gguf]'") from error
    for part in split_parts(path):
        if not part.is_file():
            found.error(part.name, "a part of the model is missing", "`kt model download` fetches what is missing")
            continue
        found.files += 1
        found.bytes += part.stat().st_size
        try:
            tensors = GGUFReader(part).tensors
        except (ValueError, IndexError, OverflowError, OSError, KeyError) as error:
            found.error(part.name, f"no whole GGUF file: {error}")
            continue
        for tensor in tensors:
            count = int(tensor.n_elements)
            found.dtypes[tensor.tensor_type.name] = found.dtypes.get(tensor.tensor_type.name, 0) + count
            found.numbers += count
            if tensor.data_offset + tensor.n_bytes > part.stat().st_size:
                found.error(part.name, f"{tensor.name} ends beyond the end of the file")
        found.tensors += len(tensors)
