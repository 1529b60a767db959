"""Reads the experts that kt-kernel saves after training their base weights (`kt_train_mode: full`).

A directory holds `kt_full_experts.index.json` and one safetensors file for each layer, with gate_proj and up_proj
`[E, I, H]` and down_proj `[E, H, I]` in bf16. Such experts are frozen here: they are a source of weights, given as
`kt_weight_path`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel
from torch import Tensor

from kt_kernel.sft.errors import KTArtifactError
from ktransformers.checkpoint import Encoded, ExpertChunk, ExpertShape, Shards
from ktransformers.ground.files import read_json_object, validate

INDEX_FILE = "kt_full_experts.index.json"


class FullExpertsLayer(BaseModel):
    file: str
    size_bytes: int | None = None


class FullExpertsIndex(BaseModel):
    format: Literal["kt_full_experts"]
    version: Literal[1]
    dtype: Literal["BF16"]
    layers: dict[int, FullExpertsLayer]


def has_full_experts(directory: Path) -> bool:
    return (directory / INDEX_FILE).is_file()


def read_full_experts(directory: Path, layer_idx: int, shape: ExpertShape) -> ExpertChunk:
    """Gate, up and down of all experts of a layer, mapped from their file."""
    index = directory / INDEX_FILE
    document = validate(FullExpertsIndex, read_json_object(index, "what kt-kernel wrote"), str(index))
    layer = document.layers.get(layer_idx)
    if layer is None:
        raise KTArtifactError(str(index), f"no layer {layer_idx}", f"one of {sorted(document.layers)}")
    file = directory / layer.file
    if Path(layer.file).name != layer.file or not file.is_file():
        raise KTArtifactError(str(file), "no such file", f"what {INDEX_FILE} lists")
    if layer.size_bytes is not None and file.stat().st_size != layer.size_bytes:
        raise KTArtifactError(str(file), f"{file.stat().st_size} bytes", f"{layer.size_bytes}, as {INDEX_FILE} says")
    shards = Shards([file])
    tensors: dict[str, Tensor | Encoded] = {}
    for role, size in shape.matrices().items():
        name, expected = f"{role}_proj", (shape.num_experts, *size)
        if name not in shards or (shards.dtype(name), tuple(shards.shape(name))) != ("BF16", expected):
            given = f"{shards.dtype(name)} {list(shards.shape(name))}" if name in shards else "no such tensor"
            raise KTArtifactError(f"{file}: {name}", given, f"BF16 {list(expected)}")
        tensors[role] = shards.read(name)
    return ExpertChunk(0, False, tensors)
