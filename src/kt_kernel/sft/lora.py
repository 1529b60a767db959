"""LoRA on the experts of a wrapped model: created here or by PEFT, and handed to the optimiser.

If PEFT targets the experts (`gate_proj`, `up_proj`, `down_proj`, or `target_parameters`), their LoRA is PEFT's: in the
module tree, saved by PEFT, reduced by DDP. Otherwise `kt_adapt_peft_lora` creates what kt-kernel has for fused experts:
six bf16 parameters for each layer, A `[E, r, in]` and B `[E, out, r]` of gate, up and down, outside of the module tree,
under the names `kt.layers.{L}.experts.fused_lora.{gate_lora_a, ...}`. Rank and alpha are `kt_lora_rank` and
`kt_lora_alpha`, else PEFT's r and lora_alpha: an adapter directory has one of each for everything.

Gradients are autograd's in both cases: `parameter.grad` accumulates until it is cleared, and no call copies anything
between a parameter and the kernels. Every process computes its own experts; DistributedDataParallel around the model
averages the gradients of both kinds (`ktransformers.parallel.distributed`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version

from kt_kernel.sft.layer import is_wrapped, wrapped_model
from kt_kernel.sft.runtime import KTAMXConfigError, KTAMXModelNotSupportedError
from ktransformers.experts.contract import expert_modules
from ktransformers.experts.interface import experts_of
from ktransformers.experts.lora import CORE_ROLES, ExpertLora
from ktransformers.experts.peft_lora import expert_adapters, lora_parameters, set_lora_dropout
from ktransformers.experts.placeholder import Placeholder
from ktransformers.parallel.distributed import average_expert_gradients, broadcast_own_lora

TARGET_EXPERTS = "name the experts in PEFT's target_modules (gate_proj, up_proj, down_proj)"


@dataclass(frozen=True)
class KTAdaptationResult:
    """What `kt_adapt_peft_lora` did, and the parameters of the expert LoRA that the optimiser must own."""

    adapted_layers: int = 0
    already_adapted_layers: int = 0
    named_optimizer_parameters: tuple[tuple[str, nn.Parameter], ...] = ()
    placeholders: Mapping[str, nn.Parameter] = field(default_factory=dict)

    @property
    def placeholder_names(self) -> tuple[str, ...]:
        return tuple(self.placeholders)


def kt_adapt_peft_lora(model: nn.Module) -> KTAdaptationResult:
    """Give the experts their LoRA, unless they have it or the backend is one of `*_SkipLoRA`. Call it after
    `get_peft_model` and before the optimiser is made; a second call changes nothing."""
    inner = wrapped_model(model)
    config, layers = inner._kt_config, inner._kt_wrappers
    placeholders = get_kt_expert_placeholders(model)
    if not config.trains_experts:
        return KTAdaptationResult(placeholders=placeholders)
    if adapters := expert_adapters(model):
        if config.kt_force_fused_expert_lora:
            given = f"true, where PEFT adapts {next(iter(adapters))}"
            remedy = "pass exclude_modules=get_kt_fused_lora_exclude_modules(kt_config, model) to LoraConfig"
            raise KTAMXConfigError("kt_force_fused_expert_lora", given, "experts that PEFT leaves out", remedy)
        if config.kt_lora_dropout:
            set_lora_dropout(model, config.kt_lora_dropout)
        owners = {id(adapter.get_base_layer()) for adapter in adapters.values()}
        adapted = sum(id(layer.experts) in owners for layer in layers)
        return KTAdaptationResult(0, adapted, tuple(get_kt_lora_named_params(model)), placeholders)
    missing = [layer for layer in layers if not layer.fused_expert_lora_params]
    if missing:
        rank, alpha = lora_size(model)
        create_fused_lora(model, rank, alpha)
    named = tuple(get_kt_lora_named_params(model))
    return KTAdaptationResult(len(missing), len(layers) - len(missing), named, placeholders)


adapt_peft_lora = kt_adapt_peft_lora


def lora_size(model: nn.Module) -> tuple[int, float]:
    """Rank and alpha of the expert LoRA: those of KTConfig, else of PEFT's active adapter."""
    config, peft = wrapped_model(model)._kt_config, _peft_config(model)
    rank, alpha = config.kt_lora_rank, config.kt_lora_alpha if "kt_lora_alpha" in config.given else None
    if peft is None:
        if rank is None:
            remedy = "set it, wrap the model with get_peft_model first, or use a backend that ends in _SkipLoRA"
            raise KTAMXConfigError("kt_lora_rank", None, "the rank of the expert LoRA", remedy)
        return rank, float(config.kt_lora_alpha)
    if getattr(peft, "use_rslora", False):
        given = "use_rslora with expert LoRA in kt-kernel's form, whose scaling is alpha / rank"
        raise KTAMXConfigError("LoraConfig", given, "use_rslora=False", TARGET_EXPERTS)
    for name, own, other in (("kt_lora_rank", rank, peft.r), ("kt_lora_alpha", alpha, peft.lora_alpha)):
        if own is not None and own != other:
            given = f"{own:g}, where PEFT's adapter has {other:g}"
            raise KTAMXConfigError(name, given, "one value: adapter_config.json holds it for both", TARGET_EXPERTS)
    return int(peft.r), float(peft.lora_alpha)


