"""`kt` in this process, with folders of its own, and models small enough to be made for each test."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ktransformers.cli.main import app
from ktransformers.errors import KTError

CONFIG = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 8}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    error: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Call = Callable[..., Done]


@pytest.fixture
def kt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """`kt("model", "list")`; errors of ours become code 1 and a line, as in `main`."""
    for name, folder in (("CONFIG", "config"), ("DATA", "data"), ("CACHE", "cache")):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / "xdg" / folder))
    for name in ("HF_ENDPOINT", "HF_TOKEN", "API_HOST", "API_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Done:
        done = CliRunner().invoke(app, list(words))
        if isinstance(done.exception, KTError):
            return Done(1, done.stdout, str(done.exception))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Done(done.exit_code, done.stdout, done.stderr)

    return call


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A file out of (dtype, shape, data) by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def model_files() -> dict[str, bytes]:
    """Two shards with an index: what a hub has of a model, though no library could run it."""
    shards = {
        "model-00001-of-00002.safetensors": {"a": ("BF16", [4, 8], bytes(range(64))), "b": ("F32", [2], b"\1" * 8)},
        "model-00002-of-00002.safetensors": {"c": ("F8_E4M3", [100], b"\2" * 100)},
    }
    index = {"metadata": {}, "weight_map": {tensor: file for file, inside in shards.items() for tensor in inside}}
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{file: safetensors(inside) for file, inside in shards.items()},
    }


def write_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name, body in model_files().items():
        (directory / name).write_bytes(body)
    return directory
