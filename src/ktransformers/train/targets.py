"""Resolves `lora_target` for a model: linear modules by name, and the parameters of the routed experts.

`all` means attention, linear attention and the routed experts, where most of a Mixture-of-Experts model's capacity is;
the router, shared experts, dense MLPs and the vision tower are trained only if named. A name is the last part of a
module's path (`q_proj`), a longer suffix (`shared_experts.up_proj`), or a module that contains linear ones
(`shared_experts`, `self_attn`); `experts` and the names of expert matrices mean the routed experts. The model may be on
the meta device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from ktransformers.experts.contract import expert_modules
from ktransformers.ground.errors import InputError
from ktransformers.train.settings import LoraSettings

ATTENTION_BLOCKS = {
    "self_attn",
    "attn",
    "attention",
    "self_attention",
    "linear_attn",
    "mamba",
    "conv",
    "mixer",
    "temporal_block",
}
VISION_BLOCKS = {"visual", "vision_tower", "vision_model", "multi_modal_projector", "audio_tower"}
EXPERT_GROUP_NAMES = {"experts"}  # in addition to the matrix names
# Names of the two halves of gate_up_proj in checkpoints and older files.
GATE_UP_HALVES = {"gate_proj", "up_proj"}
# Suffixes that PEFT maps to the matrices of the routed experts although linear modules use them too.
PEFT_EXPERT_NAMES = {"gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"}


@dataclass(frozen=True)
class Targets:
    modules: tuple[str, ...]  # full names
    parameters: tuple[str, ...]  # full names of expert matrices, and of named routers

    def module_names(self, model: nn.Module) -> list[str]:
        """Suffixes if they match exactly the selected modules, else full names."""
        selected = {name for name in self.modules if name.rpartition(".")[2] not in PEFT_EXPERT_NAMES}
        suffixes = sorted({name.rpartition(".")[2] for name in selected})
        # Of any kind: a vision tower may have the names of the text model, on modules that PEFT cannot adapt.
        matched = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in suffixes}
        return suffixes if matched == selected else sorted(selected)

    def parameter_names(self, model: nn.Module) -> list[str]:
        """`mlp.experts.gate_up_proj`, once for all layers; a module whose name PEFT maps to experts is named by its
        weight."""
        weights = {f"{name}.weight" for name in self.modules if name.rpartition(".")[2] in PEFT_EXPERT_NAMES}
        selected = {*self.parameters, *weights}
        suffixes = sorted({".".join(name.split(".")[-3:]) for name in selected})
        matched = {
            name for name, _ in model.named_parameters() if name.endswith(tuple(f".{suffix}" for suffix in suffixes))
        }
        return suffixes if matched == selected else sorted(selected)


def linear_modules(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def router_weights(model: nn.Module, name_suffix: str) -> dict[str, tuple[int, ...]]:
    """Full name -> shape of weights [experts, hidden] in non-linear modules of this name: the routers."""
    return {
        f"{name}.weight": tuple(module.weight.shape)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == name_suffix and not isinstance(module, nn.Linear) and _has_matrix(module)
    }


def _has_matrix(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    return "weight" in parameters and parameters["weight"].dim() == 2


def expert_matrices(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Full name -> shape of every matrix of routed experts."""
    return {
        f"{name}.{parameter}": tuple(tensor.shape)
        for name, module in expert_modules(model).items()
        for parameter, tensor in module.named_parameters(recurse=False)
        if tensor.dim() == 3
    }


def _all_modules(model: nn.Module) -> list[str]:
    moe_blocks = {name.rpartition(".")[0] for name in expert_modules(model)}  # modules that contain experts
    names = []
    for name, _ in linear_modules(model):
        parts = set(name.split("."))
        # Experts may lie directly in the layer, next to its attention: then the layer is no MoE block.
        inside = any(
            name.startswith(f"{block}.") and not set(name.removeprefix(f"{block}.").split(".")) & ATTENTION_BLOCKS
            for block in moe_blocks
        )
        if parts & ATTENTION_BLOCKS and not parts & VISION_BLOCKS and not inside:
            names.append(name)
    return names


def _modules_named(model: nn.Module, target: str) -> list[str]:
    """Linear modules whose path ends with the target or contains it."""
    return [
        name
        for name, _ in linear_modules(model)
        if f".{name}.".find(f".{target}.") >= 0 and not set(name.split(".")) & VISION_BLOCKS
    ]


def find_targets(model: nn.Module, settings: LoraSettings) -> Targets:
    experts = expert_matrices(model)
    matrix_names = {name.rpartition(".")[2] for name in experts}
    modules: dict[str, None] = {}
    parameters: dict[str, None] = {}
    for target in settings.lora_target:
        if target == "all":
            modules |= dict.fromkeys(_all_modules(model))
            parameters |= dict.fromkeys(experts)
            continue
        linear_matches = [] if target in ("lm_head", "embed_tokens") else _modules_named(model, target)
        if (
            target in matrix_names
            or target in EXPERT_GROUP_NAMES
            or (target in GATE_UP_HALVES and "gate_up_proj" in matrix_names)
        ):
            selected = (
                {"gate_up_proj"}
                if target in GATE_UP_HALVES
                else matrix_names
                if target in EXPERT_GROUP_NAMES
                else {target}
            )
            parameters |= dict.fromkeys(name for name in experts if name.rpartition(".")[2] in selected)
        elif router_weights(model, target):
            parameters |= dict.fromkeys(router_weights(model, target))
        elif not linear_matches:
            available = sorted({name.rpartition(".")[2] for name, _ in linear_modules(model)} | matrix_names)
            raise InputError("lora_target", target, "`all`, `experts`, or one of " + ", ".join(available))
        modules |= dict.fromkeys(linear_matches)
    if not modules and not parameters:
        raise InputError("lora_target", ", ".join(settings.lora_target), "something to train")
    return Targets(tuple(modules), tuple(parameters))


def count_trained_parameters(model: nn.Module, targets: Targets, rank: int) -> int:
    """Number of parameters of the adapter."""
    shapes = dict(linear_modules(model))
    count = sum(rank * (shapes[name].in_features + shapes[name].out_features) for name in targets.modules)
    for name in targets.parameters:
        *experts, rows, columns = model.get_parameter(name).shape
        count += math.prod(experts) * rank * (rows + columns)
    return count
