"""The encoders of csrc/kernels/encode.h in plain torch, number by number the same: what they must write, to the bit.

Sums of squares are taken as there, in 16 sums whose halves are then added, because the order decides between scales
that err alike. Blocks of GGUF are not here: the `gguf` package defines them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.checkpoint.encoded import Encoded, EncodedFormat, format_of, pair_nibbles

FP8_MAX, E2M1_MAX = 448.0, 6.0
CLIPS = ((False, 0.0), (True, 0.0), (False, 0.075), (True, 0.075), (False, 0.175))
SUMS = 16


def encode(matrix: Tensor, spec: str) -> Encoded:
    """`[E, N, K]` in a format with separate codes and scales."""
    form = format_of(spec)
    experts, _, columns = matrix.shape
    numbers = matrix.float()
    outer = None
    if form.tensor_scale:
        outer = (numbers.flatten(1).abs().amax(1) / (FP8_MAX * E2M1_MAX)).clamp_min(2.0**-100)
    parts = [
        _encode(numbers[expert], form, 1.0 if outer is None else float(outer[expert])) for expert in range(experts)
    ]
    codes, scales = torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])
    return Encoded(spec, codes, scales, outer, columns=columns)


def _encode(numbers: Tensor, form: EncodedFormat, outer: float) -> tuple[Tensor, Tensor]:
    span = form.span or numbers.shape[1] + -numbers.shape[1] % SUMS
    groups = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % span)).view(len(numbers), -1, span)
    if form.scales == "e8m0":
        values, scales = _powers_of_two(groups, form)
    elif form.scales == "e4m3":
        stored = (groups.abs().amax(-1) / (E2M1_MAX * outer)).clamp_max(FP8_MAX).to(torch.float8_e4m3fn)
        values, scales = _nearest(groups * _inverse(stored.float() * outer)[..., None], form)[0], stored
    elif form.element == "uint":
        values, scales = _clipped(groups, form)
    else:
        values, scales = _largest(groups, form)
    flat = values.flatten(1)[:, : numbers.shape[1]]
    if form.flat_scales:
        scales = scales[:, 0]
    assert form.scale_dtype is not None
    stored_scales = scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales.to(form.scale_dtype)
    return (pair_nibbles(flat) if form.per_byte == 2 else flat).to(form.code_dtype), stored_scales


def _inverse(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 0.0, 1.0 / scales)


def _code_range(form: EncodedFormat) -> tuple[float, float]:
    if form.element == "uint":
        return -form.zero_point, 2 ** (8 // form.per_byte) - 1 - form.zero_point
    limit = {"int8": 127.0, "e4m3": FP8_MAX, "e2m1": E2M1_MAX}[form.element]
    return -limit, limit


def _squares(miss: Tensor) -> Tensor:
    """Over the last dimension, a multiple of 16."""
    parts = miss.square().unflatten(-1, (-1, SUMS))
    sums = parts[..., 0, :].clone()
    for place in range(1, parts.shape[-2]):
        sums += parts[..., place, :]
    for half in (8, 4, 2, 1):
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def _largest(groups: Tensor, form: EncodedFormat) -> tuple[Tensor, Tensor]:
    largest = groups.abs().amax(-1)
    if form.row_span > 1:
        largest = torch.stack([part.amax(0) for part in torch.split(largest, form.row_span)])
    scales = largest / _code_range(form)[1]
    each = scales.repeat_interleave(form.row_span, 0)[: len(groups)]
    return _nearest(groups * _inverse(each)[..., None], form)[0], scales


def _clipped(groups: Tensor, form: EncodedFormat) -> tuple[Tensor, Tensor]:
    least, most = _code_range(form)
    low, high = groups.aminmax(dim=-1)
    peak = torch.where(high >= -low, high, low)
    best, kept = torch.full_like(peak, torch.inf), torch.zeros_like(peak)
    for on_largest, beyond in CLIPS:
        code = most - beyond * least if on_largest else least + beyond * least
        assert form.scale_dtype is not None
        scale = (peak / code).to(form.scale_dtype).float()
        trial = groups * _inverse(scale)[..., None]
        error = _squares(trial.round().clamp(least, most) - trial) * scale.square()
        kept = torch.where(error < best, scale, kept)
        best = torch.where(error < best, error, best)
    return _nearest(groups * _inverse(kept)[..., None], form)[0], kept


def _powers_of_two(groups: Tensor, form: EncodedFormat) -> tuple[Tensor, Tensor]:
    low, limit = _code_range(form)
    top = (groups.abs().amax(-1) / limit).clamp_min(2.0**-126)
    mantissa, exponent = torch.frexp(top)  # top is mantissa * 2^exponent, and the mantissa at least one half
    first = exponent - (mantissa == 0.5).int()
    candidates = []
    for below in (0, 1):
        power = (first - below).clamp(-127, 127)
        scaled = torch.ldexp(groups, -power[..., None])
        code, value = _nearest(scaled.clamp(low, limit), form)
        unit = torch.ldexp(torch.ones(power.shape), power)
        candidates.append((_squares(value - scaled) * unit.square(), power, code))
    better = candidates[1][0] < candidates[0][0]
    power = torch.where(better, candidates[1][1], candidates[0][1])
    return torch.where(better[..., None], candidates[1][2], candidates[0][2]), power + 127


def _nearest(numbers: Tensor, form: EncodedFormat) -> tuple[Tensor, Tensor]:
    """(codes, their values)."""
    low, high = _code_range(form)
    if form.element == "e2m1":
        size = numbers.abs()
        code = torch.minimum(size * 2, torch.minimum(size + 2, size / 2 + 4)).round().clamp_max(7)
        value = torch.maximum(code / 2, torch.maximum(code - 2, code * 2 - 8)).copysign(numbers)
        return code.to(torch.uint8) | (torch.signbit(numbers).to(torch.uint8) << 3), value
    if form.element == "e4m3":
        stored = numbers.clamp(low, high).to(torch.float8_e4m3fn)
        return stored.view(torch.uint8), stored.float()
    values = numbers.round().clamp(low, high)
    return (values + form.zero_point).to(form.code_dtype), values
