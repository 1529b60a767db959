"""Small-batch linear layers against float64 on every variant: a row's result does not depend on the other rows, and
torch computes everything else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ktransformers import _core
from ktransformers.modeling.linear import MIN_WEIGHTS, linears

ROWS = _core.linear_rows()
ROUTER: Any = Qwen3MoeTopKRouter


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 32), (3, 64), (37, 96), (130, 1056)])
def test_small_batch_products_match_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    pool, generator = _core.Pool(2), torch.Generator().manual_seed(0)
    outputs, columns = shape
    weights = [torch.randn(count, columns, generator=generator).bfloat16() for count in (outputs, 16)]
    x = torch.randn(ROWS, columns, generator=generator).to(dtype)
    want = [x.double() @ weight.double().t() for weight in weights]
    alone: list[list[torch.Tensor]] = [[], []]
    for rows in range(1, ROWS + 1):
        outs = [torch.empty(rows, weight.shape[0], dtype=dtype) for weight in weights]
        pool.linear(x[:rows], weights, outs)
        for actual, wanted, kept in zip(outs, want, alone, strict=True):
            apart = (actual.double() - wanted[:rows]).abs().max() / wanted.abs().max()
            assert apart < (2**-8 if dtype == torch.bfloat16 else 1e-5)
            kept.append(actual[0])
    assert all(torch.equal(row, kept[0]) for kept in alone for row in kept), "a row depends on its neighbours"


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    pool = _core.Pool(1)
    weight, x, out = torch.zeros(4, 64).bfloat16(), torch.zeros(2, 64).bfloat16(), torch.zeros(2, 4).bfloat16()
    with pytest.raises(ValueError, match="multiple of 32"):
        pool.linear(x[:, :40], [weight[:, :40]], [out])
    with pytest.raises(ValueError, match="weight"):
        pool.linear(x[:, :32], [weight], [out])
    with pytest.raises(ValueError, match=f"{ROWS + 1} rows"):
        pool.linear(torch.zeros(ROWS + 1, 64).bfloat16(), [weight], [torch.zeros(ROWS + 1, 4).bfloat16()])
    with pytest.raises(ValueError, match="outs"):
        pool.linear(x, [weight, weight], [out])
    with pytest.raises(TypeError, match="weight"):
        pool.linear(x, [weight.float()], [out])
    with pytest.raises(TypeError, match="out"):
        pool.linear(x, [weight], [out.float()])


@pytest.mark.filterwarnings("ignore:.*bf16.*")
def test_patched_layers_of_a_model() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "large": nn.Linear(512, MIN_WEIGHTS // 512, dtype=torch.bfloat16),
            "small": nn.Linear(64, 64, dtype=torch.bfloat16),
            "wide": nn.Linear(512, MIN_WEIGHTS // 512, dtype=torch.float32),
        }
    )
    stock = {name: layer.forward for name, layer in model.items()}
    assert linears().apply(model) == 1 and linears().apply(model) == 0
    large = model["large"]
    x = torch.randn(2, 3, 512).bfloat16()
    with torch.no_grad():
        got, want = large(x), stock["large"](x)
        assert got.shape == want.shape and not torch.equal(got, torch.zeros_like(got))
        assert (got.float() - want.float()).norm() < 5e-3 * want.float().norm()
        many = torch.randn(ROWS + 1, 512).bfloat16()
        assert torch.equal(large(many), stock["large"](many))
        assert torch.equal(large(x[:0]), stock["large"](x[:0]))
    learned = large(x.requires_grad_())
    assert learned.grad_fn is not None and torch.equal(learned, stock["large"](x))


class Counted:
    """A pool that counts what it is asked for."""

    def __init__(self) -> None:
        self.calls, self.matrices, self._pool = 0, 0, _core.Pool(2)

    def linear(self, x: torch.Tensor, weights: list[Any], outs: list[Any]) -> None:
        self.calls, self.matrices = self.calls + 1, self.matrices + len(weights)
        self._pool.linear(x, weights, outs)


class Three(nn.Module):
    """q, k and v of x; v of another tensor where it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(512, MIN_WEIGHTS // 512 * n, bias=n == 2, dtype=torch.bfloat16) for n in (1, 2))
        self.v = nn.Linear(512, MIN_WEIGHTS // 512, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> list[torch.Tensor]:
        return [self.q(x), self.k(x), self.v(x if y is None else y)]


def test_layers_with_the_same_input_become_one_call() -> None:
    torch.manual_seed(0)
    model, pool = Three(), Counted()
    stock = copy.deepcopy(model)
    assert linears(pool).apply(model) == 3  # type: ignore[arg-type]

    def calls(*given: torch.Tensor) -> tuple[int, int]:
        """And of how many matrices in all."""
        before = pool.calls, pool.matrices
        with torch.inference_mode():
            for actual, wanted in zip(model(*given), stock(*given), strict=True):
                assert actual.shape == wanted.shape
                assert (actual.float() - wanted.float()).norm() < 5e-3 * wanted.float().norm()
                actual.zero_()  # who is given a result owns it
        return pool.calls - before[0], pool.matrices - before[1]

    def rows() -> torch.Tensor:
        return torch.randn(1, 2, 512).bfloat16()

    assert [calls(rows()) for _ in range(3)] == [(3, 3), (1, 3), (1, 3)]
    assert calls(rows(), rows()) == (2, 4)
    assert calls(rows(), rows()) == (2, 3)  # v had not asked: it is not computed along again
    assert [calls(rows()) for _ in range(2)] == [(2, 3), (1, 3)]
    x = rows()
    for _ in range(2):
        x.normal_()  # the same tensor with other numbers, step by step
        assert calls(x) == (1, 3)
    assert calls(torch.randn(ROWS + 1, 512).bfloat16()) == (0, 0)


def test_router_weight_is_patched_and_stays_a_parameter() -> None:
    """Name, value, gradient and copies of the weight are those of a parameter."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=512, num_experts=MIN_WEIGHTS // 512, num_experts_per_tok=4)
    router: Any = ROUTER(config).bfloat16()
    nn.init.normal_(router.weight)
    stock, pool = copy.deepcopy(router), Counted()
    assert linears(pool).apply(nn.ModuleList([router])) == 1 and linears(pool).apply(nn.ModuleList([router])) == 0  # type: ignore[arg-type]
    x = torch.randn(3, 512).bfloat16()
    with torch.inference_mode():
        logits, shares, ids = router(x)
        wanted = stock(x)
    assert pool.calls == 1 and type(logits) is torch.Tensor
    assert (logits.float() - wanted[0].float()).norm() < 5e-3 * wanted[0].float().norm()
    assert shares.shape == wanted[1].shape and ids.shape == wanted[2].shape
    with torch.no_grad():
        many = torch.randn(ROWS + 1, 512).bfloat16()
        assert torch.equal(F.linear(many, router.weight), F.linear(many, stock.weight))
        assert torch.equal(F.linear(x.float(), router.weight.float()), F.linear(x.float(), stock.weight.float()))
    for module in (router, stock):
        module(x)[0].sum().backward()
    assert torch.equal(router.weight.grad, stock.weight.grad)
    state = router.state_dict()
    assert type(state["weight"]) is torch.Tensor and torch.equal(state["weight"], stock.weight)
    assert torch.equal(copy.deepcopy(router).weight, stock.weight) and pool.calls == 1


def test_tied_weight_stays_shared() -> None:
    class Tied(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

    weight = nn.Parameter(torch.zeros(MIN_WEIGHTS // 512, 512, dtype=torch.bfloat16))
    model = nn.ModuleList([Tied(weight), Tied(weight), nn.Embedding(MIN_WEIGHTS // 512, 512, dtype=torch.bfloat16)])
    assert linears().apply(model) == 0 and model[0].weight is model[1].weight
