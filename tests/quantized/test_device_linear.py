"""Linear layers in packed codes on a device: products and rows against the native core, in every format. Without a GPU
the Triton product runs in the interpreter if TRITON_INTERPRET=1, which truncates to bf16 instead of rounding."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint.encoded import Encoded
from ktransformers.checkpoint.encoder import encode
from ktransformers.ground.errors import KTError
from ktransformers.quantized import weight as weight_module
from ktransformers.quantized.gpu import head_products
from ktransformers.quantized.gpu import linear as device_linear
from ktransformers.quantized.gpu.head_products import HeadRows, check_heads, decoded_rows
from ktransformers.quantized.gpu.linear import GpuLinearWeight, packed_linear
from ktransformers.quantized.gpu.words import F32, WordLayout, from_words, to_words, word_layout
from ktransformers.quantized.weight import GpuPacked, QuantizedWeight, quantized_weight
from tests.support.formats import SPECS
from tests.support.gguf_blocks import HALVES, random_blocks

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ZEROS = ("uint4:32:f16", "uint4:64", "uint8:32:f16")
ALL = [*SPECS, *ZEROS, *HALVES]
ROUNDING = 0.012 if INTERPRETED else 0.004  # of weights and results to bf16
cuda = pytest.param("cuda:0", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", ["cpu", cuda])
kernel_devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="no interpreter")), cuda]
)


def core_of(spec: str, rows: int, columns: int) -> _core.CodedLinear:
    if spec in ZEROS:
        matrix = with_zeros(spec, rows, columns)
    elif spec in HALVES:
        data = random_blocks(spec, (1, rows), columns, np.random.default_rng(0))
        matrix = Encoded(spec, torch.from_numpy(data), None, columns=columns)
    else:
        torch.manual_seed(0)
        matrix = encode(torch.randn(rows, columns) / columns**0.5, spec)
    return quantized_weight(matrix, torch.bfloat16).impl.linear


def with_zeros(spec: str, rows: int, columns: int) -> Encoded:
    """Random codes and zeros, as GPTQ and AWQ have them."""
    generator = torch.Generator().manual_seed(0)
    name, group, *kind = spec.split(":")
    shape = (1, rows, columns // int(group))
    scales = torch.rand(shape, generator=generator).to(torch.float16 if kind else torch.bfloat16)
    if name == "uint4":
        codes = torch.randint(0, 256, (1, rows, columns // 2), generator=generator, dtype=torch.uint8)
        zeros = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    else:
        codes = torch.randint(-128, 128, (1, rows, columns), generator=generator, dtype=torch.int8)
        zeros = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    return Encoded(spec, codes, scales / 64, zeros=zeros, columns=columns)


def codes_of(spec: str, rows: int, columns: int, device: str) -> tuple[GpuLinearWeight, Tensor]:
    """The codes, and the decoded numbers `[rows, columns]` on the device."""
    core = core_of(spec, rows, columns)
    numbers = torch.empty(rows, columns, dtype=torch.bfloat16)
    core.decode(0, numbers)
    packed = torch.from_dlpack(core.memory()).view(-1).clone()
    return GpuLinearWeight.of(packed.to(device), packed_linear(rows, columns, spec)), numbers.to(device)


def words_of(spec: str, rows: int, columns: int, device: str) -> tuple[GpuLinearWeight, Tensor]:
    """The same in words, also without a GPU; skips formats that have none."""
    codes, numbers = codes_of(spec, rows, columns, device)
    if codes.layout is None:
        layout = word_layout(codes.matrix)
        if layout is None:
            assert spec.startswith(("iq", "tq1", "int4:96")), "a format whose codes are multiplied"
            pytest.skip("decoded first")
        words = to_words(codes.packed, layout)
        assert words is not None
        codes = GpuLinearWeight(words, codes.matrix, layout)
    return codes, numbers


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.fixture
def interpreter_dot(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter of Triton multiplies the bits of bf16 as integers."""
    if INTERPRETED:
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        language = pytest.importorskip("triton.language")

        def numbers(handle: Any) -> Any:
            is_bf16 = handle.dtype.scalar == language.bfloat16
            return (handle.data.astype(np.uint32) << 16).view(np.float32) if is_bf16 else handle.data

        def create_dot(_: Any, a: Any, b: Any, total: Any, *__: Any) -> Any:
            product = np.matmul(numbers(a), numbers(b), dtype=np.float32) + total.data
            return interpreter.TensorHandle(product, total.dtype.scalar)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    yield


