"""One weight matrix `[N, K]` from the tensors of a safetensors checkpoint.

A matrix is stored as several tensors with one name and several endings, its *parts*: quantized values (`weight`,
`weight_packed`, `qweight`), scales (`weight_scale_inv`, `scales`, ...) and sometimes more. `recognise` tells the format
from names, dtypes and shapes, without reading data; `Matrix.build` then makes an `Encoded` of the data, as a view where
possible. A part that the format has no use for is refused by name; parts about activations are ignored. Scales of e8m0
over blocks of 128 become float32, which holds them exactly. GPTQ and AWQ have the matrix transposed and several values
in a word; these are copied once, in order of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ktransformers.checkpoint.encoded import BLOCK, Encoded, e8m0, format_with, nibbles, pair_nibbles
from ktransformers.checkpoint.quantisation import NONE, Quantisation
from ktransformers.ground.errors import InputError

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
QWEIGHTS = ("weight", "weight_packed", "qweight", "blocks")
COMPANIONS = (
    "weight_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale", "weight_shape", "weight_zero_point",
    "weight_g_idx", "scale", "scales", "qzeros", "g_idx", "scale_inv",
)  # fmt: skip
ENDINGS = frozenset({*QWEIGHTS, *COMPANIONS, *ACTIVATIONS})


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
    spec: str  # "bf16": dense
    build: Callable[[Read], Tensor | Encoded]  # from a reader by name: [N, K], or [1, N, K]


def recognise(parts: Mapping[str, TensorRef], rows: int, columns: int, quantisation: Quantisation = NONE) -> Matrix:
    """`parts` by ending, one of `QWEIGHTS` among them."""
    used = {ending: part for ending, part in parts.items() if ending not in ACTIVATIONS}
    if "qweight" in used:
        return (_awq if quantisation.method == "awq" else _gptq)(used, rows, columns, quantisation)
    if "weight_packed" in used:
        return _packed(used, rows, columns)
    weight = used["weight"]
    if weight.dtype in FLOATS:
        _only(used, ("weight",))
        _shape(weight, (rows, columns))
        return Matrix("bf16", lambda read: read(weight.name))
    scale = next((used[key] for key in ("weight_scale_inv", "weight_scale", "scale", "scale_inv") if key in used), None)
    if scale is None:
        raise weight.refuse(f"{' or '.join(FLOATS)}, or a scale with it")
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
    raise weight.refuse(f"a matrix [{rows}, {columns}]: F8_E4M3 or I8 of that shape, or U8 of half the columns")


def dimensions(parts: Mapping[str, TensorRef], quantisation: Quantisation = NONE) -> tuple[int, int]:
    """Rows and columns of a quantised matrix, from its parts alone."""
    if "qweight" in parts:
        first, second = parts["qweight"].shape
        in_word = 32 // quantisation.bits
        return (second * in_word, first) if quantisation.method == "awq" else (second, first * in_word)
    qweight = parts.get("weight_packed") or parts["weight"]
    rows, across = qweight.shape
    scale = next((parts[key] for key in ("weight_scale_inv", "weight_scale", "scale") if key in parts), None)
    paired = scale is not None and scale.dtype in E8M0 and scale.shape[1:] == (across // 16,)
    if qweight.dtype == "U8" or (qweight.dtype == "I8" and paired):
        return rows, across * 2
    return rows, across * 8 if qweight.dtype == "I32" else across


def _only(used: Mapping[str, TensorRef], known: tuple[str, ...]) -> None:
    for ending in sorted(set(used) - set(known)):
        raise InputError(used[ending].name, f"a tensor that this format has no use for ({ending})", ", ".join(known))


def _shape(part: TensorRef, shape: tuple[int, ...]) -> None:
    if part.shape != shape:
        raise InputError(part.name, f"shape {list(part.shape)}", f"{list(shape)}, as config.json says")


def _multiple(part: TensorRef, columns: int, multiple: int) -> None:
    if columns % multiple:
        raise InputError(part.name, f"{columns} columns", f"a multiple of {multiple}")


def _need(used: Mapping[str, TensorRef], qweight: TensorRef, ending: str) -> TensorRef:
    if ending not in used:
        raise InputError(qweight.name, f"no {ending} with it", "a quantized weight and its scales")
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
    """Values and e8m0 scales as the format has them, byte by byte."""

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
    qweight, scale = used["weight_packed"], _need(used, used["weight_packed"], "weight_scale")
    for ending in ("weight_zero_point", "weight_g_idx"):
        if ending in used:
            raise InputError(
                used[ending].name, "it", "symmetric weights in the order of columns", "take another release"
            )
    if "weight_global_scale" in used:
        _only(used, ("weight_packed", "weight_scale", "weight_global_scale"))
        return _nested_nibbles(qweight, scale, used["weight_global_scale"], rows, columns, divides=True)
    _only(used, ("weight_packed", "weight_scale", "weight_shape"))
    if qweight.dtype == "U8" and scale.dtype in E8M0:
        _shape(qweight, (rows, columns // 2))
        return _mx_nibbles(qweight, scale, rows, columns)
    if qweight.dtype == "I32" and qweight.shape == (rows, math.ceil(columns / 4)) and columns % 4 == 0:
        return _packed_int8(qweight, scale, rows, columns)
    _multiple(qweight, columns, 8)
    if (qweight.dtype, qweight.shape) not in (("I32", (rows, columns // 8)), ("U8", (rows, columns // 2))):
        raise qweight.refuse(f"I32 [{rows}, {columns // 8}]: eight values in a word")
    spec = _group_spec("int4", scale, scale.shape == (rows, 1), (rows, None), columns)
    shaped = used.get("weight_shape")

    def build(read: Read) -> Encoded:
        if shaped is not None and read(shaped.name).flatten().tolist() != [rows, columns]:
            given = read(shaped.name).flatten().tolist()
            raise InputError(shaped.name, given, f"[{rows}, {columns}], as config.json says")
        return Encoded(spec, _bytes(read(qweight.name)), read(scale.name)[None], columns=columns, name=qweight.name)

    return Matrix(spec, build)


def _packed_int8(qweight: TensorRef, scale: TensorRef, rows: int, columns: int) -> Matrix:
    if scale.dtype not in FLOATS or scale.shape not in ((rows,), (rows, 1)):
        raise scale.refuse(f"one float scale for each of {rows} rows", "8 bits with groups are not read")

    def build(read: Read) -> Encoded:
        stored = _bytes(read(qweight.name)).to(torch.int16).sub_(128).to(torch.int8)
        return Encoded("int8", stored, _floats(read(scale.name)).reshape(1, rows), columns=columns, name=qweight.name)

    return Matrix("int8", build)


def _group_spec(
    word: str, scale: TensorRef, one_group: bool, shape: tuple[int | None, int | None], columns: int
) -> str:
    """The group follows from the number of scales along K, the dimension that is None in `shape`."""
    suffix = {"BF16": "", "F16": ":f16", "F32": ":f32"}.get(scale.dtype)
    along = shape.index(None)
    fits = len(scale.shape) == 2 and scale.shape[1 - along] == shape[1 - along] and scale.shape[along] > 0
    if suffix is None or not fits:
        raise scale.refuse(f"float scales for groups of the {columns} columns of each row")
    group = 0 if one_group else -(-columns // scale.shape[along])
    if group % 32 or (group and -(-columns // group) != scale.shape[along]):
        raise scale.refuse("groups of a multiple of 32 columns")
    return f"{word}:{group}{suffix}"


def _gptq(used: Mapping[str, TensorRef], rows: int, columns: int, quantisation: Quantisation) -> Matrix:
    """A word has 8 values of 4 bits, or 4 of 8, of one row of the matrix. Without zeros of its own for every group, and
    in 4 bits, the matrix is int4; otherwise uint4 or uint8."""
    _only(used, ("qweight", "scales", "qzeros", "g_idx"))
    qweight, scale = used["qweight"], _need(used, used["qweight"], "scales")
    bits = quantisation.bits
    in_word = 32 // bits
    _multiple(qweight, columns, in_word)
    if qweight.dtype != "I32" or qweight.shape != (columns // in_word, rows):
        raise qweight.refuse(f"I32 [{columns // in_word}, {rows}]: {in_word} values of {bits} bits in a word")
    symmetric = bits == 4 and quantisation.symmetric
    spec = _group_spec("int4" if symmetric else f"uint{bits}", scale, scale.shape == (1, rows), (None, rows), columns)
    zeros, order = used.get("qzeros"), used.get("g_idx")
    if not symmetric:
        zeros = _need(used, qweight, "qzeros")
        _exact_with_zeros(scale)
    if zeros is not None and (zeros.dtype != "I32" or zeros.shape != (scale.shape[0], -(-rows // in_word))):
        raise zeros.refuse(f"I32 [{scale.shape[0]}, {-(-rows // in_word)}]")
    if order is not None and order.shape != (columns,):
        raise order.refuse(f"[{columns}]")
    group = int(spec.split(":")[1]) or columns

    def build(read: Read) -> Encoded:
        stored = None if zeros is None else _fields(read(zeros.name), bits)[:, :rows]
        if symmetric and stored is not None and not bool((stored == quantisation.gptq_zero).all()):
            raise InputError(zeros.name, "zeros of an asymmetric quantisation", f"{quantisation.gptq_zero} throughout")  # type: ignore[union-attr]
        numbers = read(qweight.name).T.contiguous()
        permutation = None if order is None else _permutation(order, read(order.name).long(), group)
        of_groups = None
        if not symmetric and zeros is not None and stored is not None:
            of_groups = _stored_zeros(zeros, stored, bits, lower=quantisation.gptq_zero == 7).T
        return _by_rows(spec, _fields(numbers, bits), read(scale.name).T, of_groups, permutation, qweight.name)

    return Matrix(spec, build)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the rows of the matrix in a word, the lowest bits first


def _awq(used: Mapping[str, TensorRef], rows: int, columns: int, quantisation: Quantisation) -> Matrix:
    """A word has the values of 8 rows of the matrix at one column, in `AWQ_ORDER`."""
    _only(used, ("qweight", "scales", "qzeros"))
    qweight, scale, zeros = (_need(used, used["qweight"], ending) for ending in ("qweight", "scales", "qzeros"))
    if rows % 8 or qweight.dtype != "I32" or qweight.shape != (columns, rows // 8):
        raise qweight.refuse(f"I32 [{columns}, {rows // 8}]: the values of eight rows in a word")
    spec = _group_spec("uint4", scale, scale.shape == (1, rows), (None, rows), columns)
    _exact_with_zeros(scale)
    if zeros.dtype != "I32" or zeros.shape != (scale.shape[0], rows // 8):
        raise zeros.refuse(f"I32 [{scale.shape[0]}, {rows // 8}]")

    def in_order(words: Tensor) -> Tensor:
        spread = _fields(words, 4).reshape(words.shape[0], -1, 8)
        result = torch.empty_like(spread)
        result[..., torch.tensor(AWQ_ORDER)] = spread
        return result.flatten(1)

    def build(read: Read) -> Encoded:
        numbers, of_groups = in_order(read(qweight.name)).T, in_order(read(zeros.name)).T
        return _by_rows(spec, numbers, read(scale.name).T, of_groups, None, qweight.name)

    return Matrix(spec, build)


def _fields(words: Tensor, bits: int) -> Tensor:
    """The values in the words of each row, the lowest bits first, as uint8."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else nibbles(octets)


