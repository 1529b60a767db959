"""The source for experts of kt-kernel's converter: INT8 and INT4, as a tree of `.kt` files or merged into safetensors.

The bytes are AMX tiles (`checkpoint/kt_codes.py`), partitioned for P NUMA nodes: gate and up by rows, down by columns.
kt-kernel's own files carry no metadata, so every size is checked against the model's shape, which also distinguishes
INT4 from INT8; files of `kt quant --layout kt-kernel` do (`checkpoint/kt_files.py`) and are held to it. Each row of a
part has one scale, so with P > 1 a row of down has P scales, which are groups of I/P columns here. Matrices for
backward are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from ktransformers.checkpoint.encoded import Encoded
from ktransformers.checkpoint.experts import ExpertChunk, ExpertShape
from ktransformers.checkpoint.finite import all_finite
from ktransformers.checkpoint.kt_codes import ROWS, TILE_FORMATS, TileFormat, divided, encoded_of, spec_of, untile
from ktransformers.checkpoint.kt_files import (
    REMEDY,
    TREE_FILE_NAME,
    KTHeader,
    check_tree,
    read_kt_header,
    read_kt_manifest,
)
from ktransformers.checkpoint.layout import PLACE
from ktransformers.checkpoint.shards import Shards
from ktransformers.checkpoint.sources.source import LayerSource, PlainTensor
from ktransformers.ground.errors import InputError


@dataclass(frozen=True)
class StoredMatrix:
    """The bytes of one NUMA part of a matrix, read on demand."""

    name: str
    bytes: int
    read: Callable[[], Tensor]  # uint8, 1-D


Parts = dict[tuple[str, int, int, str], StoredMatrix]  # (role, expert, NUMA part, "quant" or "scale")


@dataclass(frozen=True)
class KTLayers:
    """The converter's layers, in a tree of files or in merged safetensors."""

    path: str
    parts: Mapping[int, Parts]
    recorded: KTHeader | None = None  # by the files of kt quant
    biases: Mapping[tuple[int, str, int], Callable[[], Tensor]] = field(default_factory=dict)  # (layer, role, expert)

    @classmethod
    def of_merged(
        cls, shards: Shards, names: Mapping[str, re.Match[str]], biases: Mapping[str, re.Match[str]]
    ) -> KTLayers:
        layers: dict[int, Parts] = {}
        for name, match in names.items():
            if match["back"]:
                continue
            kind = "quant" if match["kind"] == "weight" else "scale"
            ref = shards.ref(name)
            if len(ref.shape) != 1 or ref.dtype not in {"quant": ("I8", "U8"), "scale": ("F32",)}[kind]:
                raise ref.refuse("one dimension, I8 for weights and F32 for scales")
            size = ref.shape[0] * (4 if kind == "scale" else 1)
            key = (match["role"], int(match["expert"]), int(match["part"]), kind)

            def read(name: str = name) -> Tensor:
                return shards.read_finite(name).view(torch.uint8)

            layers.setdefault(int(match["layer"]), {})[key] = StoredMatrix(name, size, read)
        by_expert = {
            (int(match["layer"]), match["role"], int(match["expert"])): partial(shards.read_finite, name)
            for name, match in biases.items()
        }
        return cls(str(shards.file(next(iter(names))).parent), layers, _recorded(shards, names), by_expert)

    @classmethod
    def of_tree(cls, directory: Path) -> KTLayers:
        manifest = read_kt_manifest(directory)
        if manifest is not None:
            check_tree(directory, manifest)
        layers: dict[int, Parts] = {}
        for folder in directory.glob("_layer_*/_numa_*"):
            layer, numa = int(folder.parent.name.removeprefix("_layer_")), int(folder.name.removeprefix("_numa_"))
            for file in folder.glob("*.kt"):
                match = TREE_FILE_NAME.fullmatch(file.name)
                if match is None:
                    raise InputError(str(file), "a name that is not known", "INT8_gate_0_1024Byte_quant_.kt and so on")
                if match["back"]:
                    continue
                if match["method"] not in ("INT4", "INT8"):
                    raise InputError(str(file), match["method"], "INT4 or INT8", "convert the checkpoint with them")
                size = file.stat().st_size
                if size != int(match["bytes"]):
                    raise InputError(str(file), f"{size} bytes", f"{match['bytes']}, as its name says", "convert again")

                def read(file: Path = file, scales: bool = match["kind"] == "scale") -> Tensor:
                    data = torch.from_numpy(numpy.fromfile(file, dtype=numpy.uint8))
                    if scales and len(data) % 4 == 0 and not all_finite(data.view(torch.float32)):
                        raise InputError(str(file), "NaN or infinite numbers", "finite scales", "convert again")
                    return data

                key = (match["role"], int(match["expert"]), numa, match["kind"])
                layers.setdefault(layer, {})[key] = StoredMatrix(str(file), size, read)
        if not layers:
            raise InputError(str(directory), "no _layer_N/_numa_P/*.kt in it", "a directory of kt-kernel's converter")
        return cls(str(directory), layers, None if manifest is None else manifest.header)

    @property
    def roots(self) -> list[str]:
        return [f"model.layers.{layer}.mlp" for layer in sorted(self.parts)]

    def layer(self, module: str, shape: ExpertShape) -> LayerSource:
        match = PLACE.fullmatch(module)
        number = int(match["layer"]) if match else -1
        if number not in self.parts:
            raise InputError(module, f"no layer {number} in {self.path}", f"layers {sorted(self.parts)}")
        if not shape.gated:
            raise InputError(module, "experts without a gate", "what kt-kernel's converter writes")
        biases = {key: read for key, read in self.biases.items() if key[0] == number}
        roles = shape.matrices() if shape.biased else ()
        if biases.keys() != {(number, role, expert) for role in roles for expert in range(shape.num_experts)}:
            given = f"{len(biases)} biases in {self.path}"
            raise InputError(module, given, f"{len(roles) * shape.num_experts}", REMEDY)
        parts = self.parts[number]
        count = 1 + max(part for _, _, part, _ in parts)
        beyond = [key for key in parts if key[1] >= shape.num_experts]
        if beyond:
            raise InputError(parts[beyond[0]].name, f"expert {beyond[0][1]}", f"{shape.num_experts} experts")
        self._check_recorded(module, count, shape)
        forms = {role: self._check(parts, module, role, count, shape) for role in shape.matrices()}
        formats = {
            role: spec_of(forms[role].bits, columns, count if role == "down" else 1)
            for role, (_, columns) in shape.matrices().items()
        }
        size = sum(part.bytes for part in parts.values())

        def chunks(experts: Sequence[int] | None = None) -> Iterator[ExpertChunk]:
            for expert in range(shape.num_experts) if experts is None else experts:
                tensors: dict[str, Tensor | Encoded] = {
                    role: _matrix(parts, role, expert, count, *shape.matrices()[role], forms[role].bits)
                    for role in shape.matrices()
                }
                tensors |= {f"{role}_bias": biases[number, role, expert]() for role in roles}
                yield ExpertChunk(expert, False, tensors)

        return LayerSource(formats, size, chunks)

    def _check_recorded(self, module: str, count: int, shape: ExpertShape) -> None:
        """Hold the files to what they record of themselves."""
        if self.recorded is None:
            return
        wanted = (count, shape.num_experts, shape.hidden, shape.intermediate)
        given = (self.recorded.parts, self.recorded.experts, self.recorded.hidden, self.recorded.intermediate)
        for name, number, expected in zip(
            ("threadpool_count", "expert_num", "hidden_size", "intermediate_size"), given, wanted, strict=True
        ):
            if number != expected:
                raise InputError(f"{self.path}: {name}", f"{number} recorded", f"{expected} for {module}", REMEDY)

    def _check(self, parts: Parts, module: str, role: str, count: int, shape: ExpertShape) -> TileFormat:
        """Check the sizes of all experts' parts and return their format."""
        rows, columns = shape.matrices()[role]
        cut = rows if role != "down" else columns
        if cut % count:
            given = f"{role} in {count} NUMA parts of {cut}"
            raise InputError(module, given, "equal parts", "the files are of another model")
        n, k = divided(role, rows, columns, count)
        first = parts.get((role, 0, 0, "quant"))
        form = next((form for form in TILE_FORMATS.values() if first and first.bytes == form.bytes(n, k)), None)
        if first is None or form is None:
            given = "no such part" if first is None else f"{first.bytes} bytes"
            where = f"{module}: {role} of expert 0, part 0" if first is None else first.name
            sizes = " or ".join(f"{form.bytes(n, k)} ({form.name})" for form in TILE_FORMATS.values())
            expected = f"{sizes} for {n} x {k} in {count} NUMA parts"
            raise InputError(where, given, expected, "the files are of another model or cut short")
        if self.recorded is not None and self.recorded.bits != form.bits:
            raise InputError(first.name, form.name, f"{TILE_FORMATS[self.recorded.bits].name}, as recorded", REMEDY)
        if n % ROWS or k % form.k_step:
            raise InputError(first.name, f"{n} x {k}", f"multiples of {ROWS} x {form.k_step}")
        for expert in range(shape.num_experts):
            for part in range(count):
                for kind, size in (("quant", form.bytes(n, k)), ("scale", 4 * n)):
                    stored = parts.get((role, expert, part, kind))
                    if stored is None:
                        where = f"{module}: {role} of expert {expert}, NUMA part {part}, {kind}"
                        raise InputError(where, f"nothing in {self.path}", f"{size} bytes")
                    if stored.bytes != size:
                        raise InputError(stored.name, f"{stored.bytes} bytes", f"{size} for {n} x {k}")
        return form


