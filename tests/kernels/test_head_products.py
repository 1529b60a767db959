"""Products of heads with rows of their own in one matrix of codes, over columns and along rows, on every variant: those
of the numbers that the codes stand for, whatever threads, groups and neighbours there are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint.encoded import decode

from .conftest import error
from .test_w8a8_codes import matrix_of

SPECS = ("int8", "int4:32", "fp8:128x128", "fp8:row", "mxfp4", "nvfp4", "mxfp8", "bf16:12")
SPECS += ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "q4_1", "q8_0", "iq4_xs", "iq2_xxs", "tq1_0")
HEADS, KEYS, VALUES, COLUMNS = 3, 48, 80, 256  # no head begins a block but the first
# Over columns activations have 16 bits beside codes of integers; bf16:12 has bf16 weights, which bf16 variants
# multiply with bf16 activations. Along rows sums are rounded alone.
OVER_COLUMNS, ALONG_ROWS, OUTPUT = 3e-4, 1e-6, {torch.float32: 0.0, torch.bfloat16: 2**-8}


def products(linear: _core.CodedLinear, x: Tensor, along_rows: bool) -> Tensor:
    first, count = (0, KEYS) if along_rows else (KEYS, VALUES)
    out = torch.full((HEADS, x.shape[1], (COLUMNS if along_rows else count) + 8), 7.0, dtype=x.dtype)
    linear.multiply_heads(x, out[..., :-8], first, count, KEYS + VALUES, along_rows)
    assert bool((out[..., -8:] == 7).all()), "the columns beside the result are left as they are"
    return out[..., :-8]


@pytest.mark.parametrize("along_rows", [False, True])
def test_heads_multiply_their_rows(isa: str, along_rows: bool, pool: _core.Pool) -> None:
    """Three rows alone and in a batch, by one thread and by more in two groups."""
    other = _core.Pool(threads=3, groups=2)
    for spec in SPECS:
        matrix = matrix_of(spec, 1, HEADS * (KEYS + VALUES), COLUMNS)
        numbers = decode(matrix)[0].double().view(HEADS, KEYS + VALUES, COLUMNS)
        numbers = numbers[:, :KEYS] if along_rows else numbers[:, KEYS:].transpose(1, 2)
        linears = [_core.CodedLinear(one, HEADS * (KEYS + VALUES), COLUMNS, spec, isa) for one in (pool, other)]
        for linear in linears:
            linear.pack(matrix.packable)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(HEADS, 3, numbers.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype)
            actual = products(linears[0], x, along_rows)
            limit = (ALONG_ROWS if along_rows else OVER_COLUMNS) + OUTPUT[dtype]
            assert error(actual, torch.bmm(x.double(), numbers)) < limit, spec
            assert torch.equal(products(linears[1], x, along_rows), actual), spec
            alone = [products(linears[0], x[:, row : row + 1], along_rows) for row in range(3)]
            assert torch.equal(torch.cat(alone, dim=1), actual), spec


def test_no_rows(pool: _core.Pool) -> None:
    matrix = matrix_of("int8", 1, 128, COLUMNS)
    linear = _core.CodedLinear(pool, 128, COLUMNS, "int8")
    linear.pack(matrix.packable)
    linear.multiply_heads(torch.empty(2, 0, COLUMNS), torch.empty(2, 0, 16), 48, 16, 64)


@pytest.mark.parametrize(
    ("x", "out", "rows", "match"),
    [
        ((2, 1, 256), (2, 1, 16), (49, 16, 64), "count"),
        ((2, 1, 256), (2, 1, 16), (64, 1, 64), "first"),
        ((3, 1, 256), (3, 1, 16), (0, 16, 64), "heads"),
        ((2, 1, 32), (2, 1, 16), (0, 16, 64), "x"),
        ((2, 1, 256), (2, 2, 16), (0, 16, 64), "out"),
        ((2, 1025, 256), (2, 1025, 16), (0, 16, 64), "rows of x: given 1025, expected 0 to 1024"),
    ],
)
def test_what_does_not_fit_is_refused(
    x: tuple[int, ...], out: tuple[int, ...], rows: tuple[int, int, int], match: str, pool: _core.Pool
) -> None:
    linear = _core.CodedLinear(pool, 128, COLUMNS, "int8")
    linear.pack(matrix_of("int8", 1, 128, COLUMNS).packable)
    with pytest.raises((ValueError, TypeError), match=match):
        linear.multiply_heads(torch.zeros(x), torch.zeros(out), *rows)


def test_a_result_in_the_memory_of_x_is_refused(pool: _core.Pool) -> None:
    """Unless both lie apart in one buffer: columns beside each other, or heads."""
    linear = _core.CodedLinear(pool, 128, COLUMNS, "int8")
    linear.pack(matrix_of("int8", 1, 128, COLUMNS).packable)
    both = torch.randn(2, 5, COLUMNS + 16, generator=torch.Generator().manual_seed(1))
    x, out, want = both[..., :COLUMNS], both[..., COLUMNS:], torch.empty(2, 5, 16)
    linear.multiply_heads(x, want, 0, 16, 64)
    linear.multiply_heads(x, out, 0, 16, 64)
    assert torch.equal(out, want)
    heads = torch.cat([x, torch.zeros(2, 5, COLUMNS)])
    linear.multiply_heads(heads[:2], heads[2:, :, :16], 0, 16, 64)
    assert torch.equal(heads[2:, :, :16], want)
    for overlapping in (x[..., 8:24], both[..., COLUMNS - 8 : COLUMNS + 8], both.transpose(0, 1)[:2, :, :16]):
        with pytest.raises(ValueError, match="out: given memory that overlaps x"):
            linear.multiply_heads(x[:, : overlapping.shape[1]], overlapping, 0, 16, 64)


@pytest.mark.parametrize("spec", SPECS)
def test_rows_in_float32_have_the_same_bits_alone(spec: str, isa: str, pool: _core.Pool) -> None:
    matrix = matrix_of(spec, 1, 96, COLUMNS)
    linear = _core.CodedLinear(pool, 96, COLUMNS, spec, isa)
    linear.pack(matrix.packable)
    x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(1))
    out, alone = torch.empty(5, 96), torch.empty(5, 96)
    linear.forward(x, out)
    for row in range(5):
        linear.forward(x[row : row + 1], alone[row : row + 1])
    assert torch.equal(alone, out)
