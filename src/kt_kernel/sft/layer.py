"""`KTMoELayerWrapper`: the record of one expert layer of a wrapped model, and the model that holds the records.

It is no module: the stock modules of the model stay in place, and the record refers to the experts module among them.

Non-reentrant checkpointing is correct without any function of this package: the expert operator is recomputed like any
other, and dropout draws its seed from torch's generator, whose state torch restores. With the `context_fn` from here, a
layer whose policy is cpu=retain replays the outputs of its first pass instead of computing the experts again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kt_kernel.sft.config import KTActivationPolicy, KTConfig
from kt_kernel.sft.runtime import KTAMXModelNotSupportedError
from ktransformers.checkpoint.layout import split_layer_name
from ktransformers.experts.backend import packed_experts
from ktransformers.experts.checkpointing import recompute_experts, save_expert_outputs
from ktransformers.experts.contract import Contract, expert_modules
from ktransformers.experts.interface import experts_of
from ktransformers.experts.store import ExpertStore

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


@dataclass(eq=False)
class KTMoELayerWrapper:
    """One expert layer of a wrapped model."""

    name: str  # of the experts module
    layer_idx: int
    experts: nn.Module
    # Six tensors by name if this library owns the layer's LoRA; empty if PEFT does, or if there is none.
    fused_expert_lora_params: dict[str, nn.Parameter] = field(default_factory=dict)
    _is_kt_moe_wrapper = True

    @property
    def wrapper(self) -> ExpertStore:
        """The packed experts."""
        store = experts_of(self.experts).store
        assert store is not None
        return store

    @property
    def hidden_size(self) -> int:
        return self.wrapper.hidden_size

    @property
    def contract(self) -> Contract:
        return experts_of(self.experts).contract


def record_layers(model: Any, config: KTConfig) -> list[KTMoELayerWrapper]:
    """Record the packed expert layers of a model on it, under kt-kernel's names of attributes."""
    wrappers = [
        KTMoELayerWrapper(name, split_layer_name(name)[1], module) for name, module in expert_modules(model).items()
    ]
    model._kt_wrappers, model._kt_config = wrappers, config
    model._kt_tp_enabled, model._kt_use_lora_experts = config.kt_tp_enabled, False
    model._kt_train_mode, model._kt_full_weight_grad = "lora", False
    model._kt_expert_weight_format = config.kt_expert_weight_format
    assert config.kt_activation_policy is not None
    set_activation_policy(model, config.kt_activation_policy)
    return wrappers


def is_wrapped(model: nn.Module) -> bool:
    return any("_kt_wrappers" in module.__dict__ for module in model.modules())


def wrapped_model(model: nn.Module) -> Any:
    """The model inside `model` (PEFT, DDP and others may be around it) whose layers are recorded. A model that
    `ktransformers.nn.load_model` loaded is recorded here, with the defaults of KTConfig."""
    for module in model.modules():
        if "_kt_wrappers" in module.__dict__:
            return module
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and (experts := expert_modules(module)):
            if all(packed_experts(expert) is not None for expert in experts.values()):
                record_layers(module, KTConfig())
                return module
            break
    remedy = "call wrap_moe_layers_with_kt_wrapper(model, kt_config) first"
    raise KTAMXModelNotSupportedError(type(model).__name__, "a model that was not wrapped", "a wrapped one", remedy)


def get_activation_checkpoint_context_fn() -> Callable[[], Contexts]:
    """The `context_fn`: `checkpoint(block, x, use_reentrant=False, context_fn=get_activation_checkpoint_context_fn())`.
    Which layers retain their experts' outputs is set by `set_activation_policy`, which wrapping a model calls."""
    return save_expert_outputs


def set_activation_policy(model: nn.Module, policy: KTActivationPolicy) -> None:
    """Retain or recompute the outputs of all packed experts of the model in checkpointed blocks."""
    for module in expert_modules(model).values():
        if (kt := packed_experts(module)) is not None:
            recompute_experts(kt.store, policy.cpu == "recompute")
