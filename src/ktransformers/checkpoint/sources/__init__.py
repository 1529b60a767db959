"""Where weights come from: one face (`source.py`) for safetensors releases, GGUF files and kt-kernel's converter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktransformers.checkpoint.quantisation import accept
from ktransformers.checkpoint.shards import INDEX_FILE, SINGLE_FILE
from ktransformers.checkpoint.sources.gguf import GGUFSource, gguf_files
from ktransformers.checkpoint.sources.source import LayerSource, PlainTensor, Source
from ktransformers.checkpoint.sources.tensors import SafetensorsSource
from ktransformers.checkpoint.sources.tree import TreeSource
from ktransformers.errors import InputError

__all__ = ["LayerSource", "PlainTensor", "Source", "open_source"]


def open_source(
    path: str | Path, quantisation: Mapping[str, Any] | None = None, files: list[str] | None = None
) -> Source:
    """A directory of safetensors, `.gguf` or `.kt` files, or one GGUF file (any of a split set).

    `quantisation` is config.json's; `files` are the safetensors to look at where they are not the directory's own.
    """
    path = Path(path)
    if files is not None or (path / INDEX_FILE).is_file() or (path / SINGLE_FILE).is_file():
        return SafetensorsSource(path, files or (), accept(str(path / "config.json"), quantisation))
    if found := gguf_files(path):
        return GGUFSource(path, found)
    if any(path.glob("_layer_*/_numa_*")):
        return TreeSource(path)
    if not path.exists():
        raise InputError(str(path), "nothing there", "a model's directory or a .gguf file")
    raise InputError(
        str(path),
        "no weights that are known",
        f"{SINGLE_FILE}, {INDEX_FILE}, .gguf files or kt-kernel's _layer_N/_numa_P",
        "pickles (.bin, .pt) are not read: they run code when opened",
    )
