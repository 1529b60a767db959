"""Quantizes floats to a format: the nearest values that it can hold, by the native encoder (`csrc/kernels/encode.h`).

Scales come from the largest number of each group. Unsigned formats with float scales (int4) try a few scales for each
group and keep the one with the least squared error. Every CPU writes the same bytes, and GGUF's older types have those
of the `gguf` package. The encoder runs on the calling thread and reports the error that it adds, so that nothing has to
be dequantized to know it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint.encoded import Encoded, format_of
from ktransformers.ground.errors import InputError

MIN_POOLED_BYTES = 1 << 18  # smaller tensors come from torch's allocator


@dataclass(frozen=True)
class EncodedWithError:
    """`moved` is the sum of squares of what the values change by when they are dequantized and rounded to bfloat16,
    `norm` that of the values themselves."""

    matrix: Encoded
    moved: float
    norm: float


def encode(tensor: Tensor, spec: str) -> Encoded:
    """The nearest values that `spec` can hold of `[N, K]` or `[E, N, K]` in any float dtype."""
    return encode_with_error(tensor, spec).matrix


def encode_with_error(tensor: Tensor, spec: str) -> EncodedWithError:
    form = format_of(spec)
    matrix = tensor.detach()
    matrix = matrix.unsqueeze(0) if matrix.dim() == 2 else matrix
    if matrix.dim() != 3 or not matrix.is_floating_point():
        given = f"{tensor.dtype} of shape {list(tensor.shape)}"
        raise InputError(spec, given, "floats of shape [rows, columns] or [experts, rows, columns]")
    experts, rows, columns = matrix.shape
    if not columns or columns % form.multiple:
        raise InputError(spec, f"{columns} columns", f"a multiple of {form.multiple}")
    if not form.written:
        written = [row["spec"] for row in _core.formats() if row["written"]]
        raise InputError(
            spec, "a format that can be read and not written", "one of " + ", ".join(written),
            "llama-quantize writes the others",
        )  # fmt: skip
    if matrix.stride(2) != 1:
        matrix = matrix.contiguous()
    qweight = _empty((experts, rows, form.row_bytes(columns)), form.code_dtype)
    shape = form.scale_shape(rows, columns)
    scales = None if shape is None else torch.empty(experts, *shape, dtype=form.scale_dtype)
    tensor_scale = torch.empty(experts) if form.tensor_scale else None
    moved, norm, finite = _core.encode(spec, matrix, qweight, scales, tensor_scale)
    if not finite:
        raise InputError(spec, "numbers that are not finite", "finite ones", "the source is damaged")
    return EncodedWithError(Encoded(spec, qweight, scales, tensor_scale, columns=columns), moved, norm)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """From the core's pool: torch's allocator keeps what another thread frees, a layer of packed weights in a
    conversion."""
    size = math.prod(shape) * dtype.itemsize
    if size < MIN_POOLED_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(_core.pooled_array(size)).view(dtype).view(shape)
