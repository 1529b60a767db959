"""Quantized linear layers of a packed directory: files are memory-mapped, and the core multiplies from
the mapping without a copy.

A weight is one tensor of bytes at a page boundary, the blocks that `_core.CodedLinear` computes with, under the name of
the parameter with `_codes` behind it, so that a program that looks for the parameter does not find other numbers under
its name. The manifest has shapes, formats and checksums (`checkpoint/packed.py`); a weight is compared with its
checksum when it is opened.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint.mapped import map_file
from ktransformers.checkpoint.packed import REPACK_HINT, Manifest, PackedLinear, check_shards
from ktransformers.checkpoint.sources.source import MappedWeight, PlainTensor
from ktransformers.checkpoint.tensorfile import FileLayout
from ktransformers.ground import env
from ktransformers.ground.errors import InputError

TENSOR_SUFFIX = "_codes"
ORDER_SUFFIX = "_order"


@dataclass(frozen=True)
class PackedLinears:
    directory: Path
    manifest: Manifest
    layouts: dict[str, FileLayout]

    @classmethod
    def open(cls, directory: Path, manifest: Manifest) -> PackedLinears:
        return cls(directory, manifest, check_shards(directory, manifest))

    @property
    def stored_names(self) -> set[str]:
        """Names of all tensors in the files of linear layers."""
        return {name for linear in self.manifest.linears for name in self.layouts[linear.file].slots}

    def tensors(self) -> list[PlainTensor]:
        return [self._tensor(linear) for linear in self.manifest.linears]

    def _tensor(self, linear: PackedLinear) -> PlainTensor:
        shape = (linear.rows, linear.columns)

        def read(dtype: torch.dtype) -> Tensor:
            mapped = self.open_linear(linear, _decoding_pool())
            numbers = torch.empty(shape, dtype=dtype)
            mapped.core.decode(0, numbers)
            return numbers if mapped.order is None else torch.empty_like(numbers).index_copy_(1, mapped.order, numbers)

        return PlainTensor(
            linear.name,
            torch.bfloat16,
            shape,
            lambda: read(torch.bfloat16),
            format=linear.format,
            packed=lambda pool, verify: self.open_linear(linear, pool, verify=verify),
            exact=lambda: read(torch.float32),
        )

    def open_linear(self, linear: PackedLinear, pool: _core.Pool, *, verify: bool = True) -> MappedWeight:
        file, slots = map_file(self.directory / linear.file), self.layouts[linear.file].slots
        where = f"{self.directory / linear.file}: {linear.name}"
        core = _core.CodedLinear(pool, linear.rows, linear.columns, linear.format)
        slot = slots.get(linear.tensor)
        if slot is None or slot.dtype != "U8" or slot.bytes != linear.bytes or core.packed_bytes != linear.bytes:
            given = "no such tensor" if slot is None else f"{slot.bytes} bytes"
            raise InputError(where, given, f"{core.packed_bytes} bytes of {linear.format}", REPACK_HINT)
        core.adopt(file[slot.offset : slot.offset + slot.bytes])
        if verify and env.verify_enabled() and core.checksum() != linear.checksum:
            raise InputError(where, "contents that do not fit their checksum", "them as written", REPACK_HINT)
        order = None
        if linear.order is not None:
            place = slots[linear.order]
            order = file[place.offset : place.offset + place.bytes].view(torch.int64).clone()
        return MappedWeight(core, linear.format, order)


@functools.cache
def _decoding_pool() -> _core.Pool:
    return _core.Pool(threads=1, pin=False)
