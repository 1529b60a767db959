"""One expert in the layout that GPU kernels of SGLang take, for the ranks of a tensor-parallel group.

Rank p of P gets rows p I/P to (p + 1) I/P of gate and of up, one below the other (w13), and the same columns of down
(w2). Codes are those of the release. Scales are float32 for FP8, the bytes of e8m0 for MXFP8, and bf16 for RAWINT4 and
MXFP4, which holds powers of two exactly.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.checkpoint import Encoded
from ktransformers.checkpoint.encoded import e8m0, format_of
from ktransformers.ground.errors import InputError


@dataclass(frozen=True)
class RankTensors:
    """What one rank gets: quantized or dense weights, and scales of formats that have them."""

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None


def split_for_ranks(matrices: Mapping[str, Tensor | Encoded], ranks: int) -> list[RankTensors]:
    """Gate, up `[1, I, H]` and down `[1, H, I]` of one expert, for each rank."""
    gate, up, down = matrices["gate"], matrices["up"], matrices["down"]
    inner = down.columns if isinstance(down, Encoded) else down.shape[-1]
    if ranks < 1 or inner % ranks:
        raise InputError("gpu_tp_count", ranks, f"a divisor of the intermediate size, {inner}")
    size = inner // ranks
    parts = []
    for rank in range(ranks):
        first, last = rank * size, (rank + 1) * size
        qweight, scales = zip(*(_rows(matrix, first, last) for matrix in (gate, up)), strict=True)
        w2, w2_scale = _columns(down, first, last)
        both = None if scales[0] is None or scales[1] is None else torch.cat((scales[0], scales[1]))
        parts.append(RankTensors(torch.cat(qweight), w2.contiguous(), both, w2_scale))
    return parts


def _rows(matrix: Tensor | Encoded, first: int, last: int) -> tuple[Tensor, Tensor | None]:
    if isinstance(matrix, Tensor):
        return matrix[0, first:last], None
    span = format_of(matrix.format).row_span
    _check_span(matrix, first, last, span)
    scales = _scales(matrix)
    return matrix.qweight[0, first:last], None if scales is None else scales[first // span : last // span]


def _columns(matrix: Tensor | Encoded, first: int, last: int) -> tuple[Tensor, Tensor | None]:
    if isinstance(matrix, Tensor):
        return matrix[0, :, first:last], None
    form = format_of(matrix.format)
    _check_span(matrix, first, last, form.span or 1)
    per_byte, scales = form.per_byte, _scales(matrix)
    qweight = matrix.qweight[0, :, first // per_byte : last // per_byte]
    if scales is None or not form.span:
        return qweight, scales
    return qweight, scales[:, first // form.span : last // form.span].contiguous()


def _check_span(matrix: Encoded, first: int, last: int, span: int) -> None:
    if first % span or last % span:
        given = f"a rank with {first} to {last} of {matrix.name or 'a matrix'} in {matrix.format}"
        raise InputError("gpu_tp_count", given, f"multiples of {span}, which share a scale", "use fewer ranks")


def _scales(matrix: Encoded) -> Tensor | None:
    """In the dtype that the GPU kernels take."""
    if matrix.scales is None:
        return None
    scales, form = matrix.scales[0], format_of(matrix.format)
    if form.scales == "e8m0":
        return scales if form.element == "e4m3" else e8m0(scales).bfloat16()
    return scales.bfloat16() if form.element == "uint" else scales.float()


def write(address: int, tensor: Tensor | None) -> None:
    """Copy a tensor's bytes to host memory at this address."""
    if tensor is not None:
        tensor = tensor.contiguous()
        ctypes.memmove(address, tensor.data_ptr(), tensor.numel() * tensor.element_size())
