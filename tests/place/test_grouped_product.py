"""Our grouped products against products of each group in float64, and the shared memory of their programs on devices
that are not here. Without a GPU the kernels run in Triton's interpreter if TRITON_INTERPRET=1; it multiplies no bf16,
so numbers are float16 there."""

from __future__ import annotations

import itertools
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ktransformers.place.gpu import grouped_mlp
from ktransformers.place.gpu.grouped_mlp import TRITON
from tests.support.triton_devices import INTERPRETED, triton_devices

# Shared memory that one program may use, by compute capability (CUDA C++ programming guide, technical specifications).
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
QWEN3, GPT_OSS = (128, 2048, 1536), (32, 2880, 5760)  # groups, K, N of gate and up


@pytest.fixture
def kernels() -> ModuleType:
    return pytest.importorskip(TRITON)


def dtype_on(device: str) -> torch.dtype:
    return torch.float16 if device == "cpu" else torch.bfloat16


def ends_of(counts: list[int], device: str) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(device, torch.int32)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """One rounding to 16 bits of sums in float32."""
    assert (actual.double().cpu() - expected).norm() <= 2**-8 * expected.norm().clamp(min=1e-9)


def per_group(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    bounds = [0, *ends.tolist()]
    parts = [rows[a:b] @ matrix for a, b, matrix in zip(bounds, bounds[1:], matrices, strict=False)]
    return torch.cat(parts)


@triton_devices
@pytest.mark.parametrize("transposed", [True, False], ids=["forward", "gradient"])
@pytest.mark.parametrize(("inner", "columns"), [(64, 160), (40, 48), (8, 96), (96, 8), (130, 66)])
def test_rows_are_multiplied_by_the_matrix_of_their_group(
    kernels: ModuleType, device: str, transposed: bool, inner: int, columns: int
) -> None:
    torch.manual_seed(0)
    counts = [0, 21, 1, 0, 40, 16, 0]
    ends, padding = ends_of(counts, device), 5
    rows = torch.randn(sum(counts) + padding, inner).to(device, dtype_on(device))
    shape = (len(counts), columns, inner) if transposed else (len(counts), inner, columns)
    stored = torch.randn(shape).to(device, dtype_on(device))
    matrices = stored.transpose(1, 2) if transposed else stored
    actual = kernels.product(rows, matrices, ends)
    expected = per_group(rows.double().cpu(), matrices.double().cpu(), ends.cpu())
    assert actual.shape == (sum(counts) + padding, columns)
    assert_near(actual[: sum(counts)], expected)


@triton_devices
@pytest.mark.parametrize(("left", "right"), [(8, 96), (160, 16), (24, 40)])
def test_outer_products_of_groups(kernels: ModuleType, device: str, left: int, right: int) -> None:
    torch.manual_seed(0)
    counts = [3, 0, 50, 32, 1]
    ends = ends_of(counts, device)
    a, b = (torch.randn(sum(counts) + 4, columns).to(device, dtype_on(device)) for columns in (left, right))
    actual = kernels.outer(a, b, ends)
    bounds = [0, *ends.tolist()]
    parts = [(a[i:j].double().T @ b[i:j].double()).cpu() for i, j in itertools.pairwise(bounds)]
    assert_near(actual, torch.stack(parts))
    assert not actual[1].any(), "a group without rows has a gradient of zero"


@pytest.mark.skipif(not INTERPRETED, reason="no interpreter")
@settings(max_examples=20, deadline=None)
@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=9))
def test_any_routing(counts: list[int]) -> None:
    kernels = pytest.importorskip(TRITON)
    torch.manual_seed(0)
    ends = ends_of(counts, "cpu")
    rows, matrices = torch.randn(sum(counts), 24).half(), torch.randn(len(counts), 24, 32).half()
    expected = per_group(rows.double(), matrices.double(), ends)
    assert_near(kernels.product(rows, matrices, ends), expected)


@pytest.mark.gpu
def test_a_graph_follows_the_group_sizes_on_the_device(kernels: ModuleType) -> None:
    torch.manual_seed(0)
    rows = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    matrices = torch.randn(8, 256, 128, device="cuda", dtype=torch.bfloat16)
    left = torch.randn(512, 16, device="cuda", dtype=torch.bfloat16)
    ends = torch.full((8,), 512, device="cuda", dtype=torch.int32)

    def run() -> tuple[Tensor, Tensor]:
        return kernels.product(rows, matrices, ends), kernels.outer(left, rows, ends)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product, outer = run()
    for counts in ([64] * 8, [0, 500, 0, 1, 0, 0, 11, 0], [0] * 7 + [512]):
        ends.copy_(ends_of(counts, "cuda"))
        graph.replay()
        expected = per_group(rows.double().cpu(), matrices.double().cpu(), ends.cpu())
        assert_near(product[: sum(counts)], expected)
        first = slice(0, counts[0])
        assert_near(outer[0], (left[first].double().T @ rows[first].double()).cpu())


def test_tiles_fit_into_shared_memory(kernels: ModuleType) -> None:
    for limit in (kib << 10 for kib in SHARED_KIB.values()):
        for groups, inner, columns in (QWEN3, GPT_OSS, (128, 2048, 16), (128, 16, 1536)):
            for rows in (1, 16, 100, 4096, 16384, 65536):
                tile = kernels.configuration(rows, groups, columns, inner, limit)
                assert tile.shared_bytes <= limit, (limit, tile)
        assert kernels.outer_configuration(4096, 4096).shared_bytes <= limit


def compiled_shared_bytes(kernel: Any, capability: int, constants: dict[str, Any], tile: Any) -> int:
    """Of a program compiled for a device that need not be here; all pointers and sizes are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    pointers = {"rows": "*bf16", "matrices": "*bf16", "left": "*bf16", "right": "*bf16", "out": "*bf16", "ends": "*i32"}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    aligned = [index for index, name in enumerate(names) if name not in constants and name not in ("groups", "count")]
    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
    source = ASTSource(kernel, signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return int(compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_compiled_programs_fit_into_shared_memory(kernels: ModuleType, capability: int) -> None:
    limit = SHARED_KIB[capability] << 10
    for (groups, inner, columns), rows in ((QWEN3, 16384), (QWEN3, 4096), (GPT_OSS, 32768)):
        for contiguous in ("k_stride", "n_stride"):  # forward and gradient
            tile = kernels.configuration(rows, groups, columns, inner, limit)
            constants = kernels.product_constants(tile, groups, columns, inner) | {contiguous: 1}
            used = compiled_shared_bytes(kernels._product, capability, constants, tile)
            assert 0 < used <= limit, (tile, used)
    tile = kernels.outer_configuration(16, 2048)
    constants = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.inner}
    assert 0 < compiled_shared_bytes(kernels._outer, capability, constants, tile) <= limit


@pytest.mark.parametrize(
    ("capability", "own"), [((8, 0), True), ((8, 9), True), ((12, 0), True), ((9, 0), False), ((10, 0), False)]
)
def test_ours_are_used_where_torch_has_no_single_kernel(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], own: bool
) -> None:
    module = SimpleNamespace()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(grouped_mlp, "import_triton_module", lambda name: module)
    grouped_mlp.own_kernels.cache_clear()
    try:
        device = torch.device("cuda:0")
        assert (grouped_mlp.own_kernels(device) is module) == own
        assert grouped_mlp.is_capturable(device) == (own or capability[0] in (9, 10))
        assert grouped_mlp.own_kernels(torch.device("cpu")) is None
    finally:
        grouped_mlp.own_kernels.cache_clear()
