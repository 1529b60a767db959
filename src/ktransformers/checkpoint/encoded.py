"""`Encoded`: quantized matrices `[E, N, K]` in the bytes of a checkpoint, and the float32 values of those bytes.

A format is a string (`int4:32`, `fp8:128x128`, `q4_k`; docs/formats.md has the table), whose facts are those of the
native core (`_core.format`). `qweight` is rows of bytes `[E, N, bytes]`, `scales` is a tensor of its own; only the last
dimension has to be contiguous, so gate and up may be views of one tensor. `decode` dequantizes and is the definition
that everything else is held against: plain, not fast. It is told by the kinds of elements and scales, so that a format
of known kinds has no line here; blocks of GGUF go to the `gguf` package, which is an optional extra. Four-bit values
lie two in a byte, the even column in the low half. Formats with zeros (uint4, uint8) have a zero point for every scale;
values and zero points of uint8 are int8, both less 128. `bf16:12` is plain bf16 here, two bytes a value; it takes 12
bits once it is packed."""

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
    element: str  # how a quantized value is stored: csrc/kernels/format.h, ElementKind
    zero_point: int  # of unsigned values
    scales: str  # how scales are written: csrc/kernels/format.h, ScaleKind
    code_dtype: torch.dtype
    per_byte: int  # values in a byte; 0: blocks of GGUF, or bf16
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
        raise InputError("format", name, "a quantized format", "bf16 matrices are plain tensors")
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
    """The name of the format with separate values and scales of these kinds."""
    return next(row["spec"] for row in _core.formats() if (row["element"], row["scales"]) == (element, scales))


@dataclass(frozen=True)
class Encoded:
    format: str
    qweight: Tensor  # uint8 (int8: int8), [E, N, bytes of a row]
    scales: Tensor | None  # as the format has them; None: blocks of GGUF, or bf16
    tensor_scale: Tensor | None = None  # float32 [E], of formats that have one
    zeros: Tensor | None = None  # in the dtype of qweight and the shape of scales, of formats that have zero points
    order: Tensor | None = None  # int64 [K]: stored column i is column order[i] of the matrix; None: its own
    columns: int = field(kw_only=True)
    name: str = field(default="", kw_only=True, compare=False)  # of the tensor it came from, for messages

    def __post_init__(self) -> None:
        form = format_of(self.format)
        where = self.name or self.format
        if self.columns <= 0 or self.columns % form.multiple:
            raise InputError(where, f"{self.columns} columns", f"a multiple of {form.multiple} for {self.format}")
        if self.qweight.dim() != 3:
            raise InputError(where, f"qweight of shape {list(self.qweight.shape)}", "[experts, rows, bytes of a row]")
        experts, rows, _ = self.qweight.shape
        expect(f"{where}: qweight", self.qweight, (experts, rows, form.row_bytes(self.columns)), form.code_dtype)
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
        if self.qweight.stride(2) != 1 and self.qweight.shape[2] > 1:
            raise InputError(f"{where}: qweight", f"strides {list(self.qweight.stride())}", "rows that are contiguous")

    @property
    def experts(self) -> int:
        return self.qweight.shape[0]

    @property
    def rows(self) -> int:
        return self.qweight.shape[1]

    @property
    def bytes(self) -> int:
        """Bytes of values and scales."""
        parts = (self.qweight, self.scales, self.tensor_scale, self.zeros, self.order)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    @property
    def packable(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What the core packs: a format has a scale of the whole matrix, or zeros, or neither."""
        return self.qweight, self.scales, self.tensor_scale if self.zeros is None else self.zeros


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

    qweight = joined([part.qweight for part in parts])
    assert qweight is not None
    scales, tensor_scale = joined([part.scales for part in parts]), joined([part.tensor_scale for part in parts])
    zeros = joined([part.zeros for part in parts])
    return Encoded(first.format, qweight, scales, tensor_scale, zeros, columns=first.columns, name=first.name)


# float32 of stored elements, one to an element, by their kind.
ELEMENTS: dict[str, Callable[[EncodedFormat, Tensor], Tensor]] = {
    "int8": lambda form, qweight: qweight.float(),
    "uint": lambda form, qweight: qweight.float().sub_(form.zero_point),
    "e4m3": lambda form, qweight: qweight.contiguous().view(torch.float8_e4m3fn).float(),
    "e2m1": lambda form, qweight: torch.tensor([*E2M1, *(-x for x in E2M1)], device=qweight.device)[qweight.int()],
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
    """Dequantizes to float32 `[E, N, K]`."""
    form, rows, columns = format_of(encoded.format), encoded.rows, encoded.columns
    if form.element == LOSSLESS:
        return encoded.qweight.contiguous().view(torch.bfloat16).float()
    if not form.per_byte:
        return _decode_gguf(encoded)
    values = ELEMENTS[form.element](form, nibbles(encoded.qweight) if form.per_byte == 2 else encoded.qweight)
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
    """The columns of a matrix that is stored in another order."""
    result = torch.empty_like(columns)
    result[..., order] = columns
    return result


def nibbles(qweight: Tensor) -> Tensor:
    """`[..., bytes] -> [..., 2 bytes]`, the low half first."""
    return torch.stack([qweight & 15, qweight >> 4], dim=-1).flatten(-2)


def pair_nibbles(values: Tensor) -> Tensor:
    """The inverse of `nibbles`; values are uint8 below 16."""
    pairs = values.contiguous().view(torch.int16)  # the odd column is the high byte; strided bytes are much slower
    return (pairs | (pairs >> 4)).to(torch.uint8)


def e8m0(qweight: Tensor) -> Tensor:
    """2^(code - 127) in float32; 255 is no number."""
    table = [math.ldexp(1.0, code - 127) for code in range(255)] + [math.nan]
    return torch.tensor(table, device=qweight.device)[qweight.int()]


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
    rows = encoded.qweight.cpu().contiguous().numpy()
    values = gguf.quants.dequantize(rows.reshape(-1, rows.shape[-1]), kind)
    return torch.from_numpy(values).to(encoded.qweight.device).reshape(encoded.experts, encoded.rows, encoded.columns)
