"""Formats: what bytes mean, against independent decoders, and how near the encoder comes."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from ktransformers.checkpoint.encoded import GGUF_BLOCKS, Encoded, decode, format_of, stack
from ktransformers.checkpoint.encoder import encode
from ktransformers.ground.errors import InputError
from tests.support.formats import ROWS, SPECS, e2m1, e4m3

E, N, K = 2, 160, 288  # neither a multiple of 128
GGUF_WRITTEN = ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "tq1_0", "tq2_0"]


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def one_by_one(encoded: Encoded, expert: int, row: int, column: int) -> float:
    """A number straight from the table of formats, in Python's floats."""
    form, codes, scales = ROWS[encoded.format], encoded.qweight[expert, row], encoded.scales
    assert scales is not None
    each = 8 // form.bits
    code = ((int(codes[column // each]) & 255) >> (form.bits * (column % each))) & ((1 << form.bits) - 1)
    place = (expert, row // form.rows, column // (form.columns or encoded.columns))
    scale = form.scale(float(scales[place[: scales.dim()]]))
    if encoded.tensor_scale is not None:
        scale = float(numpy.float32(scale * float(encoded.tensor_scale[expert])))
    return form.number(code) * scale


def made_up(name: str) -> Encoded:
    """Every code and any scale, not what an encoder would choose."""
    found = format_of(name)
    codes = random_bytes(E, N, found.row_bytes(K))
    if name == "int8":
        codes = codes.view(torch.int8)
    shape = found.scale_shape(N, K)
    if shape is None:
        return Encoded(name, codes, None, columns=K)
    if found.scale_dtype == torch.uint8:
        scales = random_bytes(E, *shape, seed=2) % 64 + (20 if name == "nvfp4" else 100)
    else:
        assert found.scale_dtype is not None
        scales = numbers(E, *shape).to(found.scale_dtype)
    outer = torch.tensor([0.37, 1.9]) if name == "nvfp4" else None
    return Encoded(name, codes, scales, outer, columns=K)


@pytest.mark.parametrize("name", SPECS)
def test_decode_says_what_the_table_says(name: str) -> None:
    encoded = made_up(name)
    assert (encoded.experts, encoded.rows, encoded.columns) == (E, N, K)
    found = decode(encoded)
    assert found.shape == (E, N, K) and found.dtype == torch.float32
    generator = numpy.random.default_rng(0)
    for expert, row, column in zip(*(generator.integers(0, size, 300) for size in (E, N, K)), strict=True):
        expected = numpy.float32(one_by_one(encoded, expert, row, column))
        assert numpy.array_equal(numpy.float32(found[expert, row, column]), expected, equal_nan=True)


def test_every_code_of_e4m3_and_e2m1() -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 256)
    found = decode(Encoded("fp8:row", codes, torch.ones(1, 1), columns=256)).flatten()
    expected = torch.tensor([e4m3(code) for code in range(256)])
    assert numpy.array_equal(found.numpy(), expected.numpy(), equal_nan=True)
    scales = torch.full((1, 1, 16), 127, dtype=torch.uint8)
    found = decode(Encoded("mxfp4", codes, scales, columns=512)).flatten()
    assert found.tolist() == [e2m1(half) for code in range(256) for half in (code & 15, code >> 4)]


def test_scales_of_e8m0_reach_both_ends() -> None:
    codes = torch.full((1, 1, 32), 0x38, dtype=torch.uint8)  # 1.0
    for code, value in ((0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (254, 2.0**127)):
        scales = torch.full((1, 1, 1), code, dtype=torch.uint8)
        assert float(decode(Encoded("mxfp8", codes, scales, columns=32))[0, 0, 0]) == value


@pytest.mark.parametrize("name", GGUF_BLOCKS)
def test_gguf_blocks(name: str) -> None:
    """Sizes are GGUF's own, and rows of several experts are decoded as one by one."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name.upper()]
    assert GGUF_BLOCKS[name] == gguf.GGML_QUANT_SIZES[kind]
    codes = random_bytes(2, 3, GGUF_BLOCKS[name][1] * 2)
    encoded = Encoded(name, codes, None, columns=2 * GGUF_BLOCKS[name][0])
    with numpy.errstate(all="ignore"):
        rows = [gguf.quants.dequantize(row.numpy(), kind) for row in codes.flatten(0, 1)]
        found = decode(encoded).flatten(0, 1).numpy()
    assert numpy.array_equal(found, numpy.stack(rows), equal_nan=True)


# Relative error on Gaussian numbers: a little above what was measured.
NEAR = {"q8_0": 0.006, "q4_0": 0.09, "q4_1": 0.085, "q5_0": 0.045, "q5_1": 0.04, "tq1_0": 0.9, "tq2_0": 0.9}
NEAR |= {spec: row.error for spec, row in ROWS.items()}


@pytest.mark.parametrize("name", [*SPECS, *GGUF_WRITTEN])
def test_encoder_is_near(name: str) -> None:
    columns = 512 if name.startswith("tq") else K
    given = numbers(E, N, columns)
    encoded = encode(given, name)
    assert encoded.format == name and encoded.columns == columns
    error = float((decode(encoded) - given).norm() / given.norm())
    assert error < NEAR[name]
    alone = encode(given[1], name)  # one matrix, and in another dtype
    assert torch.equal(alone.qweight[0], encoded.qweight[1])
    rounded = encode(given.bfloat16(), name)
    assert torch.equal(rounded.qweight, encode(given.bfloat16().float(), name).qweight)


@pytest.mark.parametrize("name", SPECS)
def test_numbers_of_the_format_come_back(name: str) -> None:
    """What a format can hold it does hold: encoding what was decoded changes little, zeros nothing."""
    given = decode(encode(numbers(1, N, K), name))
    error = float((decode(encode(given, name)) - given).norm() / given.norm())
    assert error < (0.02 if name == "nvfp4" else 0.001 if not name.startswith("int4") else 0.05)
    zeros = torch.zeros(1, N, K)
    zeros[0, 3, 5] = 2.0
    found = decode(encode(zeros, name))
    assert torch.equal(found != 0, zeros != 0) and float(found[0, 3, 5]) == pytest.approx(2.0, rel=0.07)


def test_rounding_is_to_nearest() -> None:
    """No neighbour is nearer, for codes whose scale is given by the group."""
    given = numbers(1, 64, 256)
    for name in ("mxfp4", "nvfp4"):
        encoded = encode(given, name)
        assert encoded.scales is not None
        found, grid = decode(encoded), torch.tensor([e2m1(code) for code in range(16)])
        ones = Encoded(
            name, torch.full_like(encoded.qweight, 0x22), encoded.scales, encoded.tensor_scale, columns=256
        )  # 1.0 throughout: the scales
        near = (grid * decode(ones)[..., None] - given[..., None]).abs().amin(-1)
        torch.testing.assert_close((found - given).abs(), near, rtol=1e-5, atol=1e-6)


def test_stack() -> None:
    parts = [encode(numbers(1, N, K) * scale, "nvfp4") for scale in (1, 2)]
    both = stack(parts)
    assert torch.equal(decode(both), torch.cat([decode(part) for part in parts]))
    assert both.bytes == sum(part.bytes for part in parts)


def test_refusals() -> None:
    good = encode(numbers(1, 64, 64), "int4:32")
    assert good.scales is not None
    for change, message in (
        ({"columns": 66}, r"x: qweight: given shape \[1, 64, 32\], expected \[1, 64, 33\]"),
        ({"columns": 63}, "x: given 63 columns, expected a multiple of 2"),
        ({"scales": None}, "x: given no scales"),
        ({"scales": good.scales.float()}, "x: scales: given torch.float32, expected torch.bfloat16"),
        ({"scales": good.scales[:, :, :1]}, r"x: scales: given shape \[1, 64, 1\], expected \[1, 64, 2\]"),
        ({"qweight": good.qweight[0]}, "x: given qweight of shape"),
        ({"qweight": good.qweight.view(torch.int8)}, "x: qweight: given torch.int8, expected torch.uint8"),
        ({"tensor_scale": torch.ones(1)}, "x: given tensor_scale"),
        ({"format": "int4:48"}, "a multiple of 32"),
        ({"format": "int5"}, "format: given 'int5', expected one of bf16:12, int8"),
        ({"qweight": good.qweight.transpose(1, 2).contiguous().transpose(1, 2)}, "rows that are contiguous"),
    ):
        parts: dict[str, Any] = {"format": "int4:32", "qweight": good.qweight, "scales": good.scales, "columns": 64}
        with pytest.raises(InputError, match=message):
            Encoded(**(parts | change), name="x")
    with pytest.raises(InputError, match="mxfp4: given 48 columns, expected a multiple of 32"):
        encode(torch.zeros(4, 48), "mxfp4")
    with pytest.raises(InputError, match="numbers that are not finite"):
        encode(torch.tensor([[1.0, math.inf]]), "int8")
    with pytest.raises(InputError, match="expected floats of shape"):
        encode(torch.zeros(4), "int8")
    with pytest.raises(InputError, match="q4_k: given a format that can be read and not written"):
        encode(torch.zeros(1, 256), "q4_k")


def test_without_the_gguf_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    encoded = Encoded("q8_0", random_bytes(1, 1, 34), None, columns=32)
    with pytest.raises(InputError, match=r"pip install 'ktransformers\[gguf\]'"):
        decode(encoded)
