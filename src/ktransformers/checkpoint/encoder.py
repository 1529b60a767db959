"""From floats to a format: round to nearest, scales from the largest number of each group.

int4 tries a few scales for each group and keeps the one with the least squared error: the largest number on 7 or on -8,
and both a little smaller, which cuts the tail and serves the rest. The scale is rounded to its stored dtype before
anything is divided by it. Work goes over some rows at a time, so that memory is that of the result and little more.
GGUF's older types go through the `gguf` package; it has no encoder for the K and IQ types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ktransformers.checkpoint.encoded import BLOCK, Encoded, EncodedFormat, format_of, gguf_package, pair_nibbles
from ktransformers.errors import InputError

FP8_MAX, E2M1_MAX = 448.0, 6.0
NUMBERS = 1 << 18  # of a matrix at a time
# int4: the group's largest number is laid on this code, exactly or beyond it.
LADDER = (-8.0, 7.0, -8.6, 7.6, -9.4)


def encode(tensor: Tensor, spec: str) -> Encoded:
    """`[N, K]` or `[E, N, K]`; an error says what K has to be."""
    found = format_of(spec)
    matrix = tensor.detach()
    matrix = matrix.unsqueeze(0) if matrix.dim() == 2 else matrix
    if matrix.dim() != 3 or not matrix.is_floating_point():
        given = f"{tensor.dtype} of shape {list(tensor.shape)}"
        raise InputError(spec, given, "floats of shape [rows, columns] or [experts, rows, columns]")
    experts, rows, columns = matrix.shape
    if not columns or columns % found.multiple:
        raise InputError(spec, f"{columns} columns", f"a multiple of {found.multiple}")
    if not found.per_byte:
        return _gguf(matrix, spec)
    codes = torch.empty(experts, rows, found.row_bytes(columns), dtype=found.code_dtype)
    shape = found.scale_shape(rows, columns)
    assert shape is not None and found.scale_dtype is not None
    scales = torch.empty(experts, *shape, dtype=found.scale_dtype)
    tensor_scale = None
    if spec == "nvfp4":
        tensor_scale = _largest(matrix.float().flatten(1)).div_(FP8_MAX * E2M1_MAX).clamp_min_(2.0**-100)
    one = _CODERS[spec.partition(":")[0]]
    for expert in range(experts):
        outer = 1.0 if tensor_scale is None else float(tensor_scale[expert])
        for first, last in _strips(rows, columns, found.row_span):
            numbers = matrix[expert, first:last].float()
            if not torch.isfinite(numbers).all():
                raise InputError(spec, "numbers that are not finite", "finite ones", "the source is damaged")
            place = slice(first // found.row_span, -(-last // found.row_span))
            one(numbers, found, codes[expert, first:last], scales[expert, place], outer)
    return Encoded(spec, codes, scales, tensor_scale, columns=columns)


def _strips(rows: int, columns: int, multiple: int) -> Iterator[tuple[int, int]]:
    step = max(1, NUMBERS // columns // multiple) * multiple
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def _largest(groups: Tensor) -> Tensor:
    """Absolute, over the last dimension."""
    low, high = groups.aminmax(dim=-1)
    return torch.maximum(high, low.neg_())


def _groups(numbers: Tensor, span: int) -> Tensor:
    """`[rows, K] -> [rows, groups, span]`, the last group filled up with zeros."""
    rows, columns = numbers.shape
    span = span or columns
    missing = -columns % span
    if missing:
        numbers = torch.nn.functional.pad(numbers, (0, missing))
    return numbers.view(rows, -1, span)


def _inverse(scales: Tensor) -> Tensor:
    """1/s, and 0 where s is 0: a group of zeros stays one."""
    return torch.where(scales == 0, 0.0, 1.0 / scales)


def _int8(numbers: Tensor, found: EncodedFormat, codes: Tensor, scales: Tensor, outer: float) -> None:
    scales.copy_(_largest(numbers) / 127)
    codes.copy_((numbers * _inverse(scales)[:, None]).round_().clamp_(-127, 127))


def _int4(numbers: Tensor, found: EncodedFormat, codes: Tensor, scales: Tensor, outer: float) -> None:
    groups = _groups(numbers, found.span)
    low, high = groups.aminmax(dim=-1)
    peak = torch.where(high >= -low, high, low)  # with its sign
    best = torch.full_like(peak, torch.inf)
    kept = torch.zeros_like(peak)
    trial, miss = torch.empty_like(groups), torch.empty_like(groups)
    for rung in LADDER:
        scale = (peak / rung).to(scales.dtype).float()
        torch.mul(groups, _inverse(scale)[..., None], out=trial)
        torch.round(trial, out=miss).clamp_(-8, 7).sub_(trial)
        error = torch.linalg.vecdot(miss, miss).mul_(scale.square())
        better = error < best
        best = torch.where(better, error, best)
        kept = torch.where(better, scale, kept)
    scales.copy_(kept)
    torch.mul(groups, _inverse(kept)[..., None], out=trial).round_().clamp_(-8, 7).add_(8)
    codes.copy_(pair_nibbles(trial.to(torch.uint8).flatten(1)[:, : numbers.shape[1]]))


def _fp8(numbers: Tensor, found: EncodedFormat, codes: Tensor, scales: Tensor, outer: float) -> None:
    groups = _groups(numbers, found.span)
    largest = _largest(groups)
    if found.row_span > 1:  # rows of this strip begin with a block
        largest = torch.stack([part.amax(0) for part in torch.split(largest, BLOCK)])
    scale = largest / FP8_MAX
    scales.copy_(scale if found.span else scale[:, 0])
    if found.row_span > 1:
        scale = scale.repeat_interleave(BLOCK, 0)[: len(numbers)]
    scaled = (groups * _inverse(scale)[..., None]).clamp_(-FP8_MAX, FP8_MAX).flatten(1)[:, : numbers.shape[1]]
    codes.copy_(scaled.to(torch.float8_e4m3fn).view(torch.uint8))


def _mx(numbers: Tensor, found: EncodedFormat, codes: Tensor, scales: Tensor, outer: float) -> None:
    """The power of two that just holds the largest number, or the one below it, whichever errs less."""
    limit = E2M1_MAX if found.per_byte == 2 else FP8_MAX
    groups = _groups(numbers, found.span)
    top = (_largest(groups) / limit).clamp_min_(2.0**-126).log2_().ceil_()
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for below in (0, 1):
        exponent = (top - below).clamp_(-127, 127)
        scaled = torch.ldexp(groups, -exponent[..., None]).clamp_(-limit, limit)
        code, value = _nearest_e2m1(scaled) if found.per_byte == 2 else _nearest_e4m3(scaled)
        error = torch.ldexp(value, exponent[..., None]).sub_(groups).square_().sum(-1)
        if best is None:
            best = (error, exponent, code)
        else:
            better = error < best[0]
            best = (error, torch.where(better, exponent, best[1]), torch.where(better[..., None], code, best[2]))
    assert best is not None
    scales.copy_((best[1] + 127).to(torch.uint8))
    flat = best[2].flatten(1)
    codes.copy_(pair_nibbles(flat) if found.per_byte == 2 else flat)


def _nvfp4(numbers: Tensor, found: EncodedFormat, codes: Tensor, scales: Tensor, outer: float) -> None:
    groups = _groups(numbers, found.span)
    stored = (_largest(groups) / (E2M1_MAX * outer)).clamp_max_(FP8_MAX).to(torch.float8_e4m3fn)
    scales.copy_(stored.view(torch.uint8))
    scaled = groups * _inverse(stored.float() * outer)[..., None]
    codes.copy_(pair_nibbles(_nearest_e2m1(scaled)[0].flatten(1)))


def _nearest_e2m1(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, their values). Between 0, 2, 4 and 6 the code is a straight line of the size, each flatter than the one
    before, so it is the least of three lines; a tie rounds to the even code."""
    size = numbers.abs()
    code = torch.minimum(size * 2, torch.minimum(size + 2, size / 2 + 4)).round_()
    value = torch.maximum(code / 2, torch.maximum(code - 2, code * 2 - 8)).copysign_(numbers)
    return code.to(torch.uint8) | (torch.signbit(numbers).to(torch.uint8) << 3), value


def _nearest_e4m3(numbers: Tensor) -> tuple[Tensor, Tensor]:
    stored = numbers.to(torch.float8_e4m3fn)
    return stored.view(torch.uint8), stored.float()


_CODERS: dict[str, Callable[[Tensor, EncodedFormat, Tensor, Tensor, float], None]] = {
    "int8": _int8,
    "int4": _int4,
    "fp8": _fp8,
    "mxfp8": _mx,
    "mxfp4": _mx,
    "nvfp4": _nvfp4,
}


def _gguf(matrix: Tensor, spec: str) -> Encoded:
    gguf = gguf_package()
    experts, rows, columns = matrix.shape
    try:
        data = gguf.quants.quantize(
            matrix.float().reshape(-1, columns).numpy(), gguf.GGMLQuantizationType[spec.upper()]
        )
    except NotImplementedError:
        raise InputError(
            spec, "a format that can be read and not written", "q8_0, q5_0, q5_1, q4_0, q4_1, tq1_0 or tq2_0",
            "llama-quantize writes the others",
        ) from None  # fmt: skip
    codes = torch.from_numpy(data).view(torch.uint8).reshape(experts, rows, -1)
    return Encoded(spec, codes, None, columns=columns)
