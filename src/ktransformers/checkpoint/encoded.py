"""`Encoded`: matrices `[E, N, K]` in the very bytes of a release, and what those bytes mean as float32 numbers.

A format is a string (`int4:32`, `fp8:128x128`, `q4_k`; docs/formats.md has the table). Codes are rows of bytes
`[E, N, bytes]`, scales lie beside them; only the last dimension has to be contiguous, so gate and up may be views of
one tensor. `decode` is the definition that everything else is held against: plain, not fast. GGUF's blocks it hands to
the `gguf` package, which is an optional extra. Four-bit codes lie two in a byte, the even column in the low half.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ktransformers.errors import InputError

# Blocks of GGUF: values and bytes of each.
GGUF_BLOCKS = {
    "q8_0": (32, 34), "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q2_k": (256, 84),
    "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210), "iq4_nl": (32, 18),
    "iq4_xs": (256, 136), "iq1_s": (256, 50), "iq1_m": (256, 56), "iq2_xxs": (256, 66), "iq2_xs": (256, 74),
    "iq2_s": (256, 82), "iq3_xxs": (256, 98), "iq3_s": (256, 110), "tq1_0": (256, 54), "tq2_0": (256, 66),
}  # fmt: skip
INT4 = re.compile(r"int4:(?P<group>0|[1-9]\d*)(?::(?P<scale>f16|f32))?")
INT4_SCALES = {None: torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
PLAIN = ("int8", "fp8:128x128", "fp8:1x128", "fp8:row", "mxfp8", "mxfp4", "nvfp4")
BLOCK = 128  # of fp8
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same, negative, from 8 on


@dataclass(frozen=True)
class EncodedFormat:
    """What a format's tensors look like for matrices of N rows and K columns."""

    name: str
    code_dtype: torch.dtype
    per_byte: int  # codes in a byte; 0: blocks of GGUF
    span: int  # columns that share a scale; 0: all of a row
    scale_dtype: torch.dtype | None
    row_span: int = 1  # rows that share it
    multiple: int = 1  # of K

    def row_bytes(self, columns: int) -> int:
        if self.per_byte:
            return columns // self.per_byte
        values, size = GGUF_BLOCKS[self.name]
        return columns // values * size

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...] | None:
        """Without the dimension of experts."""
        if self.scale_dtype is None:
            return None
        if not self.span:
            return (rows, 1) if self.per_byte == 2 else (rows,)
        return (math.ceil(rows / self.row_span), math.ceil(columns / self.span))


def format_of(name: str) -> EncodedFormat:
    """By its name; an unknown one is refused."""
    if found := INT4.fullmatch(name):
        group = int(found["group"])
        if group % 32:
            raise InputError("format", name, "a group that is a multiple of 32, or 0 for whole rows")
        return EncodedFormat(name, torch.uint8, 2, group, INT4_SCALES[found["scale"]], multiple=2)
    if name in GGUF_BLOCKS:
        return EncodedFormat(name, torch.uint8, 0, 0, None, multiple=GGUF_BLOCKS[name][0])
    if name not in PLAIN:
        words = [*PLAIN, "int4:GROUP", *GGUF_BLOCKS]
        raise InputError("format", repr(name), "one of " + ", ".join(words))
    byte, single = torch.uint8, torch.float32
    return {
        "int8": EncodedFormat(name, torch.int8, 1, 0, single),
        "fp8:128x128": EncodedFormat(name, byte, 1, BLOCK, single, row_span=BLOCK),
        "fp8:1x128": EncodedFormat(name, byte, 1, BLOCK, single),
        "fp8:row": EncodedFormat(name, byte, 1, 0, single),
        "mxfp8": EncodedFormat(name, byte, 1, 32, byte, multiple=32),
        "mxfp4": EncodedFormat(name, byte, 2, 32, byte, multiple=32),
        "nvfp4": EncodedFormat(name, byte, 2, 16, byte, multiple=16),
    }[name]


