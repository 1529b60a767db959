"""Writes a file of quantized linear layers (`checkpoint/sources/packed_linears.py`), one weight at a time: it is
recoded, or kept, packed by the core, and its blocks are written to their page of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktransformers import _core
from ktransformers.checkpoint.encoded import Encoded
from ktransformers.checkpoint.mapped import read_only_tensor
from ktransformers.checkpoint.packed import PackedLinear
from ktransformers.checkpoint.recode import recode
from ktransformers.checkpoint.rest import SHARD_BYTES, tensor_bytes
from ktransformers.checkpoint.sources.packed_linears import ORDER_SUFFIX, TENSOR_SUFFIX
from ktransformers.checkpoint.tensorfile import FileLayout, TensorFile, plan_layout
from ktransformers.experts.store import LAYOUT_VERSION
from ktransformers.ground.errors import KTError
from ktransformers.quant.plan import LinearPlan
from ktransformers.quant.report import quality_row


@dataclass
class LinearsFile:
    file: str
    linears: list[LinearPlan]
    conversion: str
    records: list[PackedLinear] = field(default_factory=list)
    quality: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Of the numbers, as progress counts them."""
        return sum(tensor_bytes(linear.tensor) for linear in self.linears)

    def layout(self) -> FileLayout:
        """Space for the order of columns is left where GPTQ's may need one."""
        entries: list[tuple[str, str, tuple[int, ...]]] = []
        for linear in self.linears:
            entries.append((linear.tensor.name + TENSOR_SUFFIX, "U8", (linear.bytes,)))
            if _may_have_order(linear):
                entries.append((linear.tensor.name + ORDER_SUFFIX, "I64", (linear.tensor.shape[1],)))
        metadata = {"format": "kt", "conversion": self.conversion, "layout": str(LAYOUT_VERSION)}
        return plan_layout(entries, metadata, padding="linears.padding")

    def write(self, directory: Path, pool: _core.Pool, progress: Callable[[int], None]) -> None:
        self.records, self.quality = [], {}
        target = TensorFile(directory / self.file, self.layout())
        try:
            for linear in self.linears:
                self._write_linear(linear, target, pool)
                progress(tensor_bytes(linear.tensor))
            target.finish()
        finally:
            target.close()

    def _write_linear(self, linear: LinearPlan, target: TensorFile, pool: _core.Pool) -> None:
        tensor = linear.tensor
        source = tensor.read()[None] if tensor.quantized is None else tensor.quantized()
        recoded = recode(source, linear.format, tensor.name)
        matrix = recoded.matrix
        if not isinstance(matrix, Encoded) or matrix.format != linear.format:
            raise KTError(f"{tensor.name}: not in {linear.format} after it was encoded; a defect")
        core = _core.CodedLinear(pool, matrix.rows, matrix.columns, matrix.format)
        core.pack(matrix.packable)
        target.write(tensor.name + TENSOR_SUFFIX, read_only_tensor(core.memory()))
        if matrix.order is not None:
            target.write(tensor.name + ORDER_SUFFIX, matrix.order)
        self.records.append(
            PackedLinear(
                name=tensor.name,
                file=self.file,
                tensor=tensor.name + TENSOR_SUFFIX,
                order=None if matrix.order is None else tensor.name + ORDER_SUFFIX,
                rows=matrix.rows,
                columns=matrix.columns,
                format=matrix.format,
                bytes=linear.bytes,
                checksum=core.checksum(),
            )
        )
        self.quality[tensor.name] = quality_row(
            tensor.format or "bf16", linear.format, recoded.kept, recoded.moved, recoded.norm
        )


def _may_have_order(linear: LinearPlan) -> bool:
    return linear.format.startswith(("int4:", "uint4:", "uint8:")) and linear.tensor.quantized is not None


def split_linears(linears: Iterable[LinearPlan], conversion: str) -> list[LinearsFile]:
    """Files of at most SHARD_BYTES."""
    groups: list[list[LinearPlan]] = []
    size = SHARD_BYTES
    for linear in linears:
        if size + linear.bytes > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(linear)
        size += linear.bytes
    return [
        LinearsFile(f"linears-{number:05}-of-{len(groups):05}.safetensors", group, conversion)
        for number, group in enumerate(groups, 1)
    ]