def _exact_with_zeros(scale: TensorRef) -> None:
    """(code - zero) * scale has all its bits in float32 for scales of 16 bits."""
    if scale.dtype not in ("F16", "BF16"):
        raise scale.refuse("F16 or BF16 scales with zeros")


def _stored_zeros(part: TensorRef, stored: Tensor, bits: int, lower: bool) -> Tensor:
    """GPTQ's first format stores zeros one lower than they are; for the largest code, programs disagree whether that is
    the zero after it or 0."""
    if not lower:
        return stored
    if bool((stored == 2**bits - 1).any()):
        raise InputError(part.name, f"stored zeros of {2**bits - 1}, which programs read in two ways", "smaller ones")
    return stored + 1


def _permutation(part: TensorRef, groups: Tensor, size: int) -> Tensor | None:
    """The order of columns in which those of a group are neighbours; None: their own."""
    if _in_order(groups, size):
        return None
    order = torch.sort(groups, stable=True).indices
    if not _in_order(groups[order], size):
        raise InputError(part.name, "groups of unequal sizes", f"{size} columns in each group")
    return order


def _less_128(octets: Tensor) -> Tensor:
    """As int8."""
    return (octets ^ 128).view(torch.int8)


def _by_rows(
    spec: str, qweight: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None, name: str
) -> Encoded:
    """Values `[N, K]` as uint8, scales and zeros `[N, groups]`."""
    columns = qweight.shape[1]
    if order is not None:
        qweight = qweight[:, order]
    if spec.startswith("uint8"):
        qweight, zeros = _less_128(qweight), None if zeros is None else _less_128(zeros)
    else:
        qweight = pair_nibbles(qweight)
    zeros = None if zeros is None else zeros.contiguous()[None]
    return Encoded(
        spec, qweight.contiguous()[None], scales.contiguous()[None], None, zeros, order, columns=columns, name=name
    )


def _in_order(groups: Tensor, size: int) -> bool:
    return bool((groups == torch.arange(len(groups), device=groups.device) // size).all())


def _bytes(tensor: Tensor) -> Tensor:
    """`[N, K]` of anything as `[1, N, bytes]`."""
    return tensor.contiguous().view(torch.uint8)[None]


def _floats(scales: Tensor) -> Tensor:
    return e8m0(scales.view(torch.uint8)) if scales.dtype == torch.float8_e8m0fnu else scales.float()
