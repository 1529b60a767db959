"""From floats to a format: round to nearest, scales from the largest number of each group.

Unsigned codes with float scales (int4) try a few scales for each group and keep the one with the least squared error:
the largest number on the largest or on the smallest code, and both a little smaller, which clips the tail and serves
the rest. The scale is rounded to its stored dtype before anything is divided by it. Work goes over some rows at a time,
so that memory is that of the result and little more. Encoders are told by the kinds of elements and scales; GGUF's
older types go through the `gguf` package, which has no encoder for the K and IQ types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint.encoded import Encoded, EncodedFormat, format_of, gguf_package, pair_nibbles
from ktransformers.errors import InputError

FP8_MAX, E2M1_MAX = 448.0, 6.0
MAX_CHUNK_NUMBERS = 1 << 18  # of a matrix at a time
# Where the largest number of a group is laid: on the smallest or the largest code, or beyond it by a share of the range
# below zero, which clips it.
CLIPS = ((False, 0.0), (True, 0.0), (False, 0.075), (True, 0.075), (False, 0.175))


def encode(tensor: Tensor, spec: str) -> Encoded:
    """The nearest numbers that `spec` can hold of `[N, K]` or `[E, N, K]` in any float dtype."""
    form = format_of(spec)
    matrix = tensor.detach()
    matrix = matrix.unsqueeze(0) if matrix.dim() == 2 else matrix
    if matrix.dim() != 3 or not matrix.is_floating_point():
        given = f"{tensor.dtype} of shape {list(tensor.shape)}"
        raise InputError(spec, given, "floats of shape [rows, columns] or [experts, rows, columns]")
    experts, rows, columns = matrix.shape
    if not columns or columns % form.multiple:
        raise InputError(spec, f"{columns} columns", f"a multiple of {form.multiple}")
    if not form.per_byte:
        return _encode_gguf(matrix, spec)
    codes = torch.empty(experts, rows, form.row_bytes(columns), dtype=form.code_dtype)
    shape = form.scale_shape(rows, columns)
    assert shape is not None and form.scale_dtype is not None
    scales = torch.empty(experts, *shape, dtype=form.scale_dtype)
    tensor_scale = None
    if form.tensor_scale:
        tensor_scale = _largest(matrix.float().flatten(1)).div_(FP8_MAX * E2M1_MAX).clamp_min_(2.0**-100)
    encode_rows = _ENCODERS[form.scales]
    for expert in range(experts):
        outer = 1.0 if tensor_scale is None else float(tensor_scale[expert])
        for first, last in _row_ranges(rows, columns, form.row_span):
            numbers = matrix[expert, first:last].float()
            if not torch.isfinite(numbers).all():
                raise InputError(spec, "numbers that are not finite", "finite ones", "the source is damaged")
            chunk = slice(first // form.row_span, -(-last // form.row_span))
            encode_rows(numbers, form, codes[expert, first:last], scales[expert, chunk], outer)
    return Encoded(spec, codes, scales, tensor_scale, columns=columns)


def _row_ranges(rows: int, columns: int, multiple: int) -> Iterator[tuple[int, int]]:
    step = max(1, MAX_CHUNK_NUMBERS // columns // multiple) * multiple
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


def _code_range(form: EncodedFormat) -> tuple[float, float]:
    """The smallest and the largest number of a code."""
    if form.element == "uint":
        return -form.zero_point, 2 ** (8 // form.per_byte) - 1 - form.zero_point
    limit = {"int8": 127.0, "e4m3": FP8_MAX, "e2m1": E2M1_MAX}[form.element]
    return -limit, limit


def _store_codes(values: Tensor, form: EncodedFormat, codes: Tensor, columns: int) -> None:
    """`values`: `[rows, groups, span]` codes."""
    flat = values.flatten(1)[:, :columns]
    codes.copy_(pair_nibbles(flat) if form.per_byte == 2 else flat)


def _encode_floats(numbers: Tensor, form: EncodedFormat, codes: Tensor, scales: Tensor, outer: float) -> None:
    if form.element == "uint":
        _encode_clipped(numbers, form, codes, scales)
        return
    _, limit = _code_range(form)
    groups = _groups(numbers, form.span)
    largest = _largest(groups)
    if form.row_span > 1:  # the rows of this chunk begin with a block
        largest = torch.stack([part.amax(0) for part in torch.split(largest, form.row_span)])
    scale = largest / limit
    scales.copy_(scale[:, 0] if form.flat_scales else scale)
    if form.row_span > 1:
        scale = scale.repeat_interleave(form.row_span, 0)[: len(numbers)]
    _store_codes(_nearest(groups * _inverse(scale)[..., None], form)[0], form, codes, numbers.shape[1])


def _encode_clipped(numbers: Tensor, form: EncodedFormat, codes: Tensor, scales: Tensor) -> None:
    """Unsigned codes, with the best of a few scales for each group."""
    groups = _groups(numbers, form.span)
    least, most = _code_range(form)
    low, high = groups.aminmax(dim=-1)
    peak = torch.where(high >= -low, high, low)  # with its sign
    best = torch.full_like(peak, torch.inf)
    kept = torch.zeros_like(peak)
    trial, miss = torch.empty_like(groups), torch.empty_like(groups)
    for on_largest, beyond in CLIPS:
        scale = (peak / (most - beyond * least if on_largest else least + beyond * least)).to(scales.dtype).float()
        torch.mul(groups, _inverse(scale)[..., None], out=trial)
        torch.round(trial, out=miss).clamp_(least, most).sub_(trial)
        error = torch.linalg.vecdot(miss, miss).mul_(scale.square())
        better = error < best
        best = torch.where(better, error, best)
        kept = torch.where(better, scale, kept)
    scales.copy_(kept[:, 0] if form.flat_scales else kept)
    torch.mul(groups, _inverse(kept)[..., None], out=trial)
    _store_codes(_nearest(trial, form)[0], form, codes, numbers.shape[1])


def _encode_e8m0(numbers: Tensor, form: EncodedFormat, codes: Tensor, scales: Tensor, outer: float) -> None:
    """The power of two that just holds the largest number, or the one below it, whichever errs less."""
    low, limit = _code_range(form)
    groups = _groups(numbers, form.span)
    top = (_largest(groups) / limit).clamp_min_(2.0**-126).log2_().ceil_()
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for below in (0, 1):
        exponent = (top - below).clamp_(-127, 127)
        code, value = _nearest(torch.ldexp(groups, -exponent[..., None]).clamp_(low, limit), form)
        error = torch.ldexp(value, exponent[..., None]).sub_(groups).square_().sum(-1)
        if best is None:
            best = (error, exponent, code)
        else:
            better = error < best[0]
            best = (error, torch.where(better, exponent, best[1]), torch.where(better[..., None], code, best[2]))
    assert best is not None
    scales.copy_((best[1] + 127).to(torch.uint8))
    _store_codes(best[2], form, codes, numbers.shape[1])


def _encode_e4m3(numbers: Tensor, form: EncodedFormat, codes: Tensor, scales: Tensor, outer: float) -> None:
    groups = _groups(numbers, form.span)
    stored = (_largest(groups) / (_code_range(form)[1] * outer)).clamp_max_(FP8_MAX).to(torch.float8_e4m3fn)
    scales.copy_(stored.view(torch.uint8))
    scaled = groups * _inverse(stored.float() * outer)[..., None]
    _store_codes(_nearest(scaled, form)[0], form, codes, numbers.shape[1])


def _nearest(numbers: Tensor, form: EncodedFormat) -> tuple[Tensor, Tensor]:
    """(codes, their values)."""
    low, high = _code_range(form)
    if form.element == "e2m1":
        return _nearest_e2m1(numbers)
    if form.element == "e4m3":
        return _nearest_e4m3(numbers.clamp_(low, high))
    values = numbers.round_().clamp_(low, high)
    return (values + form.zero_point).to(form.code_dtype), values


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


# By the kind of scales: (numbers, format, codes, scales, scale of the whole matrix).
_ENCODERS: dict[str, Callable[[Tensor, EncodedFormat, Tensor, Tensor, float], None]] = {
    "floats": _encode_floats,
    "e8m0": _encode_e8m0,
    "e4m3": _encode_e4m3,
}


def _encode_gguf(matrix: Tensor, spec: str) -> Encoded:
    gguf = gguf_package()
    experts, rows, columns = matrix.shape
    try:
        data = gguf.quants.quantize(
            matrix.float().reshape(-1, columns).numpy(), gguf.GGMLQuantizationType[spec.upper()]
        )
    except NotImplementedError:
        written = [row["spec"] for row in _core.formats() if row["written"]]
        raise InputError(
            spec, "a format that can be read and not written", "one of " + ", ".join(written),
            "llama-quantize writes the others",
        ) from None  # fmt: skip
    codes = torch.from_numpy(data).view(torch.uint8).reshape(experts, rows, -1)
    return Encoded(spec, codes, None, columns=columns)