def _recorded(shards: Shards, names: Mapping[str, re.Match[str]]) -> KTHeader | None:
    """What the headers of the shards say, which is the same in all of them or in none."""
    files = {shards.file(name) for name in names}
    headers = {file: read_kt_header(file, shards.metadata(file)) for file in sorted(files)}
    different = {header: file for file, header in headers.items()}
    if len(different) > 1:
        first, second, *_ = different.values()
        raise InputError(str(second), f"it in the directory of {first.name}", "shards of one conversion", REMEDY)
    return next(iter(different))


def _matrix(parts: Parts, role: str, expert: int, count: int, rows: int, columns: int, bits: int) -> Encoded:
    n, k = divided(role, rows, columns, count)
    stored = [(parts[(role, expert, part, "quant")], parts[(role, expert, part, "scale")]) for part in range(count)]
    qweight = [untile(quant.read(), n, k, bits) for quant, _ in stored]
    scales = [scale.read().view(torch.float32) for _, scale in stored]
    name = stored[0][0].name
    if role == "down":
        return encoded_of(torch.cat(qweight, 1)[None], torch.stack(scales, 1)[None], bits, name)
    return encoded_of(torch.cat(qweight)[None], torch.cat(scales)[None, :, None], bits, name)


class TreeSource:
    """The tree of `.kt` files that the converter writes: experts alone, no other weights."""

    quantised = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._layers = KTLayers.of_tree(path)

    @property
    def files(self) -> list[Path]:
        return sorted(self.path.glob("_layer_*/_numa_*/*.kt"))

    @property
    def expert_roots(self) -> list[str]:
        return self._layers.roots

    def config(self) -> dict[str, Any] | None:
        return None

    def layer(self, module: str, shape: ExpertShape, interleaved: bool = False) -> LayerSource:
        return self._layers.layer(module, shape)

    def rest(self) -> list[PlainTensor]:
        return []

    def release(self) -> None:
        """Does nothing: files are read one at a time and not kept open."""
