"""Sources of weights: safetensors releases, GGUF files and the output of kt-kernel's converter, behind one interface
(`sources/source.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktransformers.checkpoint.quantisation import accept
from ktransformers.checkpoint.shards import INDEX_FILE, SINGLE_FILE
from ktransformers.checkpoint.sources.gguf import GGUFSource, gguf_files
from ktransformers.checkpoint.sources.kt_kernel import TreeSource
from ktransformers.checkpoint.sources.safetensors import SafetensorsSource
from ktransformers.checkpoint.sources.source import LayerSource, PlainTensor, Source
from ktransformers.ground.errors import InputError

__all__ = ["LayerSource", "PlainTensor", "Source", "open_source"]


def open_source(
    path: str | Path, quantisation: Mapping[str, Any] | None = None, files: list[str] | None = None
) -> Source:
    """A directory of safetensors, `.gguf` or `.kt` files, or one GGUF file (any of a split set).

    `quantisation` is that of config.json; `files` are the safetensors files to read instead of the directory's own.
    """
    path = Path(path)
    if files is not None or (path / INDEX_FILE).is_file() or (path / SINGLE_FILE).is_file():
        return SafetensorsSource(path, files or (), accept(str(path / "config.json"), quantisation))
    if ggufs := gguf_files(path):
        return GGUFSource(path, ggufs)
    if any(path.glob("_layer_*/_numa_*")):
        return TreeSource(path)
    if not path.exists():
        raise InputError(str(path), "no such file or directory", "a model's directory or a .gguf file")
    raise InputError(
        str(path),
        "no supported weights",
        f"{SINGLE_FILE}, {INDEX_FILE}, .gguf files or kt-kernel's _layer_N/_numa_P",
        "pickles (.bin, .pt) are not read: they run code when opened",
    )
