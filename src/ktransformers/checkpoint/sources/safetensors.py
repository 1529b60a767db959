"""The source for safetensors: a released directory, plain or quantised, and the merged files of kt-kernel's converter.

Tensors are grouped by their name without its ending (`checkpoint/matrix.py`); a group with packed values is one
quantized matrix, all other tensors are plain. The converter of kt-kernel renames tensors (`blk.3.` for
`model.layers.3.`, no leading `model.`); the Hugging Face names are restored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.checkpoint.encoded import Encoded, decode
from ktransformers.checkpoint.experts import (
    ExpertChunk,
    ExpertShape,
    check_experts,
    fused_matrix,
    fused_spec,
    read_experts,
)
from ktransformers.checkpoint.kt_files import BIAS_NAME, MERGED_NAME, plain_name, restored_names
from ktransformers.checkpoint.layout import ExpertTensors, find_experts, locate, parts
from ktransformers.checkpoint.matrix import ACTIVATIONS, DTYPES, ENDINGS, FLOATS, TensorRef, dimensions, recognise
from ktransformers.checkpoint.packed import is_packed, read_manifest
from ktransformers.checkpoint.quantisation import NONE, Quantisation
from ktransformers.checkpoint.recode import blocks, rows_of
from ktransformers.checkpoint.shards import Shards
from ktransformers.checkpoint.sources.kt_kernel import KTLayers
from ktransformers.checkpoint.sources.packed_linears import PackedLinears
from ktransformers.checkpoint.sources.source import LayerSource, PlainTensor
from ktransformers.ground.errors import InputError

SCALES = ("weight_scale_inv", "weight_scale", "scale", "scale_inv")
CODE_DTYPES = ("F8_E4M3", "F8_E5M2", "U8", "I8")


class SafetensorsSource:
    def __init__(self, path: Path, files: Iterable[str | Path], quantisation: Quantisation = NONE) -> None:
        self.path = path
        self._shards = Shards.of_directory(path) if not files else Shards(files)
        self._quantisation = quantisation
        merged = {name: match for name in self._shards.names if (match := MERGED_NAME.fullmatch(name))}
        biases = {name: match for name in self._shards.names if (match := BIAS_NAME.fullmatch(name))} if merged else {}
        self._converted = KTLayers.of_merged(self._shards, merged, biases) if merged else None
        self._renamed = self._names_of_converter() if merged else {}
        self._layers = find_experts(self._shards.names)
        self._experts = {name for tensors in self._layers for name in tensor_names(tensors)} | set(merged) | set(biases)
        self._linears = _packed_linears(path)
        left_out = self._experts | (self._linears.stored_names if self._linears is not None else set())
        self._rest_names = [name for name in self._shards.names if name not in left_out]
        self._quantised = _quantised(self._shards, self._rest_names)

    @property
    def files(self) -> list[Path]:
        return sorted({self._shards.file(name) for name in self._shards.names})

    @property
    def expert_roots(self) -> list[str]:
        if self._converted is not None:
            return self._converted.roots
        return [tensors.root for tensors in self._layers]

    @property
    def quantised(self) -> bool:
        return bool(self._quantised) or self._converted is not None or self._linears is not None

    def config(self) -> dict[str, Any] | None:
        return None

    def layer(self, module: str, shape: ExpertShape, interleaved: bool = False) -> LayerSource:
        if self._converted is not None:
            return self._converted.layer(module, shape)
        shards, tensors = self._shards, locate(self._layers, module)
        formats = check_experts(shards, tensors, shape, self._quantisation, interleaved)
        size = sum(_bytes(shards.ref(name)) for name in tensor_names(tensors))

        def chunks(experts: Sequence[int] | None = None) -> Iterator[ExpertChunk]:
            return read_experts(shards, tensors, shape, self._quantisation, interleaved, experts)

        def expert(index: int) -> ExpertChunk:
            return next(read_experts(shards, tensors, shape, self._quantisation, interleaved, [index]))

        return LayerSource(formats, size, chunks, expert)

    def rest(self) -> list[PlainTensor]:
        coded = {name for endings in self._quantised.values() for name in endings.values()}
        plain = [name for name in self._rest_names if name not in coded]
        dequantised = [self._dequantised(base, endings) for base, endings in self._quantised.items()]
        packed = [] if self._linears is None else self._linears.tensors()
        return [self._plain(name) for name in plain] + dequantised + packed

    def all_plain(self) -> list[PlainTensor]:
        """Every tensor of the model unquantised, experts and layers without a module (MTP) included, under the names of
        the release and in the order of its files."""
        if self._converted is not None:
            raise InputError(str(self.path), "kt-kernel's files", "the checkpoint that they were made from")
        by_name: dict[str, PlainTensor] = {}  # any part of a matrix -> the matrix
        for tensors in self._layers:
            for endings in parts(tensors.fused).values():
                by_name |= self._fused(endings)
        fused = {name for tensors in self._layers for name in tensors.fused.values()}
        for base, endings in _quantised(
            self._shards, (name for name in self._shards.names if name not in fused)
        ).items():
            by_name |= dict.fromkeys(endings.values(), self._dequantised(base, endings))
        kept: dict[str, PlainTensor] = {}
        for name in self._shards.names:
            if name in by_name:
                kept[by_name[name].name] = by_name[name]
            elif name not in fused and name.rpartition(".")[2] not in ACTIVATIONS:
                kept[name] = self._plain(name)
        return list(kept.values())

    def release(self) -> None:
        self._shards.release()

    def _names_of_converter(self) -> dict[str, str]:
        """Name in the file -> Hugging Face name, of those that `plain_name` does not restore."""
        renamed: dict[str, str] = {}
        for file in self.files:
            renamed |= restored_names(file, self._shards.metadata(file))
        return renamed

    def _name(self, name: str) -> str:
        """The Hugging Face name."""
        return name if self._converted is None else self._renamed.get(name) or plain_name(name)

    def _plain(self, name: str) -> PlainTensor:
        ref = self._shards.ref(name)
        if ref.dtype not in DTYPES:
            raise InputError(name, f"dtype {ref.dtype}", ", ".join(DTYPES))
        return PlainTensor(self._name(name), DTYPES[ref.dtype], ref.shape, lambda: self._shards.read_finite(name))

    def _dequantised(self, base: str, endings: Mapping[str, str]) -> PlainTensor:
        refs = {ending: self._shards.ref(name) for ending, name in endings.items()}
        shape_name = endings.get("weight_shape")
        rows, columns = (
            dimensions(refs, self._quantisation)
            if shape_name is None
            else self._shards.read(shape_name).flatten().tolist()
        )
        matrix = recognise(refs, rows, columns, self._quantisation)
        return PlainTensor(
            self._name(f"{base}.weight"),
            torch.bfloat16,
            (rows, columns),
            lambda: dequantise(matrix.build(self._shards.read_finite)),
            lambda: matrix.build(self._shards.read_finite),
            matrix.spec,
        )

    def _fused(self, endings: Mapping[str, str]) -> dict[str, PlainTensor]:
        """The tensors of one matrix of all experts -> what stands for them. Blocks of MXFP4 are output-major, and the
        parameter that they stand for is transposed."""
        shards, plain = self._shards, {}
        if "bias" in endings:
            plain[endings["bias"]] = self._plain(endings["bias"])
        used = {key: name for key, name in endings.items() if key not in ACTIVATIONS and key != "bias"}
        blocks = shards.ref(used["blocks"]) if "blocks" in used else None
        if blocks is None and "weight" not in used:
            raise InputError(next(iter(endings.values())), "no weight with it", "a quantized weight and its scales")
        if blocks is not None:
            name, stored = blocks.name.removesuffix("_blocks"), (*blocks.shape[:2], 32 * blocks.shape[2])
        else:
            name, stored = used["weight"], shards.shape(used["weight"])
        if fused_spec(shards, used, stored, transposed=False) == "bf16":
            return plain | {name: self._plain(name)}
        shape = stored if blocks is None else (stored[0], stored[2], stored[1])

        def read() -> Tensor:
            result = torch.empty(shape, dtype=torch.bfloat16)
            for expert in range(shape[0]):
                matrix = dequantise(fused_matrix(shards, used, expert, transposed=False))
                result[expert] = matrix if blocks is None else matrix.T
            return result

        return plain | dict.fromkeys(used.values(), PlainTensor(name, torch.bfloat16, shape, read))


def _packed_linears(path: Path) -> PackedLinears | None:
    """Of a packed directory with quantized linear layers."""
    if not is_packed(path):
        return None
    manifest = read_manifest(path)
    return PackedLinears.open(path, manifest) if manifest.linears else None


def dequantise(matrix: Tensor | Encoded) -> Tensor:
    """A matrix in bf16 if it was quantised, else unchanged; in blocks of rows, because decoding goes through float32,
    which is twice as large."""
    if isinstance(matrix, Tensor):
        return matrix
    out = torch.empty(matrix.rows, matrix.columns, dtype=torch.bfloat16, device=matrix.qweight.device)
    for first, last in blocks(matrix.rows, matrix.columns):
        block = rows_of(matrix, first, last)
        assert isinstance(block, Encoded)
        out[first:last] = decode(block)[0]
    return out


def tensor_names(tensors: ExpertTensors) -> Iterator[str]:
    yield from tensors.fused.values()
    for roles in tensors.single.values():
        yield from roles.values()


def _quantised(shards: Shards, names: Iterable[str]) -> Mapping[str, dict[str, str]]:
    """Quantised matrices: name without ending -> ending -> name."""
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        base, _, ending = name.rpartition(".")
        if ending in ENDINGS and base:
            groups.setdefault(base, {})[ending] = name
    return {base: endings for base, endings in groups.items() if _is_quantised(shards, endings)}


def _is_quantised(shards: Shards, endings: Mapping[str, str]) -> bool:
    if "qweight" in endings or "weight_packed" in endings:
        return True
    if "weight" not in endings:
        return False
    weight = shards.ref(endings["weight"])
    if weight.dtype in FLOATS or len(weight.shape) != 2:
        return False
    if weight.dtype.startswith("F8") and not any(ending in endings for ending in SCALES):
        raise weight.refuse(f"{' or '.join(FLOATS)}, or a scale with it")
    return weight.dtype in CODE_DTYPES and any(ending in endings for ending in SCALES)


def _bytes(ref: TensorRef) -> int:
    elements = torch.Size(ref.shape).numel()
    return elements * DTYPES[ref.dtype].itemsize if ref.dtype in DTYPES else elements
