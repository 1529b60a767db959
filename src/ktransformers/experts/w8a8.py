"""W8A8 for a model: experts on the CPU, and quantized dense linear layers compute with
8-bit activations, an approximation that is off by default.

`ExpertStore.w8a8` describes the arithmetic. It is switched for all layers of experts or for none: a layer whose experts
are no integer formats is refused by name first, because a partly switched model would be neither fast nor exact. Linear
layers whose weights are dense or in fp8 stay exact.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ktransformers import _core
from ktransformers.experts.backend import packed_experts
from ktransformers.experts.contract import expert_modules
from ktransformers.experts.store import W8A8_FORMATS, ExpertStore
from ktransformers.ground.errors import InputError
from ktransformers.quantized.weight import CpuPacked, QuantizedWeight

_REMEDY = "`kt quant --format int8` makes them, and so do int4:32, q8_0 and q4_0"


def use_w8a8(model: nn.Module, on: bool = True) -> tuple[int, int]:
    """Switch every layer of experts of the model and its quantized linear layers; returns how many of both. Training
    is refused while it is on."""
    stores = _stores(model)
    if on and not stores:
        raise InputError("w8a8", "on, for a model without packed experts", W8A8_FORMATS, _REMEDY)
    for name, store in stores.items():
        if on and (reason := store.w8a8_unsupported):
            given = f"on, with {name} in {', '.join(sorted(set(store.formats.values())))}"
            raise InputError("w8a8", given, f"in every layer {W8A8_FORMATS}", f"{reason}; {_REMEDY}")
    for store in stores.values():
        store.w8a8 = on
    linears = list(_quantized_linears(model))
    for linear in linears:
        linear.w8a8 = on
    return len(stores), len(linears)


def _stores(model: nn.Module) -> dict[str, ExpertStore]:
    layers = {name: packed_experts(module) for name, module in expert_modules(model).items()}
    return {name: kt.store for name, kt in layers.items() if kt is not None and kt.store is not None}


def _quantized_linears(model: nn.Module) -> Iterator[_core.CodedLinear]:
    """Those that can compute with 8-bit activations. The table of an embedding is only looked up, unless the head
    multiplies with it."""
    weights = {id(one.weight): one.weight for one in model.modules() if isinstance(one, nn.Linear)}
    for weight in weights.values():
        if isinstance(weight, QuantizedWeight) and isinstance(weight.impl, CpuPacked):
            linear = weight.impl.linear
            if linear.supports_w8a8:
                yield linear
