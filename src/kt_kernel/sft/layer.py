"""`KTMoELayerWrapper`: the record of one expert layer of a wrapped model, and the model that holds the records.

It is no module: the stock modules of the model stay in place, and the record refers to the experts module among them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from kt_kernel.sft.errors import KTAMXModelNotSupportedError
from ktransformers.adapters.names import split_layer_name
from ktransformers.nn.contract import Contract
from ktransformers.nn.store import ExpertStore


@dataclass(eq=False)
class KTMoELayerWrapper:
    """One expert layer of a wrapped model."""

    name: str  # of the experts module
    layer_idx: int
    experts: nn.Module
    hidden_size: int
    # Six tensors by name if this library owns the layer's LoRA; empty if PEFT does, or if there is none.
    fused_expert_lora_params: dict[str, nn.Parameter] = field(default_factory=dict)
    _is_kt_moe_wrapper = True

    @property
    def wrapper(self) -> ExpertStore:
        """The packed experts."""
        store = self.experts.kt_store
        assert isinstance(store, ExpertStore)
        return store

    @property
    def contract(self) -> Contract:
        contract = self.experts.kt_contract
        assert isinstance(contract, Contract)
        return contract


def record_layer(name: str, module: Any) -> KTMoELayerWrapper:
    return KTMoELayerWrapper(name, split_layer_name(name)[1], module, module.kt_store.hidden_size)


def wrapped_model(model: nn.Module) -> Any:
    """The module inside `model` (PEFT, DDP and others may be around it) that was wrapped."""
    for module in model.modules():
        if "_kt_wrappers" in module.__dict__:
            return module
    remedy = "call wrap_moe_layers_with_kt_wrapper(model, kt_config) first"
    raise KTAMXModelNotSupportedError(type(model).__name__, "a model that was not wrapped", "a wrapped one", remedy)


def is_wrapped(model: nn.Module) -> bool:
    return any("_kt_wrappers" in module.__dict__ for module in model.modules())