def _peft_config(model: nn.Module) -> Any | None:
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping):
        return None
    active = getattr(model, "active_adapter", None)
    return configs.get(active if isinstance(active, str) else None) or next(iter(configs.values()), None)


def create_fused_lora(model: nn.Module, rank: int, alpha: float) -> None:
    """Six parameters for every layer that has none: A uniform as `nn.Linear` is initialised, B zero."""
    inner = wrapped_model(model)
    for layer in inner._kt_wrappers:
        if layer.fused_expert_lora_params:
            continue
        shape = layer.contract.shape
        if not shape.gated:
            given = "experts without a gate"
            raise KTAMXModelNotSupportedError(layer.name, given, "gate, up and down", TARGET_EXPERTS)
        parameters = layer.fused_expert_lora_params
        for role, (rows, columns) in shape.matrices().items():
            a = torch.empty(shape.num_experts, rank, columns, dtype=torch.bfloat16)
            nn.init.kaiming_uniform_(a.view(-1, columns), a=math.sqrt(5))
            b = torch.zeros(shape.num_experts, rows, rank, dtype=torch.bfloat16)
            parameters |= {f"{role}_lora_a": nn.Parameter(a), f"{role}_lora_b": nn.Parameter(b)}
        lora = ExpertLora.of_tensors(CORE_ROLES, list(parameters.values()), (alpha / rank,) * 3)
        experts_of(layer.experts).lora = replace(lora, dropout=inner._kt_config.kt_lora_dropout)
    if _processes() > 1:
        broadcast_own_lora(inner)


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def get_kt_lora_named_params(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of the trained expert LoRA: PEFT's under their names in the model, others as
    `kt.layers.{L}.experts.fused_lora.{gate_lora_a, ...}`."""
    named = [(name, parameter) for name, parameter in lora_parameters(model).items() if parameter.requires_grad]
    for layer in wrapped_model(model)._kt_wrappers if is_wrapped(model) else ():
        prefix = f"kt.layers.{layer.layer_idx}.experts.fused_lora"
        named += [(f"{prefix}.{name}", parameter) for name, parameter in layer.fused_expert_lora_params.items()]
    return named


def get_kt_lora_params(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the expert LoRA, which the optimiser must own together with those of the model."""
    return [parameter for _, parameter in get_kt_lora_named_params(model)]


# Nothing else of the experts is trained.
get_kt_named_trainable_params, get_kt_trainable_params = get_kt_lora_named_params, get_kt_lora_params


def get_kt_rank_local_parameter_names(model: nn.Module) -> tuple[str, ...]:
    """Parameters in the module tree that FSDP must not shard: expert LoRA of PEFT, in host memory, and placeholders."""
    return (*lora_parameters(model), *get_kt_expert_placeholders(model))


def get_kt_expert_placeholders(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> the parameters without storage that stand in the model for packed experts."""
    return {name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, Placeholder)}


def update_kt_lora_pointers(model: nn.Module) -> None:
    """After an optimiser step. Steps of torch's optimisers are noticed without it; this also covers one that writes
    through `.data`."""
    increment_version([parameter for parameter in get_kt_lora_params(model) if not parameter.is_inference()])


def sync_kt_lora_gradients(model: nn.Module) -> None:
    """Check the gradients of the expert LoRA before an optimiser step, and average them over the processes: what DDP
    averaged stays as it is, and a program without DDP needs no other call. With several processes a collective call."""
    if _processes() > 1:
        average_expert_gradients(wrapped_model(model))
    for name, parameter in get_kt_lora_named_params(model):
        grad = parameter.grad
        if grad is not None and (grad.shape != parameter.shape or grad.device != parameter.device):
            given = f"a gradient {list(grad.shape)} on {grad.device}"
            raise KTAMXConfigError(name, given, f"{list(parameter.shape)} on {parameter.device}")


def get_kt_fused_lora_exclude_modules(kt_config: Any, model: nn.Module) -> str | None:
    """The regular expression for PEFT's `exclude_modules` that keeps it off the experts; None unless
    `kt_force_fused_expert_lora` is set."""
    from kt_kernel.sft.config import KTConfig

    if not KTConfig.from_object(kt_config).kt_force_fused_expert_lora or not expert_modules(model):
        return None
    return r".*\.experts(\..*)?"
