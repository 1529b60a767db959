"""Validates the arguments of `ExpertStore.pack` and turns them into views that the core reads: expert dimension first,
gate and up split from their fused matrix, for tensors and encoded matrices. Nothing is copied; an argument with a wrong
type, device, dtype or shape is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ktransformers.checkpoint.encoded import Encoded
from ktransformers.ground.errors import InputError

SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def formats_by_matrix(formats: str | Mapping[str, str], gated: bool) -> dict[str, str]:
    """gate (if gated), up, down -> format."""
    names = ("gate", "up", "down") if gated else ("up", "down")
    if isinstance(formats, str):
        return dict.fromkeys(names, formats)
    if set(formats) != set(names):
        raise InputError("formats", f"formats of {', '.join(formats)}", ", ".join(names))
    return {name: formats[name] for name in names}


def split_encoded(fused: Encoded, interleaved: bool) -> tuple[Encoded, Encoded]:
    """Gate and up of one encoded matrix, as views."""
    half = fused.rows // 2
    blockwise = fused.scales is not None and fused.scales.dim() > 1 and fused.scales.shape[1] != fused.rows
    if blockwise and (interleaved or half % 128):
        raise InputError("gate_up", "blocks of scales that gate and up share", "scales of their own")
    gate_rows, up_rows = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))

    def view(rows: slice) -> Encoded:
        blocks = slice(*(None if end is None else end // 128 for end in (rows.start, rows.stop)))
        scales = None if fused.scales is None else fused.scales[:, blocks if blockwise else rows]
        zeros = None if fused.zeros is None else fused.zeros[:, rows]
        return replace(fused, qweight=fused.qweight[:, rows], scales=scales, zeros=zeros)

    return view(gate_rows), view(up_rows)


def require_none(name: str, given: Tensor | Encoded | None, expected: str) -> None:
    if given is not None:
        raise InputError(name, "a tensor", expected)


def as_source(name: str, tensor: Tensor, dims: int) -> Tensor:
    """The tensor with an expert dimension in front; it must be a float tensor in CPU memory."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: given a {type(tensor).__name__}, expected a torch tensor")
    if tensor.device.type != "cpu":
        raise TypeError(f"{name}: given a tensor on {tensor.device}, expected one in CPU memory; copy it with .cpu()")
    if tensor.dtype not in SOURCE_DTYPES:
        dtypes = ", ".join(str(dtype) for dtype in SOURCE_DTYPES)
        raise TypeError(f"{name}: given a tensor of {tensor.dtype}, expected {dtypes}; convert it with .to()")
    tensor = tensor.detach()
    return tensor.unsqueeze(0) if tensor.dim() == dims - 1 else tensor


def as_matrices(name: str, tensor: Tensor, rows: int, columns: int, transposed: bool) -> Tensor:
    """A view `[experts, rows, columns]` of a tensor in the checkpoint's orientation."""
    shape = (columns, rows) if transposed else (rows, columns)
    source = as_source(name, tensor, 3)
    if source.dim() != 3 or source.shape[1:] != shape:
        expected = f"[experts, {shape[0]}, {shape[1]}] or one of them"
        fits = source.dim() == 3 and source.shape[1:] == shape[::-1]
        remedy = f"it fits with transposed={not transposed}" if fits else ""
        raise InputError(name, f"shape {list(tensor.shape)}", expected, remedy)
    return source.transpose(1, 2) if transposed else source


def as_vectors(name: str, tensor: Tensor, size: int) -> Tensor:
    """A view `[experts, size]`."""
    source = as_source(name, tensor, 2)
    if source.dim() != 2 or source.shape[1] != size:
        raise InputError(name, f"shape {list(tensor.shape)}", f"[experts, {size}] or one of them")
    return source


def split_fused(fused: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate and up of their fused tensor, split along dimension 1."""
    if interleaved:
        return fused[:, 0::2], fused[:, 1::2]
    half = fused.shape[1] // 2
    return fused[:, :half], fused[:, half:]
