"""Results of `kt` commands, and models small enough to be written for each test."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 8}


@dataclass(frozen=True)
class CommandResult:
    code: int
    out: str
    error: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


RunKt = Callable[..., CommandResult]


def safetensors_bytes(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A safetensors file of (dtype, shape, data) by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def model_files() -> dict[str, bytes]:
    """Two shards with an index, as a hub stores a model; the model itself cannot run."""
    shards = {
        "model-00001-of-00002.safetensors": {"a": ("BF16", [4, 8], bytes(range(64))), "b": ("F32", [2], b"\1" * 8)},
        "model-00002-of-00002.safetensors": {"c": ("F8_E4M3", [100], b"\2" * 100)},
    }
    index = {"metadata": {}, "weight_map": {tensor: file for file, inside in shards.items() for tensor in inside}}
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{file: safetensors_bytes(inside) for file, inside in shards.items()},
    }


def write_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name, body in model_files().items():
        (directory / name).write_bytes(body)
    return directory
