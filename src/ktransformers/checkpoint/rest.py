"""The non-expert part of a packed directory: the other tensors in ordinary safetensors shards, and the small files.

Tensors are read and written one at a time, so peak memory is that of the largest tensor that must be dequantised;
the others are copied from the mapped source. The split into shards depends on names and sizes alone, so a resumed
conversion produces the same shards.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ktransformers.checkpoint.matrix import SPELLED
from ktransformers.checkpoint.sources import PlainTensor
from ktransformers.checkpoint.tensorfile import FileLayout, TensorFile, plan_layout
from ktransformers.ground.errors import InputError

SHARD_BYTES = 4 * 2**30
MAX_SMALL_FILE_BYTES = 64 << 20  # larger files are taken for weights
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".gguf",
    ".kt",
    ".index.json",
)
TEMPLATES_DIRECTORY = "additional_chat_templates"
REWRITTEN_FILES = ("config.json", "quality.json", "kt_packed.json")


def tensor_bytes(tensor: PlainTensor) -> int:
    return torch.Size(tensor.shape).numel() * tensor.dtype.itemsize


@dataclass(frozen=True)
class RestShard:
    file: str
    tensors: list[PlainTensor]  # by descending size of dtype, so that each is aligned
    layout: FileLayout

    @property
    def bytes(self) -> int:
        return sum(map(tensor_bytes, self.tensors))

    def write(self, directory: Path, progress: Callable[[int], None]) -> None:
        target = TensorFile(directory / self.file, self.layout)
        try:
            for tensor in self.tensors:
                data = tensor.read()
                if tuple(data.shape) != tensor.shape or data.dtype != tensor.dtype:
                    given = f"{data.dtype} of shape {list(data.shape)}"
                    raise InputError(tensor.name, given, f"{tensor.dtype} of shape {list(tensor.shape)}")
                target.write(tensor.name, data.contiguous())
                progress(tensor_bytes(tensor))
            target.finish()
        finally:
            target.close()


def split_into_shards(tensors: Iterable[PlainTensor], metadata: dict[str, str]) -> list[RestShard]:
    """Shards of at most SHARD_BYTES, named as `save_pretrained` names them."""
    groups: list[list[PlainTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor_bytes(tensor) > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor_bytes(tensor)
    shards = []
    for number, group in enumerate(groups, 1):
        ordered = sorted(group, key=lambda tensor: -tensor.dtype.itemsize)
        layout = plan_layout([(tensor.name, SPELLED[tensor.dtype], tensor.shape) for tensor in ordered], metadata)
        shards.append(RestShard(f"model-{number:05}-of-{len(groups):05}.safetensors", ordered, layout))
    return shards


def small_files(directory: Path) -> Iterator[Path]:
    """Tokenizer, generation settings, licence, modelling code: files that are neither weights nor rewritten."""
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith(".") or entry.name in REWRITTEN_FILES or entry.name.endswith(WEIGHT_SUFFIXES):
            continue
        if entry.stat().st_size <= MAX_SMALL_FILE_BYTES if entry.is_file() else entry.name == TEMPLATES_DIRECTORY:
            yield entry


def copy_small_files(source: Path, target: Path, only: Collection[str] | None = None) -> list[str]:
    """Copy the small files, or those named in `only`; returns the names of what was copied."""
    names = []
    for entry in small_files(source):
        if only is not None and entry.name not in only:
            continue
        if entry.is_dir():
            shutil.copytree(entry, target / entry.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(entry, target / entry.name)
        names.append(entry.name)
    return names
