"""Models whose linear layers are in codes, and the same with the numbers that the codes stand for."""

from __future__ import annotations

from typing import Any

from torch import nn

from ktransformers.quantized.weight import QuantizedWeight


def codes_of(model: nn.Module) -> dict[str, QuantizedWeight]:
    return {name: one for name, one in model.named_parameters() if isinstance(one, QuantizedWeight)}


def with_numbers(model: Any) -> Any:
    """The same model with the numbers that the codes stand for."""
    for name, weight in codes_of(model).items():
        model.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(weight + 0, requires_grad=False)
    return model
