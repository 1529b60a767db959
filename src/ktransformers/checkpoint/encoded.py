"""`Encoded`: matrices `[E, N, K]` in the bytes of a checkpoint, and the float32 numbers that those bytes stand for.

A format is a string (`int4:32`, `fp8:128x128`, `q4_k`; docs/formats.md has the table), whose facts are those of the
native core (`_core.format`). Codes are rows of bytes `[E, N, bytes]`, scales lie beside them; only the last dimension
has to be contiguous, so gate and up may be views of one tensor. `decode` is the definition that everything else is held
against: plain, not fast. It is told by the kinds of elements and scales, so that a format of known kinds has no line
here; blocks of GGUF go to the `gguf` package, which is an optional extra. Four-bit codes lie two in a byte, the even
column in the low half. Formats with zeros (uint4, uint8) have for every scale the code that stands for zero; codes and
zeros of uint8 are int8, both less 128. `bf16:12` is plain bf16 here, two bytes a number; it takes 12 bits once it is
packed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.ground.errors import InputError

FORMATS = tuple(row["spec"] for row in _core.formats() if row["element"] != "bf16")  # int4 with one of its groups
# Blocks of GGUF: values and bytes of each.
GGUF_BLOCKS = {row["name"]: (row["span"], row["block_bytes"]) for row in _core.formats() if row["block_bytes"]}
SCALE_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "u8": torch.uint8}
LOSSLESS = "bf16_12"  # the element of bf16:12
BLOCK = 128  # rows and columns that share a scale of fp8:128x128
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same, negative, from 8 on


@dataclass(frozen=True)
class EncodedFormat:
    """The tensors of a format for matrices of N rows and K columns."""

    name: str
    element: str  # how a code becomes a number: csrc/kernels/format.h, ElementKind
    zero_point: int  # of unsigned codes
    scales: str  # how scales are written: csrc/kernels/format.h, ScaleKind
    code_dtype: torch.dtype
    per_byte: int  # codes in a byte; 0: blocks of GGUF, or bf16
    span: int  # columns that share a scale; 0: all of a row
    scale_dtype: torch.dtype | None
    row_span: int  # rows that share it
    multiple: int  # of K
    flat_scales: bool  # one scale a row is [rows], not [rows, 1]
    tensor_scale: bool  # and a scale for the whole matrix
    zeros: bool  # and a zero for each scale
    written: bool  # `encode` makes it

    def row_bytes(self, columns: int) -> int:
        if self.per_byte:
            return columns // self.per_byte
        if self.element == LOSSLESS:
            return 2 * columns
        values, size = GGUF_BLOCKS[self.name]
        return columns // values * size

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...] | None:
        """Without the dimension of experts."""
        if self.scale_dtype is None:
            return None
        if not self.span:
            return (rows,) if self.flat_scales else (rows, 1)
        return (math.ceil(rows / self.row_span), math.ceil(columns / self.span))


@functools.cache
def format_of(name: str) -> EncodedFormat:
    """By its name; an unknown one is refused."""
    word = name.partition(":")[0]
    if word not in {spec.partition(":")[0] for spec in FORMATS}:
        raise InputError("format", repr(name), "one of " + ", ".join(FORMATS), "int4:GROUP takes any multiple of 32")
    try:
        row = _core.format(name)
    except ValueError as error:
        raise InputError("format", name, str(error)) from None
    if row["spec"] != name:
        raise InputError("format", name, row["spec"])
    if name not in FORMATS and row["element"] == "bf16":
        raise InputError("format", name, "a format with codes", "plain numbers are tensors")
    bits = sum(row["planes"])
    if not row["scale_tensor"]:
        whole = 1 if row["element"] == LOSSLESS else row["span"]
        tensors: dict[str, Any] = {"per_byte": 0, "span": 0, "scale_dtype": None, "multiple": whole}
    else:
        # A suffix chooses the group, and the last one may be shorter; a span of the format itself is always whole.
        whole = row["scale_columns"] if row["spec"] == row["name"] else 0
        scale_dtype = SCALE_DTYPES[row["header"][0][0]]
        tensors = {"per_byte": 8 // bits, "span": row["scale_columns"], "scale_dtype": scale_dtype}
        tensors["multiple"] = whole or 8 // bits
    return EncodedFormat(
        name=name,
        element=row["element"],
        zero_point=row["zero_point"],
        scales=row["scales"],
        code_dtype=torch.int8 if row["element"] == "int8" and not row["block_bytes"] else torch.uint8,
        row_span=row["scale_rows"],
        flat_scales=row["flat_scales"],
        tensor_scale=row["tensor_scale"],
        zeros=row["zeros"],
        written=row["written"],
        **tensors,
    )


def format_with(element: str, scales: str) -> str:
    """The name of the format with separate codes and scales of these kinds."""
    return next(row["spec"] for row in _core.formats() if (row["element"], row["scales"]) == (element, scales))


@dataclass(frozen=True)
class Encoded:
    format: str
    codes: Tensor  # uint8 (int8: int8), [E, N, bytes of a row]
    scales: Tensor | None  # as the format has them; None: blocks of GGUF, or bf16
    tensor_scale: Tensor | None = None  # float32 [E], of formats that have one
    zeros: Tensor | None = None  # as codes are, in the shape of scales, of formats that have them
    order: Tensor | None = None  # int64 [K]: column i of the codes is column order[i] of the matrix; None: its own
    columns: int = field(kw_only=True)
    name: str = field(default="", kw_only=True, compare=False)  # of the tensor it came from, for messages

    def __post_init__(self) -> None:
        form = format_of(self.format)
        where = self.name or self.format
        if self.columns <= 0 or self.columns % form.multiple:
            raise InputError(where, f"{self.columns} columns", f"a multiple of {form.multiple} for {self.format}")
        if self.codes.dim() != 3:
            raise InputError(where, f"codes of shape {list(self.codes.shape)}", "[experts, rows, bytes of a row]")
        experts, rows, _ = self.codes.shape
        expect(f"{where}: codes", self.codes, (experts, rows, form.row_bytes(self.columns)), form.code_dtype)
        shape = form.scale_shape(rows, self.columns)
        if (shape is None) != (self.scales is None):
            raise InputError(where, "no scales" if self.scales is None else "scales", f"what {self.format} has")
        if shape is not None and self.scales is not None and form.scale_dtype is not None:
            expect(f"{where}: scales", self.scales, (experts, *shape), form.scale_dtype)
        if form.tensor_scale != (self.tensor_scale is not None):
            raise InputError(where, f"tensor_scale {self.tensor_scale}", f"what {self.format} has")
        if self.tensor_scale is not None:
            expect(f"{where}: tensor_scale", self.tensor_scale, (experts,), torch.float32)
        if form.zeros != (self.zeros is not None):
            raise InputError(where, "no zeros" if self.zeros is None else "zeros", f"what {self.format} has")
        if self.zeros is not None and shape is not None:
            expect(f"{where}: zeros", self.zeros, (experts, *shape), form.code_dtype)
        if self.order is not None:
            expect(f"{where}: order of columns", self.order, (self.columns,), torch.int64)
        if self.codes.stride(2) != 1 and self.codes.shape[2] > 1:
            raise InputError(f"{where}: codes", f"strides {list(self.codes.stride())}", "rows that are contiguous")

    @property
    def experts(self) -> int:
        return self.codes.shape[0]

    @property
    def rows(self) -> int:
        return self.codes.shape[1]

    @property
    def bytes(self) -> int:
        """Bytes of codes and scales."""
        parts = (self.codes, self.scales, self.tensor_scale, self.zeros, self.order)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    @property
    def packable(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What the core packs: a format has a scale of the whole matrix, or zeros, or neither."""
        return self.codes, self.scales, self.tensor_scale if self.zeros is None else self.zeros


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape:
        raise InputError(name, f"shape {list(tensor.shape)}", str(list(shape)))
    if tensor.dtype != dtype:
        raise InputError(name, str(tensor.dtype), str(dtype))


