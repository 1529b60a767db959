"""The source for experts of kt-kernel's converter: INT8 and INT4, as a tree of `.kt` files or merged into safetensors.

The bytes are AMX tiles, partitioned for P NUMA nodes: gate and up by rows, down by columns. The files carry no
metadata, so every size is checked against the model's shape, which also distinguishes INT4 from INT8. Blocks of 64
(INT8) or 128 (INT4) rows by 3584 columns hold steps of 32 rows by 64 bytes, two tiles of 16 rows each, in which 32-bit
words are transposed; a byte of INT4 has the columns j and j + 64 of a step. Values are q s for INT8 and 16 q s for
INT4, q from -7 to 7. Each row of a part has one scale, so with P > 1 a row of down has P scales: INT4 then has groups
of I/P columns, and INT8, for which no such format exists, is dequantised, at twice the bytes and without loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from ktransformers.checkpoint.encoded import Encoded, pair_nibbles
from ktransformers.checkpoint.experts import ExpertChunk, ExpertShape
from ktransformers.checkpoint.layout import PLACE
from ktransformers.checkpoint.shards import Shards
from ktransformers.checkpoint.sources.source import LayerSource, PlainTensor
from ktransformers.errors import InputError

MERGED_NAME = re.compile(
    r"blk\.(?P<layer>\d+)\.ffn_(?P<role>gate|up|down)_exps\.(?P<expert>\d+)\.numa\.(?P<part>\d+)\.(?P<kind>weight|scale)"
)
TREE_FILE_NAME = re.compile(
    r"(?P<method>MOE_INT4|MOE_INT8|INT4|INT8|BF16)_(?P<role>gate|up|down)(?P<back>_bwd)?_(?P<expert>\d+)_(?P<bytes>\d+)Byte_"
    r"(?P<kind>quant|scale)_\.kt"
)
ROWS, BYTES, K_BLOCK = 32, 64, 3584  # of a step; columns of a block
N_BLOCK = {"int8": 64, "int4": 128}
K_STEP = {"int8": 64, "int4": 128}


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

    @classmethod
    def of_merged(cls, shards: Shards, names: Mapping[str, re.Match[str]]) -> KTLayers:
        layers: dict[int, Parts] = {}
        for name, match in names.items():
            kind = "quant" if match["kind"] == "weight" else "scale"
            ref = shards.ref(name)
            if len(ref.shape) != 1 or ref.dtype not in {"quant": ("I8", "U8"), "scale": ("F32",)}[kind]:
                raise ref.refuse("one dimension, I8 for weights and F32 for scales")
            size = ref.shape[0] * (4 if kind == "scale" else 1)
            key = (match["role"], int(match["expert"]), int(match["part"]), kind)

            def read(name: str = name) -> Tensor:
                return shards.read(name).view(torch.uint8)

            layers.setdefault(int(match["layer"]), {})[key] = StoredMatrix(name, size, read)
        return cls(str(shards.file(next(iter(names))).parent), layers)

    @classmethod
    def of_tree(cls, directory: Path) -> KTLayers:
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

                def read(file: Path = file) -> Tensor:
                    return torch.from_numpy(numpy.fromfile(file, dtype=numpy.uint8))

                key = (match["role"], int(match["expert"]), numa, match["kind"])
                layers.setdefault(layer, {})[key] = StoredMatrix(str(file), size, read)
        if not layers:
            raise InputError(str(directory), "no _layer_N/_numa_P/*.kt in it", "a directory of kt-kernel's converter")
        return cls(str(directory), layers)

    @property
    def roots(self) -> list[str]:
        return [f"model.layers.{layer}.mlp" for layer in sorted(self.parts)]

    def layer(self, module: str, shape: ExpertShape) -> LayerSource:
        match = PLACE.fullmatch(module)
        number = int(match["layer"]) if match else -1
        if number not in self.parts:
            raise InputError(module, f"no layer {number} in {self.path}", f"layers {sorted(self.parts)}")
        if shape.biased or not shape.gated:
            raise InputError(module, "experts with biases or without a gate", "what kt-kernel's converter writes")
        parts = self.parts[number]
        count = 1 + max(part for _, _, part, _ in parts)
        beyond = [key for key in parts if key[1] >= shape.num_experts]
        if beyond:
            raise InputError(parts[beyond[0]].name, f"expert {beyond[0][1]}", f"{shape.num_experts} experts")
        formats = {role: self._check(parts, module, role, count, shape) for role in shape.matrices()}
        size = sum(part.bytes for part in parts.values())

        def chunks() -> Iterator[ExpertChunk]:
            for expert in range(shape.num_experts):
                tensors: dict[str, Tensor | Encoded] = {
                    role: _matrix(parts, role, expert, count, *shape.matrices()[role], formats[role])
                    for role in shape.matrices()
                }
                yield ExpertChunk(expert, False, tensors)

        return LayerSource(formats, size, chunks)

    def _check(self, parts: Parts, module: str, role: str, count: int, shape: ExpertShape) -> str:
        """Check the sizes of all experts' parts and return their format."""
        rows, columns = shape.matrices()[role]
        divided = rows if role != "down" else columns
        if divided % count:
            given = f"{role} in {count} NUMA parts of {divided}"
            raise InputError(module, given, "equal parts", "the files are of another model")
        n, k = (rows // count, columns) if role != "down" else (rows, columns // count)
        methods = {"int8": n * k, "int4": n * k // 2}
        first = parts.get((role, 0, 0, "quant"))
        method = next((name for name, size in methods.items() if first and first.bytes == size), None)
        if first is None or method is None:
            given = "no such part" if first is None else f"{first.bytes} bytes"
            where = f"{module}: {role} of expert 0, part 0" if first is None else first.name
            expected = f"{methods['int8']} (INT8) or {methods['int4']} (INT4) for {n} x {k} in {count} NUMA parts"
            raise InputError(where, given, expected, "the files are of another model or cut short")
        if n % ROWS or k % K_STEP[method]:
            raise InputError(first.name, f"{n} x {k}", f"multiples of {ROWS} x {K_STEP[method]}")
        for expert in range(shape.num_experts):
            for part in range(count):
                for kind, size in (("quant", methods[method]), ("scale", 4 * n)):
                    stored = parts.get((role, expert, part, kind))
                    if stored is None:
                        where = f"{module}: {role} of expert {expert}, NUMA part {part}, {kind}"
                        raise InputError(where, f"nothing in {self.path}", f"{size} bytes")
                    if stored.bytes != size:
                        raise InputError(stored.name, f"{stored.bytes} bytes", f"{size} for {n} x {k}")
        one_scale_per_row = role != "down" or count == 1
        if method == "int8":
            return "int8" if one_scale_per_row else "bf16"
        return "int4:0:f32" if one_scale_per_row else f"int4:{k}:f32"


def untile(data: Tensor, n: int, k: int, method: str) -> Tensor:
    """Codes int8 `[n, k]` from the converter's tiles."""
    block, step = N_BLOCK[method], K_STEP[method]
    per_byte = step // BYTES
    result = torch.empty(n, k, dtype=torch.int8)
    source = data.view(torch.int8)
    for nb in range(0, n, block):
        nbs = min(block, n - nb)
        for kb in range(0, k, K_BLOCK):
            kbs = min(K_BLOCK, k - kb)
            start = (nb * k + kb * nbs) // per_byte
            tiles = source[start : start + nbs * kbs // per_byte]
            # [row steps, column steps, 2 tiles, 16 words, 16 rows, 4 bytes] -> rows, then columns in bytes
            steps = tiles.view(nbs // ROWS, kbs // step, 2, 16, 16, 4).permute(0, 2, 4, 1, 3, 5)
            rows = steps.reshape(nbs, kbs // step, BYTES)
            if per_byte == 2:
                rows = torch.cat([(rows << 4) >> 4, rows >> 4], dim=-1)
            result[nb : nb + nbs, kb : kb + kbs] = rows.reshape(nbs, kbs)
    return result


def _matrix(parts: Parts, role: str, expert: int, count: int, rows: int, columns: int, spec: str) -> Tensor | Encoded:
    n, k = (rows // count, columns) if role != "down" else (rows, columns // count)
    method = "int4" if spec.startswith("int4") else "int8"
    stored = [(parts[(role, expert, part, "quant")], parts[(role, expert, part, "scale")]) for part in range(count)]
    codes = [untile(quant.read(), n, k, method) for quant, _ in stored]
    scales = [scale.read().view(torch.float32) for _, scale in stored]
    dim = 0 if role != "down" else 1
    name = stored[0][0].name
    joined = torch.cat(codes, dim)
    if method == "int4":
        grouped = torch.cat(scales)[:, None] if dim == 0 else torch.stack(scales, 1)
        nibbles = joined.add_(8).view(torch.uint8)
        return Encoded(spec, pair_nibbles(nibbles)[None], (grouped * 16)[None], columns=columns, name=name)
    if spec == "bf16":
        return joined.float() * torch.stack(scales, 1).repeat_interleave(k, 1)
    return Encoded("int8", joined[None], torch.cat(scales)[None], columns=columns, name=name)


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
