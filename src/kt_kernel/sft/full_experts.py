"""Reads the experts that kt-kernel saves after training their base weights (`kt_train_mode: full`).

A directory holds `kt_full_experts.index.json` and one safetensors file for each layer, with gate_proj and up_proj
`[E, I, H]` and down_proj `[E, H, I]` in bf16. Such experts are frozen here: they are a source of weights, given as
`kt_weight_path`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel
from torch import Tensor

from kt_kernel.sft.runtime import KTArtifactError
from ktransformers import _core
from ktransformers.checkpoint import Shards
from ktransformers.checkpoint.layout import split_layer_name
from ktransformers.experts.contract import Contract, new_store
from ktransformers.experts.store import ExpertStore
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


def full_experts_store(directory: Path, name: str, contract: Contract, pool: _core.Pool) -> ExpertStore:
    """The experts of the module `name`, from the file of its layer."""
    index, layer_idx, shape = directory / INDEX_FILE, split_layer_name(name)[1], contract.shape
    document = validate(FullExpertsIndex, read_json_object(index, "what kt-kernel wrote"), str(index))
    layer = document.layers.get(layer_idx)
    if layer is None:
        raise KTArtifactError(str(index), f"no layer {layer_idx}", f"one of {sorted(document.layers)}")
    file = directory / layer.file
    if Path(layer.file).name != layer.file or not file.is_file():
        raise KTArtifactError(str(file), "no such file", f"what {INDEX_FILE} lists")
    if layer.size_bytes is not None and file.stat().st_size != layer.size_bytes:
        raise KTArtifactError(str(file), f"{file.stat().st_size} bytes", f"{layer.size_bytes}, as {INDEX_FILE} says")
    shapes = {f"{role}_proj": (shape.num_experts, *size) for role, size in shape.matrices().items()}
    tensors = read_bf16(file, shapes, "gate_proj, up_proj and down_proj")
    store = new_store(contract, pool=pool)
    store.pack(gate=tensors["gate_proj"], up=tensors["up_proj"], down=tensors["down_proj"])
    return store


def read_bf16(file: Path, shapes: Mapping[str, tuple[int, ...]], expected: str) -> dict[str, Tensor]:
    """These tensors, which are all that the file has; names, shapes and dtypes are compared before one is read."""
    shards = Shards([file])
    missing, unknown = sorted(set(shapes) - set(shards.names)), sorted(set(shards.names) - set(shapes))
    if missing or unknown:
        given = f"no {missing[0]}" if missing else f"{unknown[0]}, which does not belong to it"
        raise KTArtifactError(str(file), given, expected)
    for name, shape in shapes.items():
        if (shards.dtype(name), tuple(shards.shape(name))) != ("BF16", shape):
            given = f"{shards.dtype(name)} {list(shards.shape(name))}"
            raise KTArtifactError(f"{file}: {name}", given, f"BF16 {list(shape)}")
    return {name: shards.read(name) for name in shapes}
