"""The native encoder: the bytes of its definition on every CPU variant, and the error that it reports."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint.encoded import GGUF_BLOCKS, Encoded, decode, format_of
from ktransformers.checkpoint.encoder import encode, encode_with_error
from ktransformers.ground.errors import InputError
from tests.support import encoder_reference

WRITTEN = [row["spec"] for row in _core.formats() if row["written"]]
PLAIN = [spec for spec in WRITTEN if format_of(spec).per_byte]
PLAIN += ["int4:0", "int4:128", "int4:64:f16", "int4:96:f32"]
BLOCKS = [spec for spec in WRITTEN if spec in GGUF_BLOCKS]
ALL = [*PLAIN, *BLOCKS, "bf16:12"]
VARIANTS = [row["name"] for row in _core.variants() if row["native"] or row["emulated"]]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def numbers(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights, and groups that are zero, constant, tiny, of one large number, or of two as far from zero."""
    given = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(rows + columns)) * 0.02
    given[0, 1] = 0
    given[0, 2, :64] = 0.5
    given[0, 3] *= 2.0**-20
    given[1, 4, 7] = -3.0
    given[1, 5, 40] = 3.0
    given[1, 6, 9], given[1, 6, 11] = -0.75, 0.75
    given[1, 7, 11], given[1, 7, 9] = -0.75, 0.75
    return given.to(dtype)


def bits(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.view(BITS[tensor.element_size()])


def assert_same(found: Encoded, expected: Encoded) -> None:
    assert torch.equal(found.qweight, expected.qweight)
    for one, other in ((found.scales, expected.scales), (found.tensor_scale, expected.tensor_scale)):
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(bits(one), bits(other))  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", PLAIN)
def test_bytes_are_those_of_the_definition(spec: str) -> None:
    columns = 288 if format_of(spec).multiple > 2 else 290
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        given = numbers(140, columns, dtype)
        assert_same(encode(given, spec), encoder_reference.encode(given, spec))


@pytest.mark.parametrize("spec", BLOCKS)
def test_blocks_are_those_of_the_gguf_package(spec: str) -> None:
    gguf = pytest.importorskip("gguf")
    given = numbers(20, 512, torch.bfloat16)
    expected = gguf.quants.quantize(given.float().numpy(), gguf.GGMLQuantizationType[spec.upper()])
    assert torch.equal(encode(given, spec).qweight, torch.from_numpy(expected))


@pytest.mark.parametrize("spec", ALL)
def test_every_variant_writes_the_same(spec: str) -> None:
    form, columns = format_of(spec), 512
    given = numbers(9, columns, torch.bfloat16)
    first = encode(given, spec)
    for isa in VARIANTS:
        shape = form.scale_shape(9, columns)
        codes = torch.zeros_like(first.qweight)
        scales = None if shape is None else torch.zeros(2, *shape, dtype=form.scale_dtype)
        outer = torch.zeros(2) if form.tensor_scale else None
        _core.encode(spec, given, codes, scales, outer, isa)
        assert_same(Encoded(spec, codes, scales, outer, columns=columns), first)


@pytest.mark.parametrize("spec", ["int4:32", "int4:128", "int4:32:f16"])
@pytest.mark.parametrize("columns", [128, 512, 640, 768, 2176])
def test_groups_that_fill_no_vector(spec: str, columns: int) -> None:
    """Groups side by side in the lanes of a vector, some of them without a neighbour; scales among the least of f16,
    under which codes lie beyond the ends."""
    given = numbers(9, columns, torch.bfloat16)
    given[1, 1:3] *= 2.0**-14
    expected = encoder_reference.encode(given, spec)
    assert expected.scales is not None
    for isa in VARIANTS:
        codes, scales = torch.zeros_like(expected.qweight), torch.zeros_like(expected.scales)
        _core.encode(spec, given, codes, scales, None, isa)
        assert_same(Encoded(spec, codes, scales, None, columns=columns), expected)


@pytest.mark.parametrize("spec", ALL)
def test_the_error_is_that_of_decoded_numbers(spec: str) -> None:
    if spec in GGUF_BLOCKS:
        pytest.importorskip("gguf")
    given = numbers(70, 256, torch.bfloat16)
    found = encode_with_error(given, spec)
    exact, after = given.double(), decode(found.matrix).bfloat16().double()
    assert math.isclose(found.norm, float(exact.square().sum()), rel_tol=1e-5)
    assert math.isclose(found.moved, float((after - exact).square().sum()), rel_tol=1e-5)


def test_any_strides_are_read() -> None:
    given = numbers(64, 64)
    assert_same(encode(given.transpose(1, 2), "int4:32"), encode(given.transpose(1, 2).contiguous(), "int4:32"))
    assert_same(encode(given[:, ::2], "mxfp4"), encode(given[:, ::2].contiguous(), "mxfp4"))


@pytest.mark.parametrize("spec", ALL)
def test_numbers_that_are_not_finite_are_refused(spec: str) -> None:
    for wrong in (math.nan, math.inf, -math.inf):
        given = numbers(9, 256)
        given[1, 8, 255] = wrong
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises(InputError, match="numbers that are not finite"):
                encode(given.to(dtype), spec)
    encode(torch.full((1, 256), 1e30), spec)  # whose squares are not


def test_tiny_scales_of_nvfp4_keep_their_sign() -> None:
    """A group so small that its scale is half of what it should be: codes end at the largest one."""
    given = torch.zeros(1, 1, 32)
    given[0, 0, 0], given[0, 0, 16] = 2688.0, 6 * 1.4 * 2.0**-9
    assert float(decode(encode(given, "nvfp4"))[0, 0, 16]) == 6 * 2.0**-9
