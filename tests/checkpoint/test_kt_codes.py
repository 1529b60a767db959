"""Rows quantised and ordered in tiles as kt-kernel's converter does it, against a second writing of its description."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint import decode
from ktransformers.checkpoint.encoded import nibbles
from ktransformers.checkpoint.encoder import encode
from ktransformers.checkpoint.kt_codes import (
    check_size,
    encode_rows,
    encoded_of,
    kept_codes,
    quantize_rows,
    spec_of,
    tile,
    untile,
)
from ktransformers.ground.errors import InputError
from tests.support.kt_reference import reference_rows
from tests.support.releases import kt_tiles

DATA = Path(__file__).resolve().parents[1] / "data"


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_and_scales_are_those_of_the_definition(bits: int) -> None:
    matrix = gaussian(96, 640)
    matrix[3] = 0
    matrix[4] *= 1e-30
    matrix[5] *= 1e30
    matrix[6] = torch.arange(640) % 2 * 2.0 - 1  # equal magnitudes
    codes, scales = quantize_rows(matrix, bits)
    want, of_rows = reference_rows(matrix, bits)
    assert torch.equal(scales, of_rows) and torch.equal(codes, want)
    assert scales[3] == 0 and not codes[3].any()
    assert codes.abs().max() == (127 if bits == 8 else 7)
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(quantize_rows(matrix.to(dtype), bits)[0], codes)
    transposed = quantize_rows(matrix.T, bits)
    assert torch.equal(transposed[0], reference_rows(matrix.T, bits)[0])


def test_codes_and_scales_are_those_that_kt_kernel_wrote() -> None:
    """Six rows of a down projection with what kt-kernel 0.7.2 made of them: quotients in place of products with a
    reciprocal give other codes in the first four, and another scale in the last two."""
    rows = load_file(DATA / "kt_kernel_int8_rows.safetensors")
    codes, scales = quantize_rows(rows["weight"], 8)
    assert torch.equal(codes, rows["codes"]) and torch.equal(scales, rows["scales"])
    numbers = rows["weight"].float()
    assert ((numbers / scales[:, None]).round() != codes).any(1).tolist() == [True] * 4 + [False] * 2
    assert (numbers.abs().amax(1) / 127 != scales).tolist() == [False] * 4 + [True] * 2


def test_halves_round_to_even_and_sixteenths_away_from_zero() -> None:
    eight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]])
    assert quantize_rows(eight, 8)[0].tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]
    four = torch.tensor([[112.0, 7, 7.5, 8, 23, 24, -7, -8, -23, -24, 104, 103, -104, -112]])
    assert quantize_rows(four, 4)[0].tolist() == [[7, 0, 1, 1, 1, 2, 0, -1, -1, -2, 7, 6, -7, -7]]


def test_native_rows_check_their_arguments() -> None:
    matrix, scales = gaussian(4, 6), torch.empty(4)
    for bits, columns, dtype in ((5, 6, torch.int8), (8, 3, torch.uint8), (4, 6, torch.uint8), (4, 5, torch.int8)):
        with pytest.raises(ValueError, match=r"bits|codes"):
            _core.quantise_rows(matrix, bits, torch.empty(4, columns, dtype=dtype), scales)
    with pytest.raises(ValueError, match="codes"):
        _core.quantise_rows(gaussian(4, 7), 4, torch.empty(4, 3, dtype=torch.uint8), scales)
    paired, codes = torch.empty(4, 3, dtype=torch.uint8), torch.empty(4, 6, dtype=torch.int8)
    assert _core.quantise_rows(matrix, 4, paired, scales) and _core.quantise_rows(matrix, 4, codes, scales)
    assert torch.equal(nibbles(paired).to(torch.int8) - 8, codes)


def test_subnormal_scales_stay_in_range() -> None:
    tiny = torch.tensor([[1e-43, -1e-43, 1e-45, 0.0]])
    for bits, limit in ((8, 127), (4, 7)):
        codes, _ = quantize_rows(tiny, bits)
        assert codes.abs().max() <= limit


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("n", "k"), [(32, 128), (96, 3584), (160, 3712), (64, 7296)])
def test_tiles_are_those_of_the_formula(bits: int, n: int, k: int) -> None:
    """Blocks of fewer rows at the end, and columns beyond one and two blocks of 3584."""
    limit = 127 if bits == 8 else 7
    codes = torch.randint(-limit, limit + 1, (n, k), generator=torch.Generator().manual_seed(n)).to(torch.int8)
    data = tile(codes, bits)
    assert torch.equal(data, kt_tiles(codes, f"INT{bits}"))
    assert torch.equal(untile(data, n, k, bits), codes)
    wider = torch.cat([codes, codes], 1)[:, k:]  # a view with other strides
    assert torch.equal(tile(wider, bits), data)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("bits", [8, 4])
def test_encoded_rows_lose_no_bit(bits: int, parts: int) -> None:
    """What is packed without a file has the codes and scales of every part of the columns."""
    matrices = gaussian(2, 64, 768, seed=1)
    made = encode_rows(matrices, bits, parts)
    width = 768 // parts
    numbers = torch.empty(2, 64, 768)
    for expert in range(2):
        for part in range(parts):
            codes, scales = reference_rows(matrices[expert, :, part * width : (part + 1) * width], bits)
            numbers[expert, :, part * width : (part + 1) * width] = (
                codes.float() * (1 if bits == 8 else 16) * scales[:, None]
            )
    assert made.format == spec_of(bits, 768, parts) and torch.equal(decode(made), numbers)
    assert torch.equal(encode_rows(matrices[0], bits, parts).qweight, made.qweight[:1])


def test_codes_are_kept_where_they_fit() -> None:
    """A source that is int8 by rows, or int4 by rows or parts of them, keeps its codes in any number of parts."""
    matrix = gaussian(32, 768)
    for bits in (8, 4):
        codes, scales = quantize_rows(matrix, bits)
        encoded = encoded_of(codes[None], scales[None, :, None], bits)
        for parts in (1, 3):
            kept = kept_codes(encoded, bits, parts)
            assert kept is not None and torch.equal(kept[0], codes)
            assert torch.equal(kept[1], scales[:, None].expand(-1, parts))
        assert kept_codes(encoded, 12 - bits, 1) is None
        groups = encode_rows(matrix, bits, 2)
        kept = kept_codes(groups, bits, 6)
        assert kept is not None and torch.equal(kept[1][:, 0], kept[1][:, 2])
        assert not torch.equal(kept[1][:, 2], kept[1][:, 3])
        assert kept_codes(groups, bits, 3) is None  # a part with two scales
    assert kept_codes(encode(matrix, "int4:32"), 4, 1) is None
    assert kept_codes(encode(matrix, "fp8:128x128"), 8, 1) is None
    beyond = encode_rows(matrix, 4)
    beyond.qweight[0, 0, 0] &= 240  # a code of -8
    assert kept_codes(beyond, 4, 1) is None


def test_wrong_matrices_are_refused() -> None:
    with pytest.raises(InputError, match="bits: given 5, expected 4 or 8"):
        quantize_rows(gaussian(32, 128), 5)
    for matrix in (torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2, 2)):
        with pytest.raises(InputError, match=r"floats of shape \[rows, columns\]"):
            quantize_rows(matrix, 8)
    for number in (float("nan"), float("inf")):
        broken = gaussian(32, 128)
        broken[7, 100] = number
        with pytest.raises(InputError, match="not finite"):
            quantize_rows(broken, 4)
    with pytest.raises(InputError, match=r"multiples of 32 and 128"):
        tile(torch.zeros(32, 64, dtype=torch.int8), 4)
    with pytest.raises(InputError, match="a multiple of 3, the NUMA parts"):
        encode_rows(gaussian(32, 128), 8, 3)


@pytest.mark.parametrize(
    ("role", "rows", "columns", "bits", "parts", "fits"),
    [
        ("gate", 768, 2048, 4, 2, True),
        ("down", 2048, 768, 4, 2, True),
        ("down", 2048, 768, 4, 4, False),  # 192 columns
        ("down", 2048, 768, 8, 4, True),
        ("gate", 96, 128, 8, 2, False),  # 48 rows
        ("up", 768, 2048, 8, 5, False),  # unequal parts
        ("gate", 768, 64, 4, 1, False),
    ],
)
def test_sizes_that_tiles_cannot_hold_are_refused(
    role: str, rows: int, columns: int, bits: int, parts: int, fits: bool
) -> None:
    if fits:
        check_size("layer", role, rows, columns, bits, parts)
        return
    with pytest.raises(InputError, match=rf"layer: given {role} of {rows} x {columns} in {parts} NUMA parts"):
        check_size("layer", role, rows, columns, bits, parts)