@dataclass(frozen=True)
class Encoded:
    format: str
    codes: Tensor  # uint8 (int8: int8), [E, N, bytes of a row]
    scales: Tensor | None  # by the format
    tensor_scale: Tensor | None = None  # nvfp4: float32 [E]
    columns: int = field(kw_only=True)
    name: str = field(default="", kw_only=True, compare=False)  # of the tensor it came from, for messages

    def __post_init__(self) -> None:
        found = format_of(self.format)
        where = self.name or self.format
        if self.columns <= 0 or self.columns % found.multiple:
            raise InputError(where, f"{self.columns} columns", f"a multiple of {found.multiple} for {self.format}")
        if self.codes.dim() != 3:
            raise InputError(where, f"codes of shape {list(self.codes.shape)}", "[experts, rows, bytes of a row]")
        experts, rows, _ = self.codes.shape
        expect(f"{where}: codes", self.codes, (experts, rows, found.row_bytes(self.columns)), found.code_dtype)
        shape = found.scale_shape(rows, self.columns)
        if (shape is None) != (self.scales is None):
            raise InputError(where, "no scales" if self.scales is None else "scales", f"what {self.format} has")
        if shape is not None and self.scales is not None and found.scale_dtype is not None:
            expect(f"{where}: scales", self.scales, (experts, *shape), found.scale_dtype)
        if (self.format == "nvfp4") != (self.tensor_scale is not None):
            raise InputError(where, f"tensor_scale {self.tensor_scale}", "one for nvfp4 and for no other format")
        if self.tensor_scale is not None:
            expect(f"{where}: tensor_scale", self.tensor_scale, (experts,), torch.float32)
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
        """Of codes and scales."""
        tensors = [part for part in (self.codes, self.scales, self.tensor_scale) if part is not None]
        return sum(part.numel() * part.element_size() for part in tensors)


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape:
        raise InputError(name, f"shape {list(tensor.shape)}", str(list(shape)))
    if tensor.dtype != dtype:
        raise InputError(name, str(tensor.dtype), str(dtype))


def stack(parts: list[Encoded]) -> Encoded:
    """Experts of one format and size as one; copies."""
    first = parts[0]

    def joined(tensors: list[Tensor | None]) -> Tensor | None:
        found = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(found) if found else None

    codes = joined([part.codes for part in parts])
    assert codes is not None
    scales, tensor_scale = joined([part.scales for part in parts]), joined([part.tensor_scale for part in parts])
    return Encoded(first.format, codes, scales, tensor_scale, columns=first.columns, name=first.name)


def decode(encoded: Encoded) -> Tensor:
    """Float32 `[E, N, K]`: the numbers that the bytes stand for."""
    found, rows, columns = format_of(encoded.format), encoded.rows, encoded.columns
    if not found.per_byte:
        return _decode_gguf(encoded)
    if encoded.format.startswith(("int8", "int4")):
        values = encoded.codes.float() if found.per_byte == 1 else nibbles(encoded.codes).float().sub_(8)
    elif found.per_byte == 1:
        values = encoded.codes.contiguous().view(torch.float8_e4m3fn).float()
    else:
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=encoded.codes.device)
        values = table[nibbles(encoded.codes).int()]
    assert encoded.scales is not None
    scales = encoded.scales
    if encoded.format in ("mxfp8", "mxfp4"):
        scales = e8m0(scales)
    elif encoded.format == "nvfp4":
        assert encoded.tensor_scale is not None
        scales = scales.contiguous().view(torch.float8_e4m3fn).float() * encoded.tensor_scale[:, None, None]
    scales = scales.float()
    if not found.span:
        return values.mul_(scales.reshape(encoded.experts, rows, 1))
    if found.row_span > 1:
        scales = scales.repeat_interleave(found.row_span, 1)[:, :rows]
    return values.mul_(scales.repeat_interleave(found.span, 2)[:, :, :columns])


def nibbles(codes: Tensor) -> Tensor:
    """`[..., bytes] -> [..., 2 bytes]`, the low half first."""
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)


def pair_nibbles(values: Tensor) -> Tensor:
    """The way back; values are uint8 below 16."""
    return values[..., 0::2] | (values[..., 1::2] << 4)


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
    found = torch.from_numpy(values).to(encoded.codes.device)
    return found.reshape(encoded.experts, encoded.rows, encoded.columns)


def encode(tensor: Tensor, spec: str) -> Encoded:
    """The nearest numbers that `spec` can hold of `[N, K]` or `[E, N, K]` in any float dtype."""
    from ktransformers.checkpoint.encode import encode as run

    return run(tensor, spec)
