"""The layout of a linear layer's packed weight in the memory of a GPU, and its conversion from and to the CPU's.

A weight `[N, K]` is a matrix of 32-bit words with N words in a row, so that every copy of a kernel has 16 bytes. K is
divided into steps. In a step of `parts` times `rows` numbers of K, word q of an output holds the quants (stored
integers or small floats) of columns q, q + rows, q + 2 rows, ...: the s-th quants of `rows` words are multiplied with
`rows` neighbouring numbers of x, and share a scale. Formats of two planes have a second matrix for the upper bits.
Scales of 16 bits lie two in a word, those of 8 bits four; the two levels of GGUF's K types lie in words of their own
(`heads`), and their scales of 6 bits in bytes, which adds 1 to 5 % to the format's size. Signed integers are stored as
unsigned ones. K is padded with zeros to whole steps and N to a multiple of 32."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.quantized.gpu.dequantize import (
    Fields,
    packed_fields,
    packed_planes,
    packed_q3_k_scales,
    packed_q4_k_scales,
    planes,
    put_fields,
    q3_k_scales,
    q4_k_scales,
)
from ktransformers.quantized.gpu.layout import TILE_K, TILE_N, PackedMatrix, Strip, StripFormat

# How quants become values, and how the words of scales are read (linear_triton.py).
UINT, E4M3, E2M1 = range(3)
ROW, STRIP, F32, F16, BF16, E8M0, NESTED, MINS, Q4K, Q2K, BYTES, F16_ZERO, BF16_ZERO = range(13)
PER_WORD = {F16: 2, BF16: 2, E8M0: 4, NESTED: 4, Q4K: 2, Q2K: 4, BYTES: 4}
K_TYPES = {"q2_k": (Q2K, 16), "q3_k": (BYTES, 16), "q4_k": (Q4K, 32), "q6_k": (BYTES, 16)}
SUPER_BLOCK = 256  # numbers of K that share a head
WHOLE_ROW = 1 << 30  # the group of a scale of all of K
E4M3_NAN = 127  # without its sign
# Quants that are converted at a time.
CHUNK = 1 << 24
# Values of quants are multiplied with scales in float32 far from 1 (linear_triton.py), where scales beyond
# these would overflow. No weight has such.
LARGEST_SCALE = 2.0**40
LARGEST_BF16_SCALE = 2.0**13
LARGEST_E8M0 = {UINT: 160, E4M3: 190, E2M1: 190}


def low_place(low: int, part: int) -> tuple[int, int]:
    """By how many bits the kernel moves a word of the first plane for the quants of a part, and where they are then: at
    most at bit 16, so that with the bits of the second plane they are part of a float32 number's mantissa."""
    at = part % (32 // low) * low
    move = 0 if at <= (8 if low == 8 else 16) else (16 if low == 8 else 12)
    return move, at - move


@functools.cache
def high_places(low: int, high: int) -> tuple[int, ...]:
    """The bit of a word of the second plane at which the code of each part begins, so that few different shifts put
    them above those of the first plane (`low_place`)."""
    wanted = {part: low + low_place(low, part)[1] for part in range(32 // high)}
    places: dict[int, int] = {}
    free = set(range(0, 32, high))
    while wanted:
        fits: list[dict[int, int]] = []
        for shift in sorted(range(-32, 32), key=abs):
            taken: dict[int, int] = {}
            for part, at in wanted.items():
                if at + shift in free and at + shift not in taken.values():
                    taken[part] = at + shift
            fits.append(taken)
        best = max(fits, key=len)
        places |= best
        free -= set(best.values())
        wanted = {part: at for part, at in wanted.items() if part not in best}
    return tuple(places[part] for part in range(32 // high))


@dataclass(frozen=True)
class WordFormat:
    element: int
    zero: int  # that is subtracted from unsigned quants
    scales: int
    low: int  # bits of the first plane
    high: int  # and of the second, or 0
    group: int  # numbers of K that share a scale
    rows: int  # words of one output in a step

    @property
    def parts(self) -> int:
        return 32 // (self.high or self.low)

    @property
    def low_places(self) -> tuple[int, ...]:
        return tuple(range(0, 32, self.low))

    @property
    def high_places(self) -> tuple[int, ...]:
        return high_places(self.low, self.high) if self.high else ()

    @property
    def step(self) -> int:
        """Numbers of K."""
        return self.rows * self.parts

    @property
    def scale_words(self) -> int:
        """Of one output in a step, if a scale is of a part of it."""
        return max(1, self.step // self.group // PER_WORD.get(self.scales, 1))

    @property
    def of_row(self) -> bool:
        """Whether a scale is of all numbers of an output."""
        return self.group == WHOLE_ROW

    @property
    def has_heads(self) -> bool:
        return self.scales in (Q4K, Q2K, BYTES, NESTED)


@functools.cache
def word_format(form: StripFormat) -> WordFormat | None:
    """None: a format that has no such layout."""
    zero = 0 if form.scales == "scale_and_zero" else 128
    elements = {"int8": (UINT, zero), "uint": (UINT, form.zero_point), "e4m3": (E4M3, 0), "e2m1": (E2M1, 0)}
    if form.element not in elements or len(form.planes) > 2 or form.planes[0] == 1:
        return None
    scales = _scales_of(form)
    if scales is None:
        return None
    low, high = form.planes[0], form.planes[1] if len(form.planes) == 2 else 0
    rows = 16 if scales[1] == 16 or high or low == 2 else 32
    words = WordFormat(*elements[form.element], scales[0], low, high, scales[1], rows)
    if words.scales in (F16, BF16) and (words.step // words.group % 2 or words.step < words.group):
        words = WordFormat(*elements[form.element], F32, low, high, scales[1], rows)
    if words.of_row:
        return words
    whole = words.group % rows == 0 and (words.step % words.group == 0 or words.group % words.step == 0)
    return words if whole and words.step // words.group % PER_WORD.get(words.scales, 1) == 0 else None


def _scales_of(form: StripFormat) -> tuple[int, int] | None:
    """How scales are stored, and of how many numbers of K."""
    field = (form.fields or form.row)[0]
    if form.scales == "floats":
        if field.shared:
            return (STRIP, form.span) if form.span and field.kind == "f32" else None
        return ({"f32": F32, "f16": F16, "bf16": BF16}[field.kind], form.span) if form.span else (ROW, WHOLE_ROW)
    if form.scales == "scale_and_zero":
        zeros = {"f16": F16_ZERO, "bf16": BF16_ZERO}
        return (zeros[field.kind], form.span or WHOLE_ROW) if field.kind in zeros else None
    kinds = {"e8m0": (E8M0, form.span), "e4m3": (NESTED, 16), "scale_and_min": (MINS, form.span)} | K_TYPES
    return kinds.get(form.scales)


@dataclass(frozen=True)
class WordLayout:
    """Offsets in words from the first one."""

    matrix: PackedMatrix
    format: WordFormat

    @functools.cached_property
    def width(self) -> int:
        return 2 * TILE_N * self.matrix.blocks

    @functools.cached_property
    def steps(self) -> int:
        return -(-self.matrix.columns // self.format.step)

    @functools.cached_property
    def low_rows(self) -> int:
        return self.steps * self.format.step * self.format.low // 32

    @functools.cached_property
    def high_rows(self) -> int:
        return self.steps * self.format.step * self.format.high // 32

    @functools.cached_property
    def head_rows(self) -> int:
        if not self.format.has_heads:
            return 0
        return 1 if self.format.scales == NESTED else -(-self.steps * self.format.step // SUPER_BLOCK)

    @functools.cached_property
    def scale_rows(self) -> int:
        form = self.format
        if form.of_row:
            return 1
        return self.steps * form.scale_words if form.group <= form.step else -(-self.steps * form.step // form.group)

    @functools.cached_property
    def scale_width(self) -> int:
        return self.width // TILE_N if self.format.scales == STRIP else self.width

    @functools.cached_property
    def words(self) -> int:
        return self.width * (self.low_rows + self.high_rows + self.head_rows) + self.scale_rows * self.scale_width

    def parts_of(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Low and high quants, heads and scales of int32 `[words]`, as matrices of words."""
        parts, at = [], 0
        for rows in (self.low_rows, self.high_rows, self.head_rows):
            parts.append(words[at : at + rows * self.width].view(rows, self.width))
            at += rows * self.width
        return parts[0], parts[1], parts[2], words[at : self.words].view(self.scale_rows, self.scale_width)


def word_layout(matrix: PackedMatrix) -> WordLayout | None:
    """None if this matrix stays in the CPU's layout."""
    form = None if matrix.plain or matrix.paired else word_format(matrix.formats[0])
    return None if form is None or matrix.formats[0] != matrix.formats[1] else WordLayout(matrix, form)


def to_words(packed: Tensor, layout: WordLayout) -> Tensor | None:
    """uint8 in the CPU's layout -> int32 `[words]` on the same device; None: a scale is beyond what kernels multiply
    with, or a code is not a number."""
    words = torch.zeros(layout.words, dtype=torch.int32, device=packed.device)
    low, high, heads, scales = layout.parts_of(words)
    matrix, strip = layout.matrix, layout.matrix.strip(0)
    blocks = packed.view(matrix.blocks, matrix.block_bytes)
    height = max(1, CHUNK // (TILE_N * matrix.columns))
    in_range = torch.ones((), dtype=torch.bool, device=packed.device)
    for first in range(0, matrix.blocks, height):
        for half in range(2):
            start = matrix.strip_at(half)
            strips = blocks[first : first + height, start : start + strip.bytes]
            at = slice(first, first + strips.shape[0]), half
            quants, form = planes(strips[:, strip.codes_at :], strip), strip.format
            if layout.format.element == E4M3:
                in_range &= ((quants & E4M3_NAN) != E4M3_NAN).all()
            _put_codes(quants, layout, low, high, at)
            row = packed_fields(strips, 0, form.row, 1)
            spans = packed_fields(strips, strip.row_bytes, form.fields, strip.spans) if strip.spans else []
            entries, head_entries = _scale_entries(layout.format, form, row, spans)
            in_range &= _are_in_range(entries, layout.format)
            _put(_joined(entries, layout), scales, at)
            if head_entries is not None:
                _put(head_entries, heads, at)
    return words if bool(in_range) else None


def _put(words: Tensor, target: Tensor, at: tuple[slice, int]) -> None:
    """int32 `[blocks, 16 or 1, n]` into rows of words, of which fewer than n may be there."""
    blocks, half = at
    count = min(words.shape[-1], target.shape[0])
    target.view(target.shape[0], -1, 2, words.shape[1])[:count, blocks, half] = words[..., :count].permute(2, 0, 1)


def _put_codes(quants: Tensor, layout: WordLayout, low: Tensor, high: Tensor, at: tuple[slice, int]) -> None:
    """uint8 `[blocks, 16, K]`."""
    form = layout.format
    if layout.matrix.formats[0].element == "int8":
        quants = quants ^ 128
    padded = torch.nn.functional.pad(quants, (0, layout.steps * form.step - quants.shape[-1]))
    planes_of_words = (form.low, 0, form.low_places, low), (form.high, form.low, form.high_places, high)
    for bits, lowest, places, target in planes_of_words:
        if bits:
            parts = padded.view(*quants.shape[:2], -1, 32 // bits, form.rows)
            words = torch.zeros_like(parts[..., 0, :], dtype=torch.int32)
            for part, place in enumerate(places):
                words |= ((parts[..., part, :].int() >> lowest) & ((1 << bits) - 1)) << place
            _put(words.flatten(2), target, at)


def _bits(value: Tensor, dtype: torch.dtype) -> Tensor:
    """int32: the bits of numbers in a dtype of 16 or 32 bits."""
    if dtype == torch.float32:
        return value.float().contiguous().view(torch.int32)
    return value.to(dtype).contiguous().view(torch.int16).int() & 0xFFFF


def _scale_entries(form: WordFormat, strip: StripFormat, row: Fields, spans: Fields) -> tuple[Tensor, Tensor | None]:
    """int32 `[blocks, 16, n]`: scales in the order of K, and heads."""
    half = torch.float16
    if form.scales in (ROW, STRIP, F32, F16, BF16):
        dtype = {F16: half, BF16: torch.bfloat16}.get(form.scales, torch.float32)
        return _bits((spans or row)[0][..., 0], dtype), None
    if form.scales in (F16_ZERO, BF16_ZERO):
        scale, zero = (field[..., 0] for field in spans or row)
        unsigned = zero.int() + (128 if strip.element == "int8" else 0)
        return _bits(scale, half if form.scales == F16_ZERO else torch.bfloat16) | (unsigned << 16), None
    if form.scales == E8M0:
        return spans[0][..., 0].int(), None
    if form.scales == NESTED:
        scales = spans[0].int().flatten(-2)
        return scales, _bits(row[0][..., 0], torch.float32).expand(-1, TILE_N, -1)
    if form.scales == MINS:
        return _bits(spans[0][..., 0], half) | (_bits(spans[1][..., 0], half) << 16), None
    if form.scales == Q4K:
        scale, least = q4_k_scales(spans[2])
        return (scale | (least << 8)).flatten(-2), _two_heads(spans[0], spans[1])
    if form.scales == Q2K:
        return spans[0].int().flatten(-2), _two_heads(spans[1], spans[2])
    signed = q3_k_scales(spans[0]) - 32 if strip.scales == "q3_k" else spans[0].int()
    return (signed + 128).flatten(-2), _bits(spans[1][..., 0], torch.float32)


def _two_heads(d: Tensor, dmin: Tensor) -> Tensor:
    return _bits(d[..., 0], torch.float16) | (_bits(dmin[..., 0], torch.float16) << 16)


def _are_in_range(entries: Tensor, form: WordFormat) -> Tensor:
    if form.scales == E8M0:
        return (entries <= LARGEST_E8M0[form.element]).all()
    if form.scales in (ROW, STRIP, F32):
        return (entries.view(torch.float32).abs() < LARGEST_SCALE).all()
    if form.scales in (BF16, BF16_ZERO):
        return ((entries << 16).view(torch.float32).abs() < LARGEST_BF16_SCALE).all()
    return torch.ones((), dtype=torch.bool, device=entries.device)


def _joined(entries: Tensor, layout: WordLayout) -> Tensor:
    """Scales of 8 and 16 bits, several in a word."""
    per = PER_WORD.get(layout.format.scales, 1)
    if per == 1:
        return entries
    padded = torch.nn.functional.pad(entries, (0, -entries.shape[-1] % per)).reshape(*entries.shape[:-1], -1, per)
    words = padded[..., 0].clone()
    for place in range(1, per):
        words |= padded[..., place] << (32 // per * place)
    return words


def from_words(words: Tensor, layout: WordLayout) -> Tensor:
    """The inverse of `to_words`: uint8 in the CPU's layout."""
    matrix, strip, form = layout.matrix, layout.matrix.strip(0), layout.format
    low, high, heads, scales = layout.parts_of(words)
    packed = torch.zeros(matrix.expert_bytes, dtype=torch.uint8, device=words.device)
    blocks = packed.view(matrix.blocks, matrix.block_bytes)
    height = max(1, CHUNK // (TILE_N * matrix.columns))
    for first in range(0, matrix.blocks, height):
        for half in range(2):
            at = slice(first, first + height), half
            strips = blocks[at[0], matrix.strip_at(half) : matrix.strip_at(half) + strip.bytes]
            quants = _taken_codes(_taken(low, at, TILE_N), form.low, form.low_places, form.rows)
            if form.high:
                quants |= _taken_codes(_taken(high, at, TILE_N), form.high, form.high_places, form.rows) << form.low
            if strip.format.element == "int8":
                quants ^= 128
            strips[:, strip.codes_at :] = packed_planes(quants[..., : strip.k_tiles * TILE_K], strip)
            entries = _divided(_taken(scales, at, 1 if form.scales == STRIP else TILE_N), form)
            head = _taken(heads, at, TILE_N) if form.has_heads else None
            row, spans = _field_values(form, strip, entries, head)
            put_fields(strips, 0, strip.format.row, row)
            put_fields(strips, strip.row_bytes, strip.format.fields, spans)
    return packed


def _taken(words: Tensor, at: tuple[slice, int], entries: int) -> Tensor:
    """int32 `[blocks, 16 or 1, n]` from n rows of words."""
    return words.view(words.shape[0], -1, 2, entries)[:, at[0], at[1]].permute(1, 2, 0)


def _taken_codes(words: Tensor, bits: int, places: tuple[int, ...], rows: int) -> Tensor:
    """uint8 `[blocks, 16, K]`."""
    shifts = torch.tensor(places, dtype=torch.int32, device=words.device)[:, None]
    parts = (words.reshape(*words.shape[:-1], -1, rows).unsqueeze(-2) >> shifts) & ((1 << bits) - 1)
    return parts.to(torch.uint8).flatten(2)


def _divided(words: Tensor, form: WordFormat) -> Tensor:
    """The inverse of `_joined`."""
    per = PER_WORD.get(form.scales, 1)
    if per == 1:
        return words
    shifts = torch.arange(0, 32, 32 // per, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << (32 // per)) - 1)).flatten(-2)


def _number(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_bits`."""
    if dtype == torch.float32:
        return bits.contiguous().view(torch.float32)
    return bits.to(torch.int16).view(dtype)


def _field_values(form: WordFormat, strip: Strip, entries: Tensor, heads: Tensor | None) -> tuple[Fields, Fields]:
    """The inverse of `_scale_entries`: fields of the row and of spans, `[blocks, 16 or 1, spans, count]`."""
    half, spans = torch.float16, strip.spans
    count = max(1, spans) * (16 if form.group == 16 and form.scales != NESTED else 8 if form.scales == Q4K else 1)
    count = 2 * spans if form.scales == NESTED else count
    held = entries[..., :count].reshape(*entries.shape[:-1], max(1, spans), -1)
    if form.scales in (ROW, STRIP, F32, F16, BF16):
        value = [_number(held, {F16: half, BF16: torch.bfloat16}.get(form.scales, torch.float32))]
        return ([], value) if spans else (value, [])
    if form.scales in (F16_ZERO, BF16_ZERO):
        zero = (held >> 16) - (128 if strip.format.element == "int8" else 0)
        value = [_number(held, half if form.scales == F16_ZERO else torch.bfloat16), zero]
        return ([], value) if spans else (value, [])
    if form.scales == E8M0:
        return [], [held]
    if form.scales == MINS:
        return [], [_number(held, half), _number(held >> 16, half)]
    assert heads is not None
    if form.scales == NESTED:
        return [_number(heads[:, :1, :, None], torch.float32)], [held]
    head = heads[..., :spans, None]
    d, dmin = _number(head, half), _number(head >> 16, half)
    if form.scales == Q4K:
        return [], [d, dmin, packed_q4_k_scales(held & 255, held >> 8)]
    if form.scales == Q2K:
        return [], [held, d, dmin]
    signed = held - 128
    scales = packed_q3_k_scales(signed + 32) if strip.format.scales == "q3_k" else signed
    return [], [scales, _number(head, torch.float32)]
