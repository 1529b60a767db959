"""What a caller gives to be packed, as views that the core can read: tensors with the dimension of experts in front,
gate and up cut from their common matrix, encoded matrices likewise. Nothing is copied; what does not fit is refused by
name.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ktransformers.checkpoint.encoded import Encoded
from ktransformers.errors import InputError

SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def formats_of(formats: str | Mapping[str, str], gated: bool) -> dict[str, str]:
    names = ("gate", "up", "down") if gated else ("up", "down")
    if isinstance(formats, str):
        return dict.fromkeys(names, formats)
    if set(formats) != set(names):
        raise InputError("formats", f"formats of {', '.join(formats)}", ", ".join(names))
    return {name: formats[name] for name in names}


def halves_of_encoded(fused: Encoded, interleaved: bool) -> tuple[Encoded, Encoded]:
    """Gate and up from one encoded matrix, as views."""
    half = fused.rows // 2
    shared = fused.scales is not None and fused.scales.dim() > 1 and fused.scales.shape[1] != fused.rows
    if shared and (interleaved or half % 128):
        raise InputError("gate_up", "blocks of scales that gate and up share", "scales of their own")
    cuts = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))

    def part(cut: slice) -> Encoded:
        rows = slice(*(None if end is None else end // 128 for end in (cut.start, cut.stop))) if shared else cut
        scales = None if fused.scales is None else fused.scales[:, rows]
        codes = fused.codes[:, cut]
        return Encoded(fused.format, codes, scales, fused.tensor_scale, columns=fused.columns, name=fused.name)

    return part(cuts[0]), part(cuts[1])


def refuse(name: str, given: Tensor | Encoded | None, expected: str) -> None:
    if given is not None:
        raise InputError(name, "a tensor", expected)


def source_of(name: str, tensor: Tensor, dims: int) -> Tensor:
    """The tensor with the dimension of experts in front, where it can be packed from."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: given a {type(tensor).__name__}, expected a torch tensor")
    if tensor.device.type != "cpu":
        raise TypeError(f"{name}: given a tensor on {tensor.device}, expected one in CPU memory; copy it with .cpu()")
    if tensor.dtype not in SOURCE_DTYPES:
        words = ", ".join(str(dtype) for dtype in SOURCE_DTYPES)
        raise TypeError(f"{name}: given a tensor of {tensor.dtype}, expected {words}; convert it with .to()")
    tensor = tensor.detach()
    return tensor.unsqueeze(0) if tensor.dim() == dims - 1 else tensor


def matrices_of(name: str, tensor: Tensor, rows: int, columns: int, transposed: bool) -> Tensor:
    """`[experts, rows, columns]` from what the checkpoint has."""
    shape = (columns, rows) if transposed else (rows, columns)
    found = source_of(name, tensor, 3)
    if found.dim() != 3 or found.shape[1:] != shape:
        expected = f"[experts, {shape[0]}, {shape[1]}] or one of them"
        fits = found.dim() == 3 and found.shape[1:] == shape[::-1]
        remedy = f"it fits with transposed={not transposed}" if fits else ""
        raise InputError(name, f"shape {list(tensor.shape)}", expected, remedy)
    return found.transpose(1, 2) if transposed else found


def vectors_of(name: str, tensor: Tensor, size: int) -> Tensor:
    found = source_of(name, tensor, 2)
    if found.dim() != 2 or found.shape[1] != size:
        raise InputError(name, f"shape {list(tensor.shape)}", f"[experts, {size}] or one of them")
    return found


def halves_of_tensor(fused: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate and up from their common tensor, cut along dimension 1."""
    if interleaved:
        return fused[:, 0::2], fused[:, 1::2]
    half = fused.shape[1] // 2
    return fused[:, :half], fused[:, half:]
