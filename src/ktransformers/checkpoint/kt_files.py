"""Files in kt-kernel's layout: names of tensors and of `.kt` files, and what our own files record in addition to the
weights.

kt-kernel's merged safetensors and its tree of `.kt` files say neither method nor layout nor the number of NUMA parts.
Ours do: in the header of every safetensors shard, where kt-kernel does not look, and for a tree in
`kt-weight-manifest.json`, schema 2, which kt-kernel 0.7 asks for before it trains on an INT8 tree and which lists every
file with its size and SHA-256. A reader that finds either holds the files to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ktransformers.checkpoint.kt_codes import TILE_FORMATS, TileFormat, divided, tile_format
from ktransformers.checkpoint.tensorfile import sha256
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import parse_json, read_json_object, validate, write_json

HEADER_VERSION = 1
MANIFEST_FILE = "kt-weight-manifest.json"
REMEDY = "convert the model again"
ROLES = ("gate", "up", "down")
MERGED_NAME = re.compile(
    r"blk\.(?P<layer>\d+)\.ffn_(?P<role>gate|up|down)(?P<back>_bwd)?_exps\.(?P<expert>\d+)\.numa\.(?P<part>\d+)\."
    r"(?P<kind>weight|scale)"
)
# Of one expert, in our merged files of models that have biases; kt-kernel has none.
BIAS_NAME = re.compile(r"blk\.(?P<layer>\d+)\.ffn_(?P<role>gate|up|down)_exps\.(?P<expert>\d+)\.bias")
TREE_FILE_NAME = re.compile(
    r"(?P<method>MOE_INT4|MOE_INT8|INT4|INT8|BF16)_(?P<role>gate|up|down)(?P<back>_bwd)?_(?P<expert>\d+)_"
    r"(?P<bytes>\d+)Byte_(?P<kind>quant|scale)_\.kt"
)


@dataclass(frozen=True)
class StoredPart:
    """One NUMA part of one matrix: `[rows, columns]`, whose values and scales are two tensors or two files."""

    role: str
    backward: bool  # the transposed matrix
    expert: int
    part: int
    rows: int
    columns: int

    def tensor(self, layer: int, kind: str) -> str:
        """`kind` is weight or scale."""
        back = "_bwd" if self.backward else ""
        return f"blk.{layer}.ffn_{self.role}{back}_exps.{self.expert}.numa.{self.part}.{kind}"

    def file(self, form: TileFormat, kind: str) -> str:
        """Below the layer's directory; `kind` is quant or scale."""
        back = "_bwd" if self.backward else ""
        size = form.bytes(self.rows, self.columns) if kind == "quant" else 4 * self.rows
        return f"_numa_{self.part}/{form.name}_{self.role}{back}_{self.expert}_{size}Byte_{kind}_.kt"


def bias_name(layer: int, role: str, expert: int) -> str:
    return f"blk.{layer}.ffn_{role}_exps.{expert}.bias"


def stored_parts(
    experts: int, sizes: Mapping[str, tuple[int, int]], parts: int, backward: bool = False
) -> Iterator[StoredPart]:
    """All parts of a layer; `sizes` are rows and columns of gate, up and down."""
    for expert in range(experts):
        for role, (rows, columns) in sizes.items():
            n, k = divided(role, rows, columns, parts)
            for part in range(parts):
                yield StoredPart(role, False, expert, part, n, k)
                if backward:
                    yield StoredPart(role, True, expert, part, k, n)


@dataclass(frozen=True)
class KTHeader:
    """What the header of each of our safetensors shards says of the conversion."""

    bits: int
    parts: int  # NUMA parts: kt-kernel's threadpool_count
    experts: int
    hidden: int
    intermediate: int
    conversion: str  # random id
    made_by: str

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of gate, up and down."""
        inner = (self.intermediate, self.hidden)
        return {"gate": inner, "up": inner, "down": inner[::-1]}

    def metadata(self) -> dict[str, str]:
        form = tile_format(self.bits)
        return {
            "format": "pt",
            "kt_version": str(HEADER_VERSION),
            "kt_method": form.method,
            "kt_layout": form.layout,
            "kt_threadpool_count": str(self.parts),
            "kt_expert_num": str(self.experts),
            "kt_hidden_size": str(self.hidden),
            "kt_intermediate_size": str(self.intermediate),
            "kt_conversion": self.conversion,
            "kt_made_by": self.made_by,
        }


def read_kt_header(file: Path, metadata: Mapping[str, str]) -> KTHeader | None:
    """The header of one of our shards; None: the file is not ours, as kt-kernel's own."""
    if "kt_version" not in metadata:
        return None
    if metadata["kt_version"] != str(HEADER_VERSION):
        given = f"kt_version {metadata['kt_version']}"
        raise InputError(str(file), given, str(HEADER_VERSION), "read it with the ktransformers that wrote it")
    method, layout = metadata.get("kt_method"), metadata.get("kt_layout")
    form = next((form for form in TILE_FORMATS.values() if (form.method, form.layout) == (method, layout)), None)
    if form is None:
        known = ", ".join(f"{form.method} in {form.layout}" for form in TILE_FORMATS.values())
        raise InputError(str(file), f"{method} in {layout}", known, REMEDY)
    numbers = []
    for key in ("threadpool_count", "expert_num", "hidden_size", "intermediate_size"):
        text = metadata.get(f"kt_{key}", "")
        if not re.fullmatch(r"[1-9]\d{0,8}", text):
            raise InputError(f"{file}: kt_{key}", repr(text), "a number", REMEDY)
        numbers.append(int(text))
    parts, experts, hidden, intermediate = numbers
    made = metadata.get("kt_conversion", ""), metadata.get("kt_made_by", "")
    return KTHeader(form.bits, parts, experts, hidden, intermediate, *made)


