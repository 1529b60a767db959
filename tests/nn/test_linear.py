"""The product of few rows against float64, on every variant's own words: the same numbers for a row whoever is beside
it, torch's path for everything else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ktransformers import _core
from ktransformers.nn.linear import LEAST, ROWS, hasten


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 32), (3, 64), (37, 96), (130, 1056)])
def test_products(shape: tuple[int, int], dtype: torch.dtype) -> None:
    pool, generator = _core.Pool(2), torch.Generator().manual_seed(0)
    outputs, columns = shape
    weight = torch.randn(outputs, columns, generator=generator).bfloat16()
    x = torch.randn(ROWS, columns, generator=generator).to(dtype)
    want = x.double() @ weight.double().t()
    alone = []
    for rows in range(1, ROWS + 1):
        out = torch.empty(rows, outputs, dtype=dtype)
        pool.linear(x[:rows], weight, out)
        apart = (out.double() - want[:rows]).abs().max() / want.abs().max()
        assert apart < (2**-8 if dtype == torch.bfloat16 else 1e-5)
        alone.append(out[0])
    assert all(torch.equal(row, alone[0]) for row in alone), "a row depends on its neighbours"


def test_what_does_not_fit_is_refused() -> None:
    pool = _core.Pool(1)
    weight, x, out = torch.zeros(4, 64).bfloat16(), torch.zeros(2, 64).bfloat16(), torch.zeros(2, 4).bfloat16()
    with pytest.raises(ValueError, match="multiple of 32"):
        pool.linear(x[:, :40], weight[:, :40], out)
    with pytest.raises(ValueError, match="weight"):
        pool.linear(x[:, :32], weight, out)
    with pytest.raises(ValueError, match="9 rows"):
        pool.linear(torch.zeros(9, 64).bfloat16(), weight, torch.zeros(9, 4).bfloat16())
    with pytest.raises(TypeError, match="weight"):
        pool.linear(x, weight.float(), out)
    with pytest.raises(TypeError, match="out"):
        pool.linear(x, weight, out.float())


@pytest.mark.filterwarnings("ignore:.*bf16.*")
def test_layers_of_a_model() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "large": nn.Linear(512, LEAST // 512, dtype=torch.bfloat16),
            "small": nn.Linear(64, 64, dtype=torch.bfloat16),
            "wide": nn.Linear(512, LEAST // 512, dtype=torch.float32),
        }
    )
    stock = {name: layer.forward for name, layer in model.items()}
    assert hasten(model) == 1 and hasten(model) == 0
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
