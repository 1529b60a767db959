"""W8A8 for a model: experts on the CPU compute with 8-bit activations, an approximation that is off by default.

`ExpertStore.w8a8` describes the arithmetic. It is switched for all layers or for none: a layer whose experts are
neither int8 nor int4 is refused by name first, because a partly switched model would be neither fast nor exact.
"""

from __future__ import annotations

from torch import nn

from ktransformers.errors import InputError
from ktransformers.nn.contract import expert_modules
from ktransformers.nn.store import ExpertStore

_REMEDY = "`kt quant --format int8` makes them, and so does int4:32"


def use_w8a8(model: nn.Module, on: bool = True) -> int:
    """Switch every expert layer of the model; returns their number. Training is refused while it is on."""
    stores = _stores(model)
    if on and not stores:
        raise InputError("w8a8", "on, for a model without packed experts", "experts in int8 or int4", _REMEDY)
    for name, store in stores.items():
        if on and (reason := store.w8a8_unsupported):
            given = f"on, with {name} in {', '.join(sorted(set(store.formats.values())))}"
            raise InputError("w8a8", given, "every layer's experts in int8 or int4", f"{reason}; {_REMEDY}")
    for store in stores.values():
        store.w8a8 = on
    return len(stores)


def _stores(model: nn.Module) -> dict[str, ExpertStore]:
    stores = {name: getattr(module, "kt_store", None) for name, module in expert_modules(model).items()}
    return {name: store for name, store in stores.items() if isinstance(store, ExpertStore)}
