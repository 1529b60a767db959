"""A source of GGUF: one file, a split set, or a directory with either; types may differ from tensor to tensor.

Experts are views of the mapped file, block by block; both the stacked tensors (`ffn_gate_exps`) and the older ones of
single experts (`ffn_gate.7`) are read. Formats whose values and scales are separate tensors elsewhere (MXFP4) are
rearranged, because their blocks hold the scale before the values and pair column j with j + 16. All other tensors are
decoded by the `gguf` package when they are read, under their Hugging Face names (`gguf_names.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.checkpoint.encoded import GGUF_BLOCKS, Encoded, pair_nibbles
from ktransformers.checkpoint.experts import ExpertChunk, ExpertShape, Formats
from ktransformers.checkpoint.layout import PLACE
from ktransformers.checkpoint.sources.gguf_config import Keys, config_of
from ktransformers.checkpoint.sources.gguf_header import BLOCKS, FORMATS, GGUFTensor, read_header
from ktransformers.checkpoint.sources.gguf_names import (
    NAME,
    family_of,
    hugging_face,
    is_expert,
    is_left_out,
    join_kv,
    unpermute,
)
from ktransformers.checkpoint.sources.safetensors import dequantise
from ktransformers.checkpoint.sources.source import LayerSource, PlainTensor
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import short

SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
# Formats whose blocks hold a header and nibbles, which are separate tensors in `Encoded`.
SEPARATE = {row["name"]: row for row in FORMATS.values() if not row["block_bytes"]}
# Where in a block the half floats are that scale it: docs of GGUF's block types. Those of iq1_m and mxfp4 are apart.
HALF_SCALES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("q8_0", "q4_0", "q5_0", "iq4_nl", "iq4_xs", "iq1_s"), (0,)),
    **dict.fromkeys(("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q6_k": (208,),
    "tq2_0": (64,),
    "tq1_0": (52,),
    "iq1_m": (),
    "mxfp4": (),
}
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}


def gguf_files(path: Path) -> list[Path]:
    """The files of one model; an empty list without GGUF files."""
    if path.is_file() and path.suffix == ".gguf":
        split = SPLIT.fullmatch(path.name)
        return [path] if split is None else _parts(path.parent, split["stem"], int(split["count"]))
    files = [file for file in sorted(path.glob("*.gguf")) if not file.name.startswith("mmproj")]
    sets = {SPLIT.sub(r"\g<stem>-of-\g<count>", file.name): file for file in files}
    if len(sets) > 1:
        names = ", ".join(file.name for file in sets.values())
        raise InputError(str(path), f"several models ({names})", "one", "name the file itself")
    return gguf_files(files[0]) if files else []


def _parts(directory: Path, stem: str, count: int) -> list[Path]:
    files = [directory / f"{stem}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise InputError(str(file), "no such file", f"all {count} parts of {stem}", "download it again")
    return files


class GGUFSource:
    quantised = True  # as stock transformers sees it, whatever the types

    def __init__(self, path: Path, files: list[Path]) -> None:
        self.path = path
        self._files = files
        self._maps: dict[Path, Tensor] = {}
        self._tensors: dict[str, GGUFTensor] = {}
        self.fields: dict[str, Any] = {}
        for file in files:
            header = read_header(file)
            self.fields = header.fields | self.fields
            for tensor in header.tensors:
                if tensor.name in self._tensors:
                    first = self._tensors[tensor.name].file.name
                    raise InputError(tensor.name, f"it in {first} and in {file.name}", "it in one file")
                self._tensors[tensor.name] = tensor
        if not self._tensors:
            raise InputError(str(path), "no tensors in it", "a model")
        expected = self.fields.get("split.tensors.count", len(self._tensors))
        if expected != len(self._tensors):
            raise InputError(str(path), f"{len(self._tensors)} tensors", f"{short(expected)}, as the first part says")

    @property
    def files(self) -> list[Path]:
        return list(self._files)

    @property
    def expert_roots(self) -> list[str]:
        numbers = {int(name.split(".")[1]) for name in self._tensors if is_expert(name)}
        return [f"model.layers.{number}.mlp" for number in sorted(numbers)]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def config(self) -> dict[str, Any] | None:
        return config_of(str(self.path), self.fields, self.shapes)

    def layer(self, module: str, shape: ExpertShape, interleaved: bool = False) -> LayerSource:
        place = PLACE.fullmatch(module)
        number = int(place["layer"]) if place else -1
        formats: Formats = {}
        used: list[GGUFTensor] = []
        for role, size in shape.matrices().items():
            tensors = self._expert_tensors(module, number, role, shape.num_experts, size)
            formats[role] = _spec(tensors[0])
            for tensor in tensors:
                if _spec(tensor) != formats[role]:
                    raise InputError(tensor.name, tensor.kind, f"{formats[role]}, as the experts before it")
            used += tensors
            bias = self._tensors.get(f"blk.{number}.ffn_{role}_exps.bias")
            if shape.biased != (bias is not None):
                given = "no bias" if bias is None else "a bias"
                raise InputError(f"blk.{number}.ffn_{role}_exps", given, "as the model has it")
            if bias is not None and (bias.shape != (shape.num_experts, size[0]) or bias.kind not in FLOATS):
                expected = f"floats {[shape.num_experts, size[0]]}"
                raise InputError(bias.name, f"{bias.kind} {list(bias.shape)}", expected)

        def pieces(experts: Sequence[int] | None = None) -> Iterator[ExpertChunk]:
            return self._pieces(number, shape, range(shape.num_experts) if experts is None else experts)

        return LayerSource(formats, sum(tensor.bytes for tensor in used), pieces)

    def _expert_tensors(
        self, module: str, number: int, role: str, experts: int, size: tuple[int, int]
    ) -> list[GGUFTensor]:
        stacked = f"blk.{number}.ffn_{role}_exps.weight"
        names = (
            [stacked] if stacked in self._tensors else [f"blk.{number}.ffn_{role}.{e}.weight" for e in range(experts)]
        )
        for name in names:
            if name not in self._tensors:
                raise InputError(module, f"neither {stacked} nor {name} in {self.path}", "its experts")
            expected = (experts, *size) if name == stacked else size
            given = self._tensors[name].shape
            if given != expected:
                raise InputError(name, f"shape {list(given)}", f"{list(expected)}, as the configuration says")
        return [self._tensors[name] for name in names]

    def _pieces(self, number: int, shape: ExpertShape, experts: Sequence[int]) -> Iterator[ExpertChunk]:
        """One expert at a time."""
        for expert in experts:
            tensors: dict[str, Tensor | Encoded] = {}
            for role in shape.matrices():
                stacked = self._tensors.get(f"blk.{number}.ffn_{role}_exps.weight")
                alone = self._tensors.get(f"blk.{number}.ffn_{role}.{expert}.weight")
                tensors[role] = self._matrix(stacked, expert) if stacked else self._matrix(alone, 0)
                bias = self._tensors.get(f"blk.{number}.ffn_{role}_exps.bias")
                if bias is not None:
                    tensors[f"{role}_bias"] = self._numbers(bias)[expert]
            yield ExpertChunk(expert, False, tensors)

    def _matrix(self, tensor: GGUFTensor | None, expert: int) -> Tensor | Encoded:
        assert tensor is not None
        rows, columns = tensor.shape[-2:]
        if tensor.kind in FLOATS:
            stacked = self._bytes(tensor).view(FLOATS[tensor.kind]).reshape(-1, rows, columns)
            return _require_finite(tensor, stacked[expert])
        data = self._bytes(tensor).reshape(*(tensor.shape[:-1] if len(tensor.shape) == 3 else (1, rows)), -1)
        return _encoded(tensor, data[expert][None], columns)

    def rest(self) -> list[PlainTensor]:
        family = family_of(str(self.path), str(self.fields.get("general.architecture")))
        heads = {"attn_q": self._heads("head_count"), "attn_k": self._heads("head_count_kv")} if family.permuted else {}
        tensors = []
        for name, tensor in self._tensors.items():
            leaf = match["leaf"] if (match := NAME.fullmatch(name)) else ""
            if is_expert(name) or is_left_out(name) or leaf == "attn_v_b":
                continue
            tensors.append(self._plain(hugging_face(name, family), tensor, leaf, heads.get(leaf)))
        return tensors

    def release(self) -> None:
        self._maps.clear()

    def _heads(self, key: str) -> int:
        keys = Keys(str(self.path), self.fields, {})
        return keys.size(f"attention.{key}", keys.size("attention.head_count"))

    def _plain(self, name: str, tensor: GGUFTensor, leaf: str, heads: int | None) -> PlainTensor:
        dtype, shape = FLOATS.get(tensor.kind, torch.bfloat16), tensor.shape
        values = self._tensors.get(tensor.name.replace("attn_k_b", "attn_v_b")) if leaf == "attn_k_b" else None
        if leaf == "ffn_gate_inp_shexp" and len(shape) == 1:
            shape = (1, *shape)
        if heads is not None and (len(shape) not in (1, 2) or shape[0] % (2 * heads)):
            raise InputError(f"{tensor.file}: {tensor.name}", f"shape {list(shape)}", f"rows of {heads} heads")
        if leaf == "attn_k_b" and values is None:
            raise InputError(f"{tensor.file}: {tensor.name}", "no attn_v_b with it", "keys and values")
        if values is not None:
            if len(shape) != 3 or len(values.shape) != 3 or (shape[0], shape[1]) != (values.shape[0], values.shape[2]):
                given = f"shape {list(shape)} with {list(values.shape)} of {values.name}"
                raise InputError(f"{tensor.file}: {tensor.name}", given, "[heads, rank, nope] and [heads, v, rank]")
            shape = (tensor.shape[0] * (tensor.shape[2] + values.shape[1]), tensor.shape[1])

        def read() -> Tensor:
            numbers = self._numbers(tensor)
            if values is not None:
                numbers = join_kv(numbers, self._numbers(values).to(dtype))
            elif heads is not None:
                numbers = unpermute(numbers, heads)
            return numbers.reshape(shape)

        def quantized() -> Encoded:
            rows = self._bytes(tensor).reshape(shape[0], -1)
            return _encoded(tensor, (rows if heads is None else unpermute(rows, heads))[None], shape[1])

        is_packed = tensor.kind not in FLOATS and len(shape) == 2 and values is None
        return PlainTensor(name, dtype, shape, read, quantized if is_packed else None, tensor.kind if is_packed else "")

    def _numbers(self, tensor: GGUFTensor) -> Tensor:
        """Floats as they are, everything else in bf16."""
        data = self._bytes(tensor)
        if tensor.kind in FLOATS:
            return _require_finite(tensor, data.view(FLOATS[tensor.kind]).reshape(tensor.shape))
        columns = tensor.shape[-1]
        rows = torch.Size(tensor.shape[:-1]).numel()
        return dequantise(_encoded(tensor, data.reshape(1, rows, -1), columns)).reshape(tensor.shape)

    def _bytes(self, tensor: GGUFTensor) -> Tensor:
        if tensor.file not in self._maps:
            size = tensor.file.stat().st_size
            self._maps[tensor.file] = torch.from_file(str(tensor.file), shared=False, size=size, dtype=torch.uint8)
        return self._maps[tensor.file][tensor.offset : tensor.offset + tensor.bytes]


def _require_finite(tensor: GGUFTensor, numbers: Tensor) -> Tensor:
    if not math.isfinite(float(numbers.sum(dtype=torch.float64))):
        raise _not_finite(tensor, "numbers")
    return numbers


def _not_finite(tensor: GGUFTensor, what: str) -> InputError:
    given = f"{tensor.kind} with {what} that are NaN or infinite"
    return InputError(f"{tensor.file}: {tensor.name}", given, "finite numbers", "the file is damaged")


def _check_scales(tensor: GGUFTensor, data: Tensor) -> None:
    if tensor.kind not in BLOCKS or tensor.kind not in HALF_SCALES:
        return
    blocks = data.reshape(-1, BLOCKS[tensor.kind][1])
    if tensor.kind == "mxfp4":
        bad = blocks[:, 0] == 255  # e8m0: 255 is NaN
    elif tensor.kind == "iq1_m":  # the exponent of its half float: a nibble of the last scale, a bit of the one before
        bad = (blocks[:, 55] & 0x70 == 0x70) & (blocks[:, 53] & 0xC0 == 0xC0)
    else:
        bad = torch.zeros(len(blocks), dtype=torch.bool)
        for offset in HALF_SCALES[tensor.kind]:
            bad |= blocks[:, offset + 1] & 0x7C == 0x7C  # all bits of the exponent of a half float
    if bool(bad.any()):
        raise _not_finite(tensor, "scales")


def _spec(tensor: GGUFTensor) -> str:
    return "bf16" if tensor.kind in FLOATS else tensor.kind


def _encoded(tensor: GGUFTensor, data: Tensor, columns: int) -> Encoded:
    """`[E, N, bytes]` of blocks. Scales that are no numbers are refused: one of them makes every answer NaN."""
    _check_scales(tensor, data)
    if tensor.kind in GGUF_BLOCKS:
        return Encoded(tensor.kind, data, None, columns=columns, name=tensor.name)
    if tensor.kind not in SEPARATE:
        raise InputError(tensor.name, f"type {tensor.kind}", "floats or one of " + ", ".join([*GGUF_BLOCKS, *SEPARATE]))
    header = SEPARATE[tensor.kind]["header_bytes"]
    blocks = data.reshape(*data.shape[:2], -1, BLOCKS[tensor.kind][1])
    low_then_high = torch.cat([blocks[..., header:] & 15, blocks[..., header:] >> 4], dim=-1)
    scales = blocks[..., :header].flatten(-2).contiguous()
    return Encoded(tensor.kind, pair_nibbles(low_then_high).flatten(-2), scales, columns=columns, name=tensor.name)