def merged_name(name: str) -> str:
    """kt-kernel's name of a tensor that is not an expert's: `blk.3.` for `model.layers.3.`, otherwise no leading
    `model.`, and in neither a `language_model.`."""
    plain = re.sub(r"(^|\.)language_model\.", r"\1", name, count=1)
    return f"blk.{plain[13:]}" if plain.startswith("model.layers.") else plain.removeprefix("model.")


def plain_name(name: str) -> str:
    """The Hugging Face name of what `merged_name` gives for a model without a `language_model`."""
    if name.startswith("blk."):
        return f"model.layers.{name[4:]}"
    return name if name.startswith("lm_head.") else f"model.{name}"


def names_to_restore(names: Collection[str]) -> str:
    """For a shard's metadata: merged name -> name, as JSON, of those that `plain_name` does not give back."""
    merged: dict[str, str] = {}
    for name in names:
        other = merged.setdefault(merged_name(name), name)
        if other != name:
            raise InputError(name, f"{other} as well", "tensors of different names in kt-kernel's layout")
    return json.dumps({short: name for short, name in merged.items() if plain_name(short) != name}, sort_keys=True)


def restored_names(file: Path, metadata: Mapping[str, str]) -> dict[str, str]:
    """Merged name -> name, as `names_to_restore` wrote it."""
    document = parse_json(metadata.get("kt_names", "{}"), f"{file}: kt_names", "names as JSON")
    if not isinstance(document, dict) or not all(isinstance(value, str) for value in document.values()):
        raise InputError(f"{file}: kt_names", "something else", "an object: name in the file -> name", REMEDY)
    return document


class KTManifestModel(BaseModel):
    """A part of the manifest; a field that we do not know is passed over, because kt-kernel may add one."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class KTManifestFile(KTManifestModel):
    path: str  # below the root: _layer_3/_numa_0/INT8_gate_0_65536Byte_quant_.kt
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class KTManifestLayer(KTManifestModel):
    index: int = Field(ge=0)
    numa_count: int = Field(ge=1)
    state: Literal["ready"]
    bytes: int
    files: list[KTManifestFile]


class KTManifest(KTManifestModel):
    schema_version: Literal[2]
    state: Literal["ready"]
    expert_weight_format: Literal["int8", "int4"]
    layout: str
    threadpool_count: int = Field(ge=1)
    expert_num: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    bytes: int
    layers: list[KTManifestLayer]

    @property
    def form(self) -> TileFormat:
        return TILE_FORMATS[8 if self.expert_weight_format == "int8" else 4]

    @property
    def header(self) -> KTHeader:
        sizes = (self.expert_num, self.hidden_size, self.intermediate_size)
        return KTHeader(self.form.bits, self.threadpool_count, *sizes, conversion="", made_by=MANIFEST_FILE)


def build_manifest(header: KTHeader, layers: Mapping[int, list[KTManifestFile]]) -> KTManifest:
    """The manifest of a tree; `layers` are the files of each layer."""
    form = tile_format(header.bits)
    entries = [
        KTManifestLayer(
            index=index,
            numa_count=header.parts,
            state="ready",
            bytes=sum(file.size_bytes for file in files),
            files=sorted(files, key=lambda file: file.path),
        )
        for index, files in sorted(layers.items())
    ]
    return KTManifest(
        schema_version=2,
        state="ready",
        expert_weight_format="int8" if form.bits == 8 else "int4",
        layout=form.layout,
        threadpool_count=header.parts,
        expert_num=header.experts,
        hidden_size=header.hidden,
        intermediate_size=header.intermediate,
        bytes=sum(entry.bytes for entry in entries),
        layers=entries,
    )


def write_manifest(root: Path, manifest: KTManifest) -> None:
    write_json(root / MANIFEST_FILE, manifest.model_dump(mode="json"), indent=1)


def read_kt_manifest(root: Path) -> KTManifest | None:
    """The manifest of a tree, without a look at its files; None: the tree has none, as kt-kernel's own."""
    file = root / MANIFEST_FILE
    if not file.is_file():
        return None
    manifest = validate(KTManifest, read_json_object(file, "the manifest of a tree of .kt files"), str(file), REMEDY)
    if manifest.layout != manifest.form.layout:
        raise InputError(f"{file}: layout", manifest.layout, manifest.form.layout, REMEDY)
    return manifest