def stack(parts: list[Encoded]) -> Encoded:
    """Experts of one format and size as one; copies."""
    first = parts[0]

    def joined(tensors: list[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    codes = joined([part.codes for part in parts])
    assert codes is not None
    scales, tensor_scale = joined([part.scales for part in parts]), joined([part.tensor_scale for part in parts])
    zeros = joined([part.zeros for part in parts])
    return Encoded(first.format, codes, scales, tensor_scale, zeros, columns=first.columns, name=first.name)


# float32 numbers of codes, one to an element, by the kind of elements.
ELEMENTS: dict[str, Callable[[EncodedFormat, Tensor], Tensor]] = {
    "int8": lambda form, codes: codes.float(),
    "uint": lambda form, codes: codes.float().sub_(form.zero_point),
    "e4m3": lambda form, codes: codes.contiguous().view(torch.float8_e4m3fn).float(),
    "e2m1": lambda form, codes: torch.tensor([*E2M1, *(-x for x in E2M1)], device=codes.device)[codes.int()],
}


def _nested_scales(scales: Tensor, tensor_scale: Tensor | None) -> Tensor:
    assert tensor_scale is not None
    return scales.contiguous().view(torch.float8_e4m3fn).float() * tensor_scale[:, None, None]


# float32 scales of their stored form and of that of the matrix, by the kind of scales.
SCALES: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "floats": lambda scales, _: scales.float(),
    "scale_and_zero": lambda scales, _: scales.float(),
    "e8m0": lambda scales, _: e8m0(scales),
    "e4m3": _nested_scales,
}


def decode(encoded: Encoded) -> Tensor:
    """Float32 `[E, N, K]`: the numbers that the bytes stand for."""
    form, rows, columns = format_of(encoded.format), encoded.rows, encoded.columns
    if form.element == LOSSLESS:
        return encoded.codes.contiguous().view(torch.bfloat16).float()
    if not form.per_byte:
        return _decode_gguf(encoded)
    values = ELEMENTS[form.element](form, nibbles(encoded.codes) if form.per_byte == 2 else encoded.codes)
    assert encoded.scales is not None
    scales = SCALES[form.scales](encoded.scales, encoded.tensor_scale)

    def spread(of_groups: Tensor) -> Tensor:
        if not form.span:
            return of_groups.reshape(encoded.experts, rows, 1)
        if form.row_span > 1:
            of_groups = of_groups.repeat_interleave(form.row_span, 1)[:, :rows]
        return of_groups.repeat_interleave(form.span, 2)[:, :, :columns]

    if encoded.zeros is not None:
        values.sub_(spread(encoded.zeros.float()))
    values.mul_(spread(scales))
    return values if encoded.order is None else in_own_order(values, encoded.order)


def in_own_order(columns: Tensor, order: Tensor) -> Tensor:
    """The columns of a matrix whose codes are in another order."""
    result = torch.empty_like(columns)
    result[..., order] = columns
    return result


def nibbles(codes: Tensor) -> Tensor:
    """`[..., bytes] -> [..., 2 bytes]`, the low half first."""
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)


def pair_nibbles(values: Tensor) -> Tensor:
    """The inverse of `nibbles`; values are uint8 below 16."""
    pairs = values.contiguous().view(torch.int16)  # the odd column is the high byte; strided bytes are much slower
    return (pairs | (pairs >> 4)).to(torch.uint8)


def e8m0(codes: Tensor) -> Tensor:
    """2^(code - 127) in float32; 255 is no number."""
    table = [math.ldexp(1.0, code - 127) for code in range(255)] + [math.nan]
    return torch.tensor(table, device=codes.device)[codes.int()]


def gguf_package() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise InputError("gguf", "no such package", "the package gguf", "pip install 'ktransformers[gguf]'") from error
    return gguf


def _decode_gguf(encoded: Encoded) -> Tensor:
    gguf = gguf_package()
    kind = gguf.GGMLQuantizationType[encoded.format.upper()]
    rows = encoded.codes.cpu().contiguous().numpy()
    values = gguf.quants.dequantize(rows.reshape(-1, rows.shape[-1]), kind)
    return torch.from_numpy(values).to(encoded.codes.device).reshape(encoded.experts, encoded.rows, encoded.columns)
