"""W8A8 for a whole model: experts on the CPU compute with 8-bit activations, an approximation that is off by default.

What it is stands with `ExpertStore.w8a8`. All layers have it or none: one whose experts are neither int8 nor int4 is
refused by name before any is switched, because half a model in it would be neither fast nor what was asked for.
"""

from __future__ import annotations

from torch import nn

from ktransformers.errors import InputError
from ktransformers.nn.contract import expert_modules
from ktransformers.nn.store import ExpertStore

_MAKES = "`kt quant --format int8` makes them, and so does int4:32"


def use_w8a8(model: nn.Module, on: bool = True) -> int:
    """Switch every expert layer of the model; how many there are. Training is refused as long as it is on."""
    stores = _stores(model)
    if on and not stores:
        raise InputError("w8a8", "on, for a model without packed experts", "experts in int8 or int4", _MAKES)
    for name, store in stores.items():
        if on and (why := store.against_w8a8):
            given = f"on, with {name} in {', '.join(sorted(set(store.formats.values())))}"
            raise InputError("w8a8", given, "every layer's experts in int8 or int4", f"{why}; {_MAKES}")
    for store in stores.values():
        store.w8a8 = on
    return len(stores)


def _stores(model: nn.Module) -> dict[str, ExpertStore]:
    found = {name: getattr(module, "kt_store", None) for name, module in expert_modules(model).items()}
    return {name: store for name, store in found.items() if isinstance(store, ExpertStore)}