@devices
@pytest.mark.parametrize("spec", ALL)
def test_rows_are_those_of_the_core(spec: str, device: str) -> None:
    codes, numbers = codes_of(spec, 112, 512, device)
    assert torch.equal(codes.decoded(0, 112).view(torch.int16), numbers.view(torch.int16))
    assert torch.equal(codes.decoded(40, 75).view(torch.int16), numbers[40:75].view(torch.int16))


@devices
@pytest.mark.parametrize("panel", [1, 1 << 27])
def test_products_with_decoded_panels(device: str, panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_linear, "PANEL", panel)
    codes, numbers = codes_of("int4:32", 112, 512, device)
    x, grad = (torch.randn(130, size, device=device).bfloat16() for size in (512, 112))
    assert error(codes.multiply(x), x.double() @ numbers.double().T) < ROUNDING
    assert error(codes.multiply_transposed(grad), grad.double() @ numbers.double()) < ROUNDING


@pytest.mark.parametrize("columns", [512, 768])
@pytest.mark.parametrize("spec", ALL)
def test_words_have_every_code_and_scale(spec: str, columns: int) -> None:
    """To words and back: the same bytes, hardly more of them."""
    codes, _ = codes_of(spec, 112, columns, "cpu")
    layout = word_layout(codes.matrix)
    if layout is None:
        pytest.skip("decoded first")
    words = to_words(codes.packed, layout)
    assert words is not None and torch.equal(from_words(words, layout), codes.packed)
    if columns == 512:
        assert words.numel() * 4 <= (1.1 if spec in ZEROS else 1.05) * codes.packed.numel()


def test_words_of_groups_longer_than_a_step() -> None:
    """A word has one scale then: two of a word would be of different steps."""
    codes, _ = codes_of("int4:512", 64, 1536, "cpu")
    layout = word_layout(codes.matrix)
    assert layout is not None and layout.format.step < 512 and layout.format.scales == F32
    words = to_words(codes.packed, layout)
    assert words is not None and torch.equal(from_words(words, layout), codes.packed)


def test_scales_beyond_float32_stay_in_the_layout_of_the_cpu() -> None:
    matrix = encode(torch.randn(64, 256) * 2.0**60, "int4:32")
    packed = torch.from_dlpack(quantized_weight(matrix, torch.bfloat16).impl.linear.memory()).view(-1)
    layout = word_layout(packed_linear(64, 256, "int4:32"))
    assert layout is not None and to_words(packed.clone(), layout) is None


def test_codes_that_are_not_numbers_stay_in_the_layout_of_the_cpu() -> None:
    """The kernels read them as 480; decoding gives NaN."""
    matrix = encode(torch.randn(64, 256), "fp8:128x128")
    matrix.qweight.view(torch.uint8)[0, 3, 7] = 0xFF
    packed = torch.from_dlpack(quantized_weight(matrix, torch.bfloat16).impl.linear.memory()).view(-1).clone()
    layout = word_layout(packed_linear(64, 256, "fp8:128x128"))
    assert layout is not None and to_words(packed, layout) is None
    decoded = GpuLinearWeight.of(packed, packed_linear(64, 256, "fp8:128x128")).decoded(0, 64)
    assert decoded.isnan().sum() == 1 and bool(decoded[3, 7].isnan())


@kernel_devices
@pytest.mark.parametrize("spec", ALL)
def test_words_are_decoded(spec: str, device: str) -> None:
    codes, numbers = words_of(spec, 112, 768, device)
    expected = numbers.view(torch.int16)
    assert same_bits(codes.decoded(0, 112), expected)
    assert same_bits(codes.decoded(40, 75), expected[40:75])
    rows = torch.tensor([3, 111, 64, 3], device=device)
    assert same_bits(codes.gathered(rows), expected[rows])


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """The interpreter truncates to bf16."""
    return int((actual.view(torch.int16).int() - expected.int()).abs().max()) <= (1 if INTERPRETED else 0)


@kernel_devices
@pytest.mark.parametrize("rows", [1, 16, 33])
@pytest.mark.parametrize("spec", ALL)
def test_few_rows_are_multiplied_with_codes(spec: str, rows: int, device: str, interpreter_dot: None) -> None:
    kernels = pytest.importorskip(device_linear.TRITON)
    outputs, columns = 112, 2048 if rows == 16 else 1024 + 256
    codes, numbers = words_of(spec, outputs, columns, device)
    layout = codes.layout
    assert layout is not None
    x = torch.randn(rows, columns, device=device).bfloat16()
    space = kernels.workspace(layout, x.device)
    expected = x.double() @ numbers.double().T
    units = torch.zeros_like(x)
    units[torch.arange(rows), torch.arange(rows) * 37 % columns] = 1
    for config in configurations(kernels, layout, rows, device):
        first, again = (kernels.product(x, layout.parts_of(codes.packed), layout, space, config) for _ in range(2))
        assert error(first, expected) < ROUNDING
        assert torch.equal(first, again), "sums in no fixed order"
        chosen = kernels.product(units, layout.parts_of(codes.packed), layout, space, config)
        assert same_values(chosen, numbers.T[torch.arange(rows, device=device) * 37 % columns])


