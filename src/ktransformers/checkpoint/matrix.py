"""One weight matrix `[N, K]` from the tensors of a safetensors checkpoint.

A matrix is stored as several tensors with one name and several endings, its *parts*: codes (`weight`, `weight_packed`,
`qweight`), scales (`weight_scale_inv`, `scales`, ...) and sometimes more. `recognise` tells the format from names,
dtypes and shapes, without reading data; `Matrix.build` then makes an `Encoded` of the data, as a view where possible. A
part that the format has no use for is refused by name; parts about activations are ignored. Scales of e8m0 over blocks
of 128 become float32, which holds them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ktransformers.checkpoint.encoded import BLOCK, Encoded, e8m0, format_with
from ktransformers.checkpoint.quantisation import NONE, Quantisation
from ktransformers.errors import InputError

FLOATS = ("BF16", "F16", "F32")
DTYPES = {  # as safetensors spells them
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "U8": torch.uint8,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
SPELLED = {dtype: word for word, dtype in DTYPES.items()}
E8M0 = ("U8", "F8_E8M0")
# Endings of parts. Those of activations, caches and observers say nothing about the weight.
ACTIVATIONS = {
    "input_scale", "input_global_scale", "input_zero_point", "activation_scale", "output_scale", "k_scale", "v_scale",
    "input_scale_inv", "weight_observer",
}  # fmt: skip
CODES = ("weight", "weight_packed", "qweight", "blocks")
COMPANIONS = (
    "weight_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale", "weight_shape", "weight_zero_point",
    "weight_g_idx", "scale", "scales", "qzeros", "g_idx", "scale_inv",
)  # fmt: skip
ENDINGS = frozenset({*CODES, *COMPANIONS, *ACTIVATIONS})


class Read(Protocol):
    """Reads a tensor of the file by name; `e8m0`: bytes that are exponents."""

    def __call__(self, name: str, e8m0: bool = False) -> Tensor: ...


@dataclass(frozen=True)
class TensorRef:
    """A tensor of the file, unread."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def refuse(self, expected: str, remedy: str = "") -> InputError:
        return InputError(self.name, f"{self.dtype} {list(self.shape)}", expected, remedy)


@dataclass(frozen=True)
class Matrix:
    spec: str  # "bf16": plain numbers
    build: Callable[[Read], Tensor | Encoded]  # from a reader by name: [N, K], or [1, N, K]


