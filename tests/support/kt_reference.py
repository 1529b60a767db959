"""kt-kernel's converter written a second time from its description, in numpy: codes and scales of a matrix, NUMA parts,
names of tensors and files. Nothing of the package is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

from tests.support.releases import kt_tiles


def reference_rows(matrix: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes int8 and scales float32, row by row. With 8 bits kt-kernel multiplies by 1/127 and by 1/s, with 4 bits it
    divides by 112 and by s, which differs in the last bit."""
    numbers: Any = matrix.float().numpy()
    codes, scales = numpy.zeros(numbers.shape, numpy.int8), numpy.zeros(len(numbers), numpy.float32)
    for index, row in enumerate(numbers):
        largest = numpy.abs(row).max()
        scale = numpy.float32(largest * numpy.float32(1 / 127) if bits == 8 else largest / numpy.float32(112))
        scales[index] = scale
        if scale == 0:
            continue
        divided = row * (numpy.float32(1) / scale) if bits == 8 else row / scale
        whole = numpy.rint(divided).astype(numpy.int64)
        codes[index] = whole if bits == 8 else numpy.sign(whole) * ((numpy.abs(whole) + 8) >> 4)
    return torch.from_numpy(codes), torch.from_numpy(scales)


Part = tuple[str, str, int, Tensor, Tensor]  # role with _bwd, NAME of files, part, bytes, scales


def reference_parts(matrix: Tensor, role: str, bits: int, parts: int, *, backward: bool = False) -> Iterator[Part]:
    """The stored parts of one expert's matrix in bf16."""
    n, k = matrix.shape
    for part in range(parts):
        if role == "down":
            piece = matrix[:, part * (k // parts) : (part + 1) * (k // parts)]
        else:
            piece = matrix[part * (n // parts) : (part + 1) * (n // parts)]
        for stored, numbers in ((role, piece), (f"{role}_bwd", piece.T)):
            if stored == role or backward:
                codes, scales = reference_rows(numbers, bits)
                yield stored, f"INT{bits}", part, kt_tiles(codes, f"INT{bits}"), scales


def reference_tensors(
    matrix: Tensor, layer: int, expert: int, role: str, bits: int, parts: int, *, backward: bool = False
) -> dict[str, Tensor]:
    """Names and tensors in merged safetensors."""
    tensors = {}
    for stored, _, part, data, scales in reference_parts(matrix, role, bits, parts, backward=backward):
        name = f"blk.{layer}.ffn_{stored}_exps.{expert}.numa.{part}"
        tensors |= {f"{name}.weight": data.view(torch.int8), f"{name}.scale": scales}
    return tensors


def reference_files(
    matrix: Tensor, layer: int, expert: int, role: str, bits: int, parts: int, *, backward: bool = False
) -> dict[str, bytes]:
    """Paths and contents in a tree."""
    files = {}
    for stored, method, part, data, scales in reference_parts(matrix, role, bits, parts, backward=backward):
        for kind, contents in (("quant", data.numpy().tobytes()), ("scale", scales.numpy().tobytes())):
            name = f"{method}_{stored}_{expert}_{len(contents)}Byte_{kind}_.kt"
            files[f"_layer_{layer}/_numa_{part}/{name}"] = contents
    return files
