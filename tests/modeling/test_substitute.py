"""Substitutions: what is left alone, how close is the same, and that a restored model is the stock one again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ktransformers.modeling.substitute import ABSORBED, Restore, Substitution, matches, random_numbers
from ktransformers.serve.attention.windows import CHUNK_ATTRIBUTE, WINDOW_ATTRIBUTE
from ktransformers.serve.scheduler.forward import FASTER, Forward, SequentialForward, make_forward
from tests.support.tiny_models import build


class Squares(nn.Module):
    def __init__(self, factor: float | None) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        if self.factor is None:
            raise TypeError("not for random numbers")
        return self.factor * x * x


def probe(module: Squares) -> bool | None:
    x = random_numbers()(4)
    return matches(x.square(), module(x)) or None


def replace(module: Squares, _: bool, restore: Restore) -> None:
    restore.put(module, "forward", torch.square)


def squares(model: nn.Module) -> Iterator[Squares]:
    return (module for module in model.modules() if isinstance(module, Squares))


def test_only_what_computes_the_same_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    model, restore = nn.ModuleList([Squares(1.0), Squares(2.0), Squares(None), nn.Identity()]), Restore()
    with caplog.at_level("DEBUG", "ktransformers"):
        assert Substitution("squares", squares, probe, replace).apply(model, restore) == 1
    assert caplog.messages == ["squares: 1 of 3 replaced"]
    assert ["forward" in vars(module) for module in model] == [True, False, False, False]
    restore.close()
    assert not any("forward" in vars(module) for module in model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_shapes_dtypes_and_values_are_no_match(dtype: torch.dtype) -> None:
    x = random_numbers()(64).to(dtype)
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert matches(x, x.clone()) and not matches(x[None], x) and not matches(x.double(), x) and not matches(x, None)
    near = x.double() * (1 + 1.5 * limit)
    assert not matches(near.to(dtype), x) and matches(near.to(dtype), x, ABSORBED) == (dtype == torch.bfloat16)
    assert not matches(x * torch.nan, x)


def test_attributes_come_back_as_they_were() -> None:
    module, other = nn.Linear(2, 2), nn.Parameter(torch.zeros(2, 2))
    weight, before = module.weight, dict(vars(module))
    with Restore() as restore:
        restore.put(module, "weight", other)  # a parameter
        restore.put(module, "in_features", 3)  # its own attribute
        restore.put(module, "forward", torch.relu)  # of its class
        restore.put(module, "forward", torch.abs)
        restore.put(module, "kt_mark", True)  # of nobody
        assert module.weight is other and module(torch.tensor(-1.0)) == 1
    assert module.weight is weight and vars(module) == before


def state(model: nn.Module) -> dict[str, Any]:
    """Attributes, parameters and hooks of every module; windows that were read stay."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in (WINDOW_ATTRIBUTE, CHUNK_ATTRIBUTE):
                found[f"{name}.{key}"] = dict(value) if isinstance(value, dict) else id(value)
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "deepseek_v32", "qwen3_next", "llama4_text", "jamba"])
def test_a_restored_model_is_the_stock_model(family: str) -> None:
    model = build(family).bfloat16()
    ids, before = torch.tensor([[5, 9, 2, 7]]), state(model)
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
        with Restore() as restore:
            for substitution in FASTER:
                substitution.apply(model, restore)
            forward = Forward(model)
            assert state(model) != before and forward.check_against_stock() > 0
            forward.restore.close()
        assert state(model) == before
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)


def test_a_family_that_is_refused_keeps_nothing_of_it() -> None:
    model = build("inkling_text")
    before, attention = state(model), model.config._attn_implementation
    forward = make_forward(model)
    assert isinstance(forward, SequentialForward) and model.config._attn_implementation == attention
    replaced = {key for key, value in state(model).items() if before.get(key) != value}
    assert replaced and all(key.endswith(".forward") and "norm" in key for key in replaced)