def configurations(kernels: Any, layout: WordLayout, rows: int, device: str) -> list[Any]:
    """Small tiles, with and without several ranges of K; on a GPU also what is chosen for these rows."""
    chosen = kernels.configuration(rows, layout, kernels.card_of(torch.device(device)))
    small = [kernels.Configuration(16, 32, splits, turns=chosen.turns) for splits in (1, 2)]
    return small if device == "cpu" else [*small, chosen, replace(chosen, splits=2)]


def same_values(actual: Tensor, expected: Tensor) -> bool:
    """Equal numbers, whatever the sign of zeros; the interpreter truncates to bf16."""
    return error(actual, expected.double()) < 0.01 if INTERPRETED else torch.equal(actual, expected)


@pytest.mark.parametrize("spec", ["int8", "q4_k"])
def test_a_weight_of_device_codes_is_a_weight(spec: str) -> None:
    """Products, gradients of the input, rows and groups of rows, with codes of a device that is here the CPU."""
    codes, numbers = codes_of(spec, 192, 256, "cpu")
    weight = QuantizedWeight(GpuPacked(codes), spec, (192, 256), torch.bfloat16)
    torch.manual_seed(0)
    x = torch.randn(3, 7, 256).bfloat16().requires_grad_(True)
    out = torch.nn.functional.linear(x, weight)
    out.sum().backward()
    assert error(out, x.detach().double() @ numbers.double().T) < ROUNDING
    assert x.grad is not None and error(x.grad, numbers.double().sum(0).expand(3, 7, -1)) < ROUNDING
    ids = torch.tensor([[0, 191], [64, 0]])
    assert torch.equal(torch.nn.functional.embedding(ids, weight), numbers[ids])
    assert torch.equal(decoded_rows(codes, HeadRows(32, 32, 96)), numbers.view(2, 96, 256)[:, 32:64])
    assert torch.equal(weight + 0, numbers)
    assert torch.equal(weight.to(torch.float32) + 0, numbers.float())


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["int4:32", "fp8:128x128", "q4_k"])
def test_a_captured_product_reads_new_inputs(spec: str) -> None:
    codes, numbers = codes_of(spec, 512, 4096, "cuda:0")
    x = torch.randn(5, 4096, device="cuda:0").bfloat16()
    codes.multiply(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = codes.multiply(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert error(out, x.double() @ numbers.double().T) < ROUNDING


HEADS, PER_HEAD = 3, 72  # rows of a head: 40 of keys and 32 of values
PARTS = [HeadRows(0, 40, PER_HEAD), HeadRows(40, 32, PER_HEAD)]


def expected_of_heads(x: Tensor, numbers: Tensor, rows: HeadRows, along_rows: bool) -> Tensor:
    part = numbers.double().view(-1, rows.step, numbers.shape[1])[:, rows.first : rows.first + rows.count]
    return torch.bmm(x.double(), part if along_rows else part.transpose(1, 2))


def strided(heads: int, rows: int, size: int, device: str) -> Tensor:
    """`[heads, rows, size]` as attention has them: rows of heads in the order of tokens, beside other numbers."""
    return torch.randn(rows, heads, size + 8, device=device).bfloat16()[..., :size].transpose(0, 1)


@kernel_devices
@pytest.mark.parametrize("along_rows", [False, True])
@pytest.mark.parametrize("spec", [*SPECS, *HALVES])
def test_heads_are_multiplied_with_codes(spec: str, along_rows: bool, device: str, interpreter_dot: None) -> None:
    kernels = pytest.importorskip(head_products.TRITON)
    codes, numbers = words_of(spec, HEADS * PER_HEAD, 768, device)
    layout = codes.layout
    assert layout is not None
    torch.manual_seed(0)
    for rows, tokens in zip(PARTS, (1, 33), strict=True):
        x = strided(HEADS, tokens, rows.count if along_rows else 768, device)
        out = strided(HEADS, tokens, 768 if along_rows else rows.count, device)
        config = kernels.configuration(tokens, rows.count, along_rows)
        span = rows.first, rows.count, rows.step
        kernels.multiply_heads(x, layout.parts_of(codes.packed), layout, span, out, along_rows, config)
        assert error(out, expected_of_heads(x, numbers, rows, along_rows)) < ROUNDING


@devices
@pytest.mark.parametrize("along_rows", [False, True])
@pytest.mark.parametrize("spec", ["int4:32", "fp8:128x128", "iq4_xs"])
def test_heads_of_a_weight(spec: str, along_rows: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry for few rows, which are not decoded where codes lie in words, for many rows and for other dtypes."""
    codes, numbers = codes_of(spec, 4 * 96, 512, device)
    weight = QuantizedWeight(GpuPacked(codes), spec, (4 * 96, 512), torch.bfloat16)
    rows = HeadRows(32, 64, 96)
    torch.manual_seed(0)
    for tokens, dtype in ((2, torch.bfloat16), (head_products.DIRECT_ROWS + 1, torch.bfloat16), (2, torch.float32)):
        x = strided(4, tokens, 64 if along_rows else 512, device).to(dtype)
        if codes.reads_packed and tokens == 2 and dtype == torch.bfloat16:
            monkeypatch.setattr(head_products, "decoded_rows", lambda *_: pytest.fail("decoded"))
        actual = weight.multiply_heads(x, rows, along_rows=along_rows)
        monkeypatch.undo()
        expected = expected_of_heads(x, numbers, rows, along_rows)
        assert actual.dtype == dtype and error(actual, expected) < ROUNDING
        out = torch.empty_like(actual)
        assert torch.equal(weight.multiply_heads(x, rows, along_rows=along_rows, out=out), actual)
        assert torch.equal(out, actual)
    weight.check_heads(rows)


@devices
def test_heads_of_a_weight_in_another_order_of_columns(device: str) -> None:
    codes, numbers = codes_of("int8", 4 * 96, 512, device)
    torch.manual_seed(0)
    order = torch.randperm(512, device=device)
    weight = QuantizedWeight(GpuPacked(codes, order), "int8", (4 * 96, 512), torch.bfloat16)
    own, rows = torch.empty_like(numbers), HeadRows(0, 32, 96)
    own[:, order] = numbers
    for along_rows, size in ((False, 512), (True, 32)):
        x = strided(4, 3, size, device)
        expected = expected_of_heads(x, own, rows, along_rows)
        assert error(weight.multiply_heads(x, rows, along_rows=along_rows), expected) < ROUNDING


@pytest.mark.gpu
def test_wrong_products_of_heads_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, _ = codes_of("int8", 4 * 96, 512, "cuda:0")
    check_heads(codes, HeadRows(0, 64, 96))
    kernels = pytest.importorskip(head_products.TRITON)
    multiply = kernels.multiply_heads
    monkeypatch.setattr(kernels, "multiply_heads", lambda x, *given: multiply(x * 1.05, *given))
    with pytest.raises(KTError, match="products of heads with the packed of int8"):
        check_heads(codes, HeadRows(0, 64, 96))


class Products:
    """Kernels whose products are right, or `wrong` from so many rows on; notes how many rows they were called with."""

    def __init__(self, codes: GpuLinearWeight, wrong: int = 1 << 20) -> None:
        self._codes, self._wrong, self.rows = codes, wrong, list[int]()

    def card_of(self, device: torch.device) -> None: ...

    def configuration(self, rows: int, *_: Any) -> object:
        return object()

    def decode(self, parts: Any, layout: Any, out: Tensor, first: int) -> None:
        out.copy_(GpuLinearWeight(self._codes.packed, self._codes.matrix).decoded(first, first + out.shape[0]))

    def product(self, x: Tensor, *_: Any) -> Tensor:
        self.rows.append(x.shape[0])
        numbers = GpuLinearWeight(self._codes.packed, self._codes.matrix).decoded(0, self._codes.matrix.rows)
        return (x.float() @ numbers.float().T * (1.1 if x.shape[0] >= self._wrong else 1)).bfloat16()


def checked_codes(core: _core.CodedLinear, wrong: int = 1 << 20) -> tuple[GpuLinearWeight, Products]:
    packed = torch.from_dlpack(core.memory()).view(-1).clone()
    codes = GpuLinearWeight(packed, packed_linear(112, 512, "int8"))
    codes._kernels = products = Products(codes, wrong)
    codes._parts, codes._space = (), None  # type: ignore[assignment]
    return codes, products


def test_products_of_every_tile_are_compared() -> None:
    """17 to 32 rows have a tile, and so a compiled kernel, of their own."""
    codes, products = checked_codes(core_of("int8", 112, 512))
    assert codes.check()
    assert {rows for rows in products.rows if 16 < rows <= 32} and {rows for rows in products.rows if 32 < rows <= 64}
    with pytest.raises(KTError, match="products with the packed int8 weight"):
        checked_codes(core_of("int8", 112, 512), wrong=17)[0].check()
    assert any(32 < count <= 64 for count in head_products.CHECKED_ROWS), "of heads too"


def test_weights_that_cannot_be_compared_leave_the_check_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of zeros, and a weight that fell back to the layout of the CPU."""
    zeros = weight_module.quantized_weight(encode(torch.zeros(112, 512), "int8"), torch.bfloat16).impl.linear
    assert not checked_codes(zeros)[0].check()
    cores = [zeros, core_of("int8", 112, 512), core_of("int8", 112, 512)]
    made = [
        GpuLinearWeight(torch.from_dlpack(core.memory()).view(-1), packed_linear(112, 512, "int8"))
        for core in cores[:1]
    ]
    made += [checked_codes(core)[0] for core in cores]
    model = torch.nn.ParameterList(
        torch.nn.Parameter(QuantizedWeight(GpuPacked(codes), "int8", (112, 512), torch.bfloat16), requires_grad=False)
        for codes in made
    )
    weight_module.check_on_device(model)
    assert [bool(codes._kernels.rows) for codes in made[1:]] == [False, True, False], "one that has products"


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [80, 89, 120])
def test_products_of_heads_compile_for_every_capability(capability: int) -> None:
    """Within 99 KiB of shared memory, the least of these devices; none of them need be here."""
    kernels = pytest.importorskip(head_products.TRITON)
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    layout = word_layout(packed_linear(32 * 448, 512, "fp8:128x128"))
    assert layout is not None
    names = kernels._product.arg_names
    pointers = dict.fromkeys(("low_words", "high_words", "heads", "scales"), "*i32") | {"x": "*bf16", "out": "*bf16"}
    for along_rows, count in ((True, 192), (False, 256)):
        config = kernels.configuration(64, count, along_rows)
        constants = kernels.constants_of(layout.format) | {
            "ALONG_ROWS": along_rows,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "STAGES": config.stages,
        }
        signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
        constexprs = {(names.index(name),): value for name, value in constants.items()}
        attributes = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name in pointers}
        source = ASTSource(kernels._product, signature, constexprs=constexprs, attrs=attributes)
        options = {"num_warps": config.warps, "enable_fp_fusion": False}
        compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert 0 < compiled.metadata.shared <= 99 << 10


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("spec", ["int8", "int4:32", "uint4:32:f16", "fp8:128x128", "mxfp4", "nvfp4", "q4_k", "q6_k"])
@pytest.mark.parametrize(("capability", "shared"), [(80, 163 << 10), (89, 99 << 10), (120, 99 << 10)])
def test_products_compile_for_every_capability(
    capability: int, shared: int, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the shared memory of these devices, none of which need be here: the launches of 1, 32 and 64 rows."""
    kernels = pytest.importorskip(device_linear.TRITON)
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    layout = word_layout(packed_linear(2048, 4096, spec))
    assert layout is not None
    launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    kernel, names = kernels._product, kernels._product.arg_names
    recorder = defaultdict(lambda: lambda *given, **words: launches.append((given, words)))
    monkeypatch.setattr(kernels, "_product", recorder)
    card = kernels.Card(132, divmod(capability, 10), shared)
    parts = tuple(torch.empty(1, dtype=torch.int32) for _ in range(4))
    for rows in (1, 32, 64):
        config = kernels.configuration(rows, layout, card)
        assert config is not None
        kernels.product(torch.empty(rows, 4096, dtype=torch.bfloat16), parts, layout, parts[0], config)
    types = {torch.int32: "*i32", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
    for given, words in launches:
        constants = {name: value for name, value in words.items() if name in names}
        options = {name: value for name, value in words.items() if name not in names}
        values = dict(zip(names, given, strict=False))
        pointers = {name: types[value.dtype] for name, value in values.items() if isinstance(value, Tensor)}
        signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
        constexprs = {(names.index(name),): value for name, value in constants.items()}
        aligned = {name for name, value in values.items() if name in pointers or value % 16 == 0}
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
        source = ASTSource(kernel, signature, constexprs=constexprs, attrs=attributes)
        compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert 0 < compiled.metadata.shared <= shared
