"""W8A8 of formats whose codes are multiplied as they lie, GGUF's types among them: each 32 columns of a row of x become
bytes with a scale of their own, experts and linear layers alike; nothing depends on threads, groups or neighbours."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from ktransformers import _core
from ktransformers.checkpoint.encoded import GGUF_BLOCKS, Encoded, decode
from ktransformers.checkpoint.encoder import encode
from ktransformers.ground.errors import InputError
from ktransformers.nn import ExpertStore
from tests.support.gguf_blocks import random_blocks
from tests.support.variants import ROUNDING

from .conftest import error
from .rounded import FEW, ROUNDED

K_TYPES = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
SPECS = (*K_TYPES, "q4_0", "q4_1", "q5_0", "q8_0", "iq4_xs", "iq2_xxs", "iq3_s", "tq1_0", "tq2_0")
ENCODED = ("int8", "int4:32", "mxfp4", "nvfp4")
HIDDEN, INTERMEDIATE, EXPERTS = 512, 256, 3


def matrix_of(spec: str, experts: int, rows: int, columns: int, seed: int = 0) -> Encoded:
    if spec in GGUF_BLOCKS:
        blocks = random_blocks(spec, (experts, rows), columns, np.random.default_rng(seed))
        return Encoded(spec, torch.from_numpy(blocks), None, columns=columns)
    numbers = torch.randn(experts, rows, columns, generator=torch.Generator().manual_seed(seed))
    return encode(numbers, spec)


def numbers(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Values that bf16 has too; some columns are far larger, some rows are zero in places."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[..., 70:75] *= 50
    x[..., 128:160] = 0
    return x.bfloat16().float()


def in_bytes(x: Tensor) -> Tensor:
    """What 8 bits keep of rows `[n, K]` in float32."""
    groups = x.view(len(x), x.shape[1] // 32, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest == 0, 0, torch.full_like(largest, 127) / largest)
    return ((groups * inverse).round().double() * (largest / 127).double()).view(x.shape)


def rows_of(isa: str) -> tuple[int, ...]:
    """Numbers of rows that are multiplied with codes."""
    return (1, 3, FEW) if isa in ROUNDING else (1, 3, 4, 5, 26)


@pytest.mark.parametrize("spec", [*SPECS, *ENCODED])
def test_linear_layers_multiply_bytes_exactly(isa: str, spec: str, pool: _core.Pool) -> None:
    matrix = matrix_of(spec, 1, 80, HIDDEN)
    linear = _core.CodedLinear(pool, 80, HIDDEN, spec, isa)
    linear.pack(matrix.packable)
    assert linear.supports_w8a8 and not linear.w8a8
    weight = decode(matrix)[0].double()
    for rows in rows_of(isa):
        x, exact, rounded = numbers((rows, HIDDEN), rows), torch.empty(rows, 80), torch.empty(rows, 80)
        linear.forward(x, exact)
        linear.w8a8 = True
        linear.forward(x, rounded)
        linear.w8a8 = False
        assert error(rounded, in_bytes(x) @ weight.T) < 1e-5
        assert 1e-4 < error(rounded, x.double() @ weight.T) < 0.1  # large numbers share scales with small ones
        assert error(exact, x.double() @ weight.T) < 3e-4


def layer_of(specs: tuple[str, str, str], pool: _core.Pool, isa: str) -> tuple[ExpertStore, list[Tensor]]:
    sizes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    matrices = [
        matrix_of(spec, EXPERTS, *size, seed) for seed, (spec, size) in enumerate(zip(specs, sizes, strict=True))
    ]
    names = ("gate", "up", "down")
    store = ExpertStore(EXPERTS, HIDDEN, INTERMEDIATE, pool=pool, isa=isa, formats=dict(zip(names, specs, strict=True)))
    gate, up, down = matrices
    store.pack(gate=gate, up=up, down=down)
    return store, [decode(matrix).double() for matrix in matrices]


def defined(isa: str, weights: list[Tensor], x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    gate, up, down = weights
    for expert in range(EXPERTS):
        token, slot = torch.where(ids == expert)
        rows = in_bytes(x[token])
        inner = (silu(rows @ gate[expert].T) * (rows @ up[expert].T)).float()
        inner = inner.bfloat16().float() if isa in ROUNDING else inner
        product = in_bytes(inner) @ down[expert].T
        out.index_add_(0, token, product * scores[token, slot, None].double())
    return out


def batch_of(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(tokens)
    ids = torch.arange(2 * tokens).view(tokens, 2) % EXPERTS
    return numbers((tokens, HIDDEN), tokens), ids, torch.rand(tokens, 2, generator=random)


@pytest.mark.parametrize(
    "specs",
    [("q4_k", "q4_k", "q6_k"), ("q5_k", "q5_k", "q3_k"), ("q2_k", "int8", "q4_k"), ("q8_0", "int4:32", "mxfp4")],
)
def test_experts_multiply_bytes_exactly(isa: str, specs: tuple[str, str, str], pool: _core.Pool) -> None:
    store, weights = layer_of(specs, pool, isa)
    for tokens in (1, 5) if isa in ROUNDING else (1, 5, 40):
        batch = batch_of(tokens)
        assert error(store.forward(*batch, w8a8=True), defined(isa, weights, *batch)) < ROUNDED


def test_nothing_depends_on_threads_groups_or_neighbours(isa: str, pool_of: Callable[[int, int], _core.Pool]) -> None:
    tokens = 5 if isa in ROUNDING else 40
    x, ids, scores = batch_of(tokens)
    specs = ("q4_k", "q4_k", "q6_k")
    alone = layer_of(specs, pool_of(1, 1), isa)[0].forward(x, ids, scores, w8a8=True)
    for threads, groups in ((3, 1), (4, 2)):
        store = layer_of(specs, pool_of(threads, groups), isa)[0]
        assert torch.equal(store.forward(x, ids, scores, w8a8=True), alone)
        some = slice(2, 5)
        assert torch.equal(store.forward(x[some], ids[some], scores[some], w8a8=True), alone[some])


def test_many_rows_where_the_cpu_multiplies_bf16(isa: str, pool: _core.Pool) -> None:
    """They are multiplied by tiles, as without W8A8."""
    if isa not in ROUNDING:
        pytest.skip("this variant multiplies codes for any number of rows")
    store, _ = layer_of(("q4_k", "q4_k", "q6_k"), pool, isa)
    batch = batch_of(40)
    assert torch.equal(store.forward(*batch, w8a8=True), store.forward(*batch, needs_grad=True))


@pytest.mark.parametrize("spec", K_TYPES)
def test_how_far_it_is_from_the_numbers(spec: str, pool: _core.Pool) -> None:
    """Codes have lost ten times as much of a trained weight."""
    store, _ = layer_of((spec, spec, spec), pool, "")
    x, ids, scores = batch_of(3)
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).bfloat16().float()
    exact = error(store.forward(x, ids, scores, w8a8=True), store.forward(x, ids, scores).double())
    assert 1e-4 < exact < 0.02


def test_what_has_no_integer_codes_is_refused(pool: _core.Pool) -> None:
    linear = _core.CodedLinear(pool, 32, 256, "fp8:128x128")
    assert not linear.supports_w8a8
    with pytest.raises(ValueError, match=r"w8a8.*fp8"):
        linear.w8a8 = True
    store = ExpertStore(2, 256, 256, pool=pool, formats={"gate": "q4_k", "up": "q4_k", "down": "fp8:row"})
    with pytest.raises(InputError, match=r"w8a8.*fp8:row, q4_k.*integer formats"):
        store.w8a8 = True
