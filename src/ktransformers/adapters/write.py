"""Writes safetensors files tensor by tensor, and directories that appear complete or not at all.

All shapes are known before the first tensor is written (`checkpoint/tensorfile.py`). A TensorBatch lists its tensors
and reads them when they are due; at most one batch is in memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ktransformers.checkpoint.matrix import SPELLED
from ktransformers.checkpoint.tensorfile import FileLayout, TensorFile, byte_view, plan_layout
from ktransformers.ground.errors import InputError

CHUNK_NUMEL = 1 << 22  # elements converted to float64 at a time
NOT_FINITE = ("NaN or infinite values", "finite numbers", "training diverged, or a dtype overflowed")


@dataclass(frozen=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class TensorBatch:
    entries: tuple[TensorSpec, ...]
    read: Callable[[], Sequence[Tensor]]  # in the order of entries


@dataclass(frozen=True)
class WrittenTensor:
    """Name, file, shape, dtype, norm and SHA-256 of a written tensor, for the manifest."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    norm: float
    sha256: str


def record_tensor(name: str, file: str, tensor: Tensor) -> WrittenTensor:
    """Norm and SHA-256 of a tensor; NaN or infinity is an error."""
    digest = hashlib.sha256(byte_view(tensor.contiguous())).hexdigest()
    norm = math.sqrt(finite_sum_of_squares(name, tensor))
    return WrittenTensor(name, file, tuple(tensor.shape), SPELLED[tensor.dtype], norm, digest)


def sum_of_squares(tensor: Tensor) -> float:
    """Sum of squares in float64, in chunks to keep the copies small."""
    flat, total = tensor.reshape(-1), 0.0
    if flat.shape[0] <= CHUNK_NUMEL:
        values = flat.double()
        return float(values.dot(values))
    for first in range(0, flat.shape[0], CHUNK_NUMEL):
        chunk = flat[first : first + CHUNK_NUMEL].double()
        total += float(chunk.dot(chunk))
    return total


def finite_sum_of_squares(name: str, tensor: Tensor) -> float:
    """One pass for both: the sum of squares is finite exactly if every element is."""
    total = sum_of_squares(tensor)
    if not math.isfinite(total):
        raise InputError(name, *NOT_FINITE)
    return total


def adapter_layout(entries: Iterable[TensorSpec]) -> FileLayout:
    """Wide dtypes first, because readers map tensors and need alignment."""
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    return plan_layout([(entry.name, SPELLED[entry.dtype], entry.shape) for entry in ordered], {"format": "pt"})


def write_safetensors(path: Path, batches: Sequence[TensorBatch]) -> list[WrittenTensor]:
    """The file is complete and synced when this returns; `path` lies in the caller's temporary directory."""
    target = TensorFile(path, adapter_layout(entry for batch in batches for entry in batch.entries))
    records: list[WrittenTensor] = []
    try:
        for batch in batches:
            for entry, tensor, total in _read_batch(batch):
                if not math.isfinite(total):
                    raise InputError(entry.name, *NOT_FINITE)
                target.write(entry.name, tensor)
                digest = hashlib.sha256(byte_view(tensor)).hexdigest()
                records.append(
                    WrittenTensor(entry.name, path.name, entry.shape, SPELLED[entry.dtype], math.sqrt(total), digest)
                )
        target.finish()
    finally:
        target.close()
    return records


def _read_batch(batch: TensorBatch) -> Iterator[tuple[TensorSpec, Tensor, float]]:
    """(spec, tensor, sum of squares) of every tensor; many small tensors are reduced together to save calls."""
    tensors = batch.read()
    for entry, tensor in zip(batch.entries, tensors, strict=True):
        if tuple(tensor.shape) != entry.shape:
            raise InputError(entry.name, f"shape {list(tensor.shape)}", f"{list(entry.shape)}")
    dtypes = {(entry.dtype, tensor.dtype) for entry, tensor in zip(batch.entries, tensors, strict=True)}
    sizes = [tensor.numel() for tensor in tensors]
    if len(dtypes) > 1 or len(tensors) < 16 or sum(sizes) > 2 * CHUNK_NUMEL:
        for entry, tensor in zip(batch.entries, tensors, strict=True):
            tensor = tensor.to(entry.dtype).contiguous()
            yield entry, tensor, sum_of_squares(tensor)
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(batch.entries[0].dtype)
    totals = torch.segment_reduce(flat.double().square_(), "sum", lengths=torch.tensor(sizes)).tolist()
    for entry, tensor, total in zip(batch.entries, torch.split(flat, sizes), totals, strict=True):
        yield entry, tensor, total
