"""What a packed directory has beside its experts: the other tensors in ordinary shards, and the small files.

Tensors are asked for one at a time and written where they belong, so memory is that of the largest one that has to be
decoded; those that are copied go from the mapped source to the file. Their division into shards depends on names and
sizes alone, so an interrupted conversion finds the same one again.
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
from ktransformers.errors import InputError

SHARD_BYTES = 4 * 2**30
MAX_SMALL_FILE_BYTES = 64 << 20  # a larger file beside a model is weights of some kind
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
    tensors: list[PlainTensor]  # wide dtypes first
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
    """Into shards named as stock ones are."""
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
    """Tokenizer, generation settings, licence, code of the model: what is neither weights nor written anew."""
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith(".") or entry.name in REWRITTEN_FILES or entry.name.endswith(WEIGHT_SUFFIXES):
            continue
        if entry.stat().st_size <= MAX_SMALL_FILE_BYTES if entry.is_file() else entry.name == TEMPLATES_DIRECTORY:
            yield entry


def copy_small_files(source: Path, target: Path, only: Collection[str] | None = None) -> list[str]:
    """The names of what was copied; `only` these, where there are others that do not belong to the model."""
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
