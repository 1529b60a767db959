"""Decoders against numbers that were packed by hand (`packing.py`): equal bits, every format, odd sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktransformers.ground.errors import InputError
from ktransformers.quantized.gpu.dequantize import decode, decode_plain
from ktransformers.quantized.gpu.layout import PackedMatrix, format_of, geometry
from tests.support.formats import ROWS, SPECS, FormatRow, e8m0

from .packing import Coded, bf16_bits, pack

Random = np.random.Generator
F32 = np.float32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F32)


def spread(scale: NDArray[np.float32], span: int, columns: int) -> NDArray[np.float32]:
    return np.repeat(scale, span, axis=1)[:, :columns]


def as_bf16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return (bf16_bits(values).astype(np.uint32) << 16).view(F32)


def e4m3(codes: NDArray[np.generic]) -> NDArray[np.float32]:
    c = codes.astype(np.int64)
    exponent, mantissa = c >> 3 & 15, c & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    return (np.where(c & 128, -1.0, 1.0) * value).astype(F32)


def e4m3_codes(random: Random, *shape: int) -> NDArray[np.uint32]:
    codes = random.integers(0, 255, shape)
    return np.where((codes & 127) == 127, 0, codes).astype(np.uint32)


def int8(random: Random, n: int, k: int) -> Coded:
    codes, scale = random.integers(-128, 128, (n, k)), random.random(n, F32) + F32(0.01)
    return Coded((8,), (codes & 255).astype(np.uint32), codes.astype(F32) * scale[:, None], row=[scale])


def int4(group: int, kind: str) -> Callable[[Random, int, int], Coded]:
    def make(random: Random, n: int, k: int) -> Coded:
        codes = random.integers(0, 16, (n, k)).astype(np.uint32)
        scale = random.random((n, -(-k // group) if group else 1), F32) + F32(0.01)
        stored: NDArray[np.generic] = scale
        if kind == "bf16":
            stored, scale = bf16_bits(scale), as_bf16(scale)
        elif kind == "f16":
            stored = scale.astype(np.float16)
            scale = stored.astype(F32)
        values = (codes.astype(F32) - 8) * spread(scale, group or k, k)
        if not group:
            return Coded((4,), codes, values, row=[stored[:, 0]])
        return Coded((4,), codes, values, spans=[stored])

    return make


def fp8(shape: str) -> Callable[[Random, int, int], Coded]:
    def make(random: Random, n: int, k: int) -> Coded:
        codes = e4m3_codes(random, n, k)
        if shape == "row":
            scale = random.random((n, 1), F32)
            return Coded((8,), codes, e4m3(codes) * scale, row=[scale[:, 0]])
        rows = n if shape == "1x128" else -(-n // 16)
        scale = random.random((rows, -(-k // 128)), F32)
        whole = scale if shape == "1x128" else np.repeat(scale, 16, axis=0)[:n]
        return Coded((8,), codes, e4m3(codes) * spread(whole, 128, k), spans=[scale])

    return make


def power_scaled(form: FormatRow) -> Callable[[Random, int, int], Coded]:
    """Any elements with scales of e8m0."""
    numbers = np.array([form.number(code) for code in range(1 << form.bits)], F32)

    def make(random: Random, n: int, k: int) -> Coded:
        codes = e4m3_codes(random, n, k) if form.bits == 8 else random.integers(0, 16, (n, k)).astype(np.uint32)
        scale = random.integers(100, 140, (n, -(-k // form.columns))).astype(np.uint8)
        scale.flat[0] = 20
        values = numbers[codes] * spread((2.0 ** (scale.astype(np.float64) - 127)).astype(F32), form.columns, k)
        return Coded((form.bits,), codes, values, spans=[scale])

    return make


def nvfp4(random: Random, n: int, k: int) -> Coded:
    codes = random.integers(0, 16, (n, k)).astype(np.uint32)
    scale = e4m3_codes(random, n, 2 * -(-k // 32)).astype(np.uint8)
    tensor = random.random(1, F32)
    values = E2M1[codes] * spread(e4m3(scale) * tensor[0], 16, k)
    return Coded(
        (4,), codes, values, row=[np.repeat(tensor, -(-n // 16))], spans=[scale[:, 0::2].copy(), scale[:, 1::2].copy()]
    )


FORMATS: dict[str, Callable[[Random, int, int], Coded]] = {
    "int8": int8,
    "int4:32": int4(32, "bf16"),
    "int4:64:f16": int4(64, "f16"),
    "int4:128:f32": int4(128, "f32"),
    "int4:0": int4(0, "bf16"),
    "fp8:row": fp8("row"),
    "fp8:1x128": fp8("1x128"),
    "fp8:128x128": fp8("128x128"),
    "nvfp4": nvfp4,
    **{spec: power_scaled(ROWS[spec]) for spec in SPECS if ROWS[spec].scale is e8m0},
}
SIZES = [(32, 64), (48, 160), (17, 33), (16, 256)]


def bits(matrix: Tensor) -> Tensor:
    return matrix.contiguous().view(torch.int16)


def expected(values: NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(bf16_bits(values).view(np.int16))


def plain(packed: NDArray[np.uint8], matrix: PackedMatrix) -> Tensor:
    out = torch.full((matrix.out_rows, matrix.columns), torch.nan, dtype=torch.bfloat16)
    decode_plain(torch.from_numpy(packed), matrix, out)
    return bits(out)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("spec", FORMATS)
def test_formats(spec: str, size: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    n, k = size
    form = format_of(spec)
    one, two = (FORMATS[spec](random, n, k) for _ in range(2))
    packed = pack([one])
    matrix = PackedMatrix(n, k, (form, form), False)
    assert matrix.expert_bytes == len(packed)
    assert torch.equal(plain(packed, matrix), expected(one.values))
    packed = pack([one, two])
    matrix = PackedMatrix(n, k, (form, form), True)
    assert matrix.expert_bytes == len(packed)
    assert torch.equal(plain(packed, matrix), expected(np.concatenate((one.values, two.values))))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bf16(size: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    one, two = (random.standard_normal(size, F32) for _ in range(2))
    form = format_of("bf16")
    for parts in ([one], [one, two]):
        packed = pack(list(parts))
        matrix = PackedMatrix(*size, (form, form), len(parts) == 2)
        assert matrix.expert_bytes == len(packed)
        assert torch.equal(plain(packed, matrix), expected(np.concatenate(parts)))


def test_gate_and_up_of_two_formats() -> None:
    random = np.random.default_rng(0)
    one, two = int8(random, 32, 64), FORMATS["mxfp4"](random, 32, 64)
    packed = pack([one, two])
    matrix = PackedMatrix(32, 64, (format_of("int8"), format_of("mxfp4")), True)
    assert matrix.expert_bytes == len(packed)
    assert torch.equal(plain(packed, matrix), expected(np.concatenate((one.values, two.values))))
    with pytest.raises(InputError, match="bf16 with int8"):
        PackedMatrix(32, 64, (format_of("bf16"), format_of("int8")), True)


def test_chosen_slots() -> None:
    random = np.random.default_rng(0)
    made = [int8(random, 32, 64) for _ in range(4)]
    packed = torch.from_numpy(np.stack([pack([one]) for one in made]))
    matrix = PackedMatrix(32, 64, (format_of("int8"), format_of("int8")), False)
    out = torch.empty(2, 32, 64, dtype=torch.bfloat16)
    decode(packed, [3, 1], torch.tensor([3, 1], dtype=torch.int32), matrix, out)
    assert torch.equal(bits(out), torch.stack([expected(made[3].values), expected(made[1].values)]))


def test_unknown_formats_are_refused_by_name() -> None:
    for spec in ("int4:48", "iq9_s", "int4:32:f64"):
        with pytest.raises(InputError, match=spec):
            format_of(spec)


def test_sizes_of_a_real_layer() -> None:
    """128 experts of Qwen3-30B: 9 MB each in bf16, 1.2 GB together."""
    whole = geometry(128, 2048, 768, True, dict.fromkeys(("gate", "up", "down"), "bf16"))
    assert whole.first.block_bytes == 129 * 1024 and whole.first.blocks == 48
    assert whole.down.block_bytes == 49 * 1024 and whole.down.blocks == 64
    assert whole.decoded_bytes == 3 * 2 * 2048 * 768
    quarter = geometry(128, 2048, 768, True, dict.fromkeys(("gate", "up", "down"), "int4:32"))
    assert 3.3 < whole.expert_bytes / quarter.expert_bytes < 3.6