def check_tree(root: Path, manifest: KTManifest, *, hashes: bool = False, threads: int = 4) -> None:
    """Hold a tree to its manifest: the files of every layer by the shapes, no other, with their sizes and, on request,
    their contents."""
    file = root / MANIFEST_FILE
    sizes: dict[str, KTManifestFile] = {}
    for layer in manifest.layers:
        folder = f"_layer_{layer.index}/"
        listed = {entry.path: entry for entry in layer.files}
        if layer.numa_count != manifest.threadpool_count:
            raise InputError(
                f"{file}: layer {layer.index}", f"{layer.numa_count} NUMA parts", f"{manifest.threadpool_count}", REMEDY
            )
        backward = any("_bwd_" in path for path in listed)
        count = manifest.expert_num * manifest.threadpool_count * len(ROLES) * (4 if backward else 2)
        if len(listed) != count:
            raise InputError(f"{file}: layer {layer.index}", f"{len(listed)} files", f"{count} by its shapes", REMEDY)
        parts = stored_parts(manifest.expert_num, manifest.header.sizes(), manifest.threadpool_count, backward)
        expected = {folder + part.file(manifest.form, kind) for part in parts for kind in ("quant", "scale")}
        if listed.keys() != expected:
            differing = sorted(listed.keys() ^ expected)[0]
            given = f"{differing} " + ("missing" if differing in expected else "in it")
            raise InputError(f"{file}: layer {layer.index}", given, "the files by its shapes", REMEDY)
        sizes |= listed
    present = {path.relative_to(root).as_posix(): path for path in root.glob("_layer_*/**/*") if not path.is_dir()}
    for path in sorted(present.keys() ^ sizes.keys()):
        given = "no such file" if path in sizes else "a file that the manifest does not list"
        raise InputError(str(root / path), given, f"what {MANIFEST_FILE} lists", REMEDY)
    for path, entry in sizes.items():
        stat = present[path].lstat()
        if present[path].is_symlink() or stat.st_size != entry.size_bytes:
            given = "a link" if present[path].is_symlink() else f"{stat.st_size} bytes"
            raise InputError(str(root / path), given, f"a file of {entry.size_bytes} bytes", REMEDY)
    if hashes:
        with ThreadPoolExecutor(threads) as pool:
            found = pool.map(lambda path: sha256(present[path]), sizes)
            for (path, entry), digest in zip(sizes.items(), found, strict=True):
                if digest != entry.sha256:
                    given = "contents that do not fit their SHA-256"
                    raise InputError(str(root / path), given, f"the file that {MANIFEST_FILE} lists", REMEDY)


def validate_int8_tree(
    root: str | Path,
    *,
    layer_indices: Collection[int],
    numa_count: int,
    expert_num: int,
    hidden_size: int,
    intermediate_size: int,
    verify_hashes: bool = False,
) -> KTManifest:
    """What kt-kernel 0.7 asks of `kt_weight_path` before it trains on INT8: an absolute directory that is not a link,
    with a manifest of exactly these layers and shapes, and exactly the files that it lists."""
    path = Path(root)
    if not path.is_absolute() or path.is_symlink() or not path.is_dir():
        raise InputError("kt_weight_path", str(path), "the absolute path of a directory that is not a link")
    manifest = read_kt_manifest(path)
    if manifest is None:
        raise InputError(
            str(path), f"no {MANIFEST_FILE}", "a tree with one", "kt quant --layout kt-kernel --format int8 --no-merge"
        )
    wanted = {
        "expert_weight_format": "int8",
        "threadpool_count": numa_count,
        "expert_num": expert_num,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
    }
    for key, value in wanted.items():
        if getattr(manifest, key) != value:
            raise InputError(f"{path / MANIFEST_FILE}: {key}", getattr(manifest, key), str(value))
    listed = [layer.index for layer in manifest.layers]
    if sorted(listed) != sorted(set(layer_indices)):
        raise InputError(f"{path / MANIFEST_FILE}: layers", listed, str(sorted(set(layer_indices))))
    check_tree(path, manifest, hashes=verify_hashes)
    return manifest