def recognise(parts: Mapping[str, TensorRef], rows: int, columns: int, quantisation: Quantisation = NONE) -> Matrix:
    """`parts` by ending, one of `CODES` among them."""
    used = {ending: part for ending, part in parts.items() if ending not in ACTIVATIONS}
    if "qweight" in used:
        return _gptq(used, rows, columns, quantisation)
    if "weight_packed" in used:
        return _packed(used, rows, columns)
    weight = used["weight"]
    if weight.dtype in FLOATS:
        _only(used, ("weight",))
        _shape(weight, (rows, columns))
        return Matrix("bf16", lambda read: read(weight.name))
    scale = next((used[key] for key in ("weight_scale_inv", "weight_scale", "scale", "scale_inv") if key in used), None)
    if scale is None:
        raise weight.refuse(f"{' or '.join(FLOATS)}, or a scale beside it")
    if weight.dtype == "F8_E4M3":
        _only(used, ("weight", *(key for key, part in used.items() if part is scale)))
        _shape(weight, (rows, columns))
        return _fp8(weight, scale, rows, columns)
    if "weight_scale_2" in used and weight.dtype == "U8":
        _only(used, ("weight", "weight_scale", "weight_scale_2"))
        return _nested_nibbles(weight, used["weight_scale"], used["weight_scale_2"], rows, columns, divides=False)
    _only(used, ("weight", *(key for key, part in used.items() if part is scale)))
    if weight.dtype == "I8" and weight.shape == (rows, columns):
        return _int8(weight, scale, rows, columns)
    if weight.dtype in ("I8", "U8") and columns % 2 == 0 and weight.shape == (rows, columns // 2):
        return _mx_nibbles(weight, scale, rows, columns)
    raise weight.refuse(f"codes of [{rows}, {columns}]: F8_E4M3 or I8 of that shape, or U8 of half the columns")


def dimensions(parts: Mapping[str, TensorRef]) -> tuple[int, int]:
    """Rows and columns of a quantised matrix, from its parts alone."""
    if "qweight" in parts:
        return parts["qweight"].shape[1], parts["qweight"].shape[0] * 8
    codes = parts.get("weight_packed") or parts["weight"]
    rows, across = codes.shape
    scale = next((parts[key] for key in ("weight_scale_inv", "weight_scale", "scale") if key in parts), None)
    paired = scale is not None and scale.dtype in E8M0 and scale.shape[1:] == (across // 16,)
    if codes.dtype == "U8" or (codes.dtype == "I8" and paired):
        return rows, across * 2
    return rows, across * 8 if codes.dtype == "I32" else across


def _only(used: Mapping[str, TensorRef], known: tuple[str, ...]) -> None:
    for ending in sorted(set(used) - set(known)):
        raise InputError(used[ending].name, f"a tensor that this format has no use for ({ending})", ", ".join(known))


def _shape(part: TensorRef, shape: tuple[int, ...]) -> None:
    if part.shape != shape:
        raise InputError(part.name, f"shape {list(part.shape)}", f"{list(shape)}, as config.json says")


def _multiple(part: TensorRef, columns: int, multiple: int) -> None:
    if columns % multiple:
        raise InputError(part.name, f"{columns} columns", f"a multiple of {multiple}")


def _need(used: Mapping[str, TensorRef], codes: TensorRef, ending: str) -> TensorRef:
    if ending not in used:
        raise InputError(codes.name, f"no {ending} beside it", "codes and their scales")
    return used[ending]


def _fp8(weight: TensorRef, scale: TensorRef, rows: int, columns: int) -> Matrix:
    across, down = math.ceil(columns / BLOCK), math.ceil(rows / BLOCK)
    flat = tuple(size for size in scale.shape if size != 1)
    if scale.dtype in E8M0 and scale.shape == (rows, math.ceil(columns / 32)):
        _multiple(weight, columns, 32)
        return _in_bytes(format_with("e4m3", "e8m0"), weight, scale, columns)
    if scale.dtype not in (*FLOATS, "F8_E8M0"):
        raise scale.refuse("float scales, or U8 scales for each 32 columns")
    shape: tuple[int, ...]
    if scale.shape == (down, across):
        spec, shape, expand = "fp8:128x128", (down, across), False
    elif not flat:  # one scale for the whole matrix
        spec, shape, expand = "fp8:row", (1, 1), True
    elif scale.shape == (rows, across) and len(scale.shape) == 2 and across > 1:
        spec, shape, expand = "fp8:1x128", (rows, across), False
    elif scale.shape in ((rows,), (rows, 1)):
        spec, shape, expand = "fp8:row", (rows,), False
    else:
        raise scale.refuse(
            f"[{down}, {across}] (blocks of 128 x 128), [{rows}, {across}], [{rows}] (rows) or one for all"
        )

    def build(read: Read) -> Encoded:
        scales = _floats(read(scale.name)).reshape(shape)
        scales = scales.reshape(1).repeat(rows) if expand else scales
        return Encoded(spec, _bytes(read(weight.name)), scales[None], columns=columns, name=weight.name)

    return Matrix(spec, build)


def _int8(weight: TensorRef, scale: TensorRef, rows: int, columns: int) -> Matrix:
    if scale.dtype not in FLOATS or scale.shape not in ((rows,), (rows, 1), (1,), (), (1, 1)):
        raise scale.refuse(f"one float scale for each of {rows} rows")

    def build(read: Read) -> Encoded:
        scales = _floats(read(scale.name)).reshape(-1).expand(rows).contiguous()
        return Encoded("int8", read(weight.name)[None], scales[None], columns=columns, name=weight.name)

    return Matrix("int8", build)


def _mx_nibbles(weight: TensorRef, scale: TensorRef, rows: int, columns: int) -> Matrix:
    _multiple(weight, columns, 32)
    if scale.dtype not in E8M0 or scale.shape != (rows, columns // 32):
        raise scale.refuse(f"e8m0 scales [{rows}, {columns // 32}], one for each 32 columns")
    return _in_bytes(format_with("e2m1", "e8m0"), weight, scale, columns)


def _in_bytes(spec: str, weight: TensorRef, scale: TensorRef, columns: int) -> Matrix:
    """Codes and e8m0 scales as the format has them, byte by byte."""

    def build(read: Read) -> Encoded:
        scales = _bytes(read(scale.name, e8m0=True))
        return Encoded(spec, _bytes(read(weight.name)), scales, columns=columns, name=weight.name)

    return Matrix(spec, build)


def _nested_nibbles(
    weight: TensorRef, scale: TensorRef, outer: TensorRef, rows: int, columns: int, divides: bool
) -> Matrix:
    _multiple(weight, columns, 16)
    _shape(weight, (rows, columns // 2))
    if scale.dtype != "F8_E4M3" or scale.shape != (rows, columns // 16):
        raise scale.refuse(f"F8_E4M3 scales [{rows}, {columns // 16}], one for each 16 columns")
    if outer.dtype != "F32" or math.prod(outer.shape) != 1:
        raise outer.refuse("one F32 number")
    spec = format_with("e2m1", "e4m3")

    def build(read: Read) -> Encoded:
        factor = read(outer.name).reshape(1)
        if divides and not factor:
            raise InputError(outer.name, "0, by which scales are divided", "another number")
        factor = 1 / factor if divides else factor
        return Encoded(
            spec, _bytes(read(weight.name)), _bytes(read(scale.name)), factor, columns=columns, name=weight.name
        )

    return Matrix(spec, build)


def _packed(used: Mapping[str, TensorRef], rows: int, columns: int) -> Matrix:
    """compressed-tensors: int32 words of 8 nibbles or 4 bytes along a row, or bytes of e2m1."""
    codes, scale = used["weight_packed"], _need(used, used["weight_packed"], "weight_scale")
    for ending in ("weight_zero_point", "weight_g_idx"):
        if ending in used:
            raise InputError(
                used[ending].name, "it", "symmetric weights in the order of columns", "take another release"
            )
    if "weight_global_scale" in used:
        _only(used, ("weight_packed", "weight_scale", "weight_global_scale"))
        return _nested_nibbles(codes, scale, used["weight_global_scale"], rows, columns, divides=True)
    _only(used, ("weight_packed", "weight_scale", "weight_shape"))
    if codes.dtype == "U8" and scale.dtype in E8M0:
        _shape(codes, (rows, columns // 2))
        return _mx_nibbles(codes, scale, rows, columns)
    if codes.dtype == "I32" and codes.shape == (rows, math.ceil(columns / 4)) and columns % 4 == 0:
        return _packed_int8(codes, scale, rows, columns)
    _multiple(codes, columns, 8)
    if (codes.dtype, codes.shape) not in (("I32", (rows, columns // 8)), ("U8", (rows, columns // 2))):
        raise codes.refuse(f"I32 [{rows}, {columns // 8}]: eight codes in a word")
    spec = _int4_spec(scale, scale.shape == (rows, 1), (rows, None), columns)
    shaped = used.get("weight_shape")

    def build(read: Read) -> Encoded:
        if shaped is not None and read(shaped.name).flatten().tolist() != [rows, columns]:
            given = read(shaped.name).flatten().tolist()
            raise InputError(shaped.name, given, f"[{rows}, {columns}], as config.json says")
        return Encoded(spec, _bytes(read(codes.name)), read(scale.name)[None], columns=columns, name=codes.name)

    return Matrix(spec, build)


def _packed_int8(codes: TensorRef, scale: TensorRef, rows: int, columns: int) -> Matrix:
    if scale.dtype not in FLOATS or scale.shape not in ((rows,), (rows, 1)):
        raise scale.refuse(f"one float scale for each of {rows} rows", "8 bits with groups are not read")

    def build(read: Read) -> Encoded:
        stored = _bytes(read(codes.name)).to(torch.int16).sub_(128).to(torch.int8)
        return Encoded("int8", stored, _floats(read(scale.name)).reshape(1, rows), columns=columns, name=codes.name)

    return Matrix("int8", build)


def _int4_spec(scale: TensorRef, one_group: bool, shape: tuple[int | None, int | None], columns: int) -> str:
    """The group follows from the number of scales along K, the dimension that is None in `shape`."""
    suffix = {"BF16": "", "F16": ":f16", "F32": ":f32"}.get(scale.dtype)
    along = shape.index(None)
    fits = len(scale.shape) == 2 and scale.shape[1 - along] == shape[1 - along] and scale.shape[along] > 0
    if suffix is None or not fits:
        raise scale.refuse(f"float scales for groups of the {columns} columns of each row")
    group = 0 if one_group else -(-columns // scale.shape[along])
    if group % 32 or (group and -(-columns // group) != scale.shape[along]):
        raise scale.refuse("groups of a multiple of 32 columns")
    return f"int4:{group}{suffix}"


def _gptq(used: Mapping[str, TensorRef], rows: int, columns: int, quantisation: Quantisation) -> Matrix:
    """Words hold 8 codes of a column: the codes are copied once, transposed."""
    _only(used, ("qweight", "scales", "qzeros", "g_idx"))
    codes, scale = used["qweight"], _need(used, used["qweight"], "scales")
    _multiple(codes, columns, 8)
    if codes.dtype != "I32" or codes.shape != (columns // 8, rows):
        raise codes.refuse(f"I32 [{columns // 8}, {rows}]: eight codes of 4 bits in a word")
    spec = _int4_spec(scale, scale.shape == (1, rows), (None, rows), columns)
    zeros, order = used.get("qzeros"), used.get("g_idx")
    if zeros is not None and (zeros.dtype != "I32" or zeros.shape != (scale.shape[0], -(-rows // 8))):
        raise zeros.refuse(f"I32 [{scale.shape[0]}, {-(-rows // 8)}]")
    if order is not None and order.shape != (columns,):
        raise order.refuse(f"[{columns}]")
    group = int(spec.split(":")[1]) or columns

    def build(read: Read) -> Encoded:
        zero = quantisation.gptq_zero
        if zeros is not None and not bool((_bytes(read(zeros.name)) == zero * 17).all()):
            raise InputError(zeros.name, "zeros of an asymmetric quantisation", f"{zero} throughout")
        if order is not None and not _in_order(read(order.name), group):
            raise InputError(order.name, "columns in order of activation (desc_act)", "their own order")
        transposed = read(codes.name).T.contiguous()
        scales = read(scale.name).T.contiguous()[None]
        return Encoded(spec, _bytes(transposed), scales, columns=columns, name=codes.name)

    return Matrix(spec, build)


def _in_order(groups: Tensor, size: int) -> bool:
    return bool((groups == torch.arange(len(groups), device=groups.device) // size).all())


def _bytes(tensor: Tensor) -> Tensor:
    """`[N, K]` of anything as `[1, N, bytes]`."""
    return tensor.contiguous().view(torch.uint8)[None]


def _floats(scales: Tensor) -> Tensor:
    return e8m0(scales.view(torch.uint8)) if scales.dtype == torch.float8_e8m0fnu else scales.float()
