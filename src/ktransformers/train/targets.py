"""What `lora_target` means for a given model: linear modules by name, and the routed experts' parameters.

`all` is attention, linear attention and the routed experts, because that is where a Mixture-of-Experts model learns;
the router, shared experts, dense MLPs and the vision tower are trained only if they are named. A name is the last part
of a module's path (`q_proj`), a longer end of it (`shared_experts.up_proj`), or a module that contains linear ones
(`shared_experts`, `self_attn`); `experts` and the names of the experts' matrices mean the routed experts. The model may
be a skeleton on the meta device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from ktransformers.errors import InputError
from ktransformers.nn.contract import expert_modules
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
EXPERT_GROUP_NAMES = {"experts"}  # besides the matrices' own names
# Checkpoints and older files call the halves of gate_up_proj by these names; here they are one matrix.
GATE_UP_HALVES = {"gate_proj", "up_proj"}
# Ends of module names that PEFT rewrites to the routed experts' matrices, although a linear module has them, too.
PEFT_EXPERT_NAMES = {"gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"}


@dataclass(frozen=True)
class Targets:
    modules: tuple[str, ...]  # full names
    parameters: tuple[str, ...]  # full names of the experts' matrices, and of routers that were named

    def module_names(self, model: nn.Module) -> list[str]:
        """As short as they can be said: ends of names where these mean the same modules, full names otherwise."""
        wanted = {name for name in self.modules if name.rpartition(".")[2] not in PEFT_EXPERT_NAMES}
        ends = sorted({name.rpartition(".")[2] for name in wanted})
        meant = {name for name, _ in linear_modules(model) if name.rpartition(".")[2] in ends}
        return ends if meant == wanted else sorted(wanted)

    def parameter_names(self, model: nn.Module) -> list[str]:
        """`mlp.experts.gate_up_proj`, once for all layers; a module whose name PEFT takes is named by its weight."""
        weights = {f"{name}.weight" for name in self.modules if name.rpartition(".")[2] in PEFT_EXPERT_NAMES}
        wanted = {*self.parameters, *weights}
        ends = sorted({".".join(name.split(".")[-3:]) for name in wanted})
        meant = {name for name, _ in model.named_parameters() if name.endswith(tuple(f".{end}" for end in ends))}
        return ends if meant == wanted else sorted(wanted)


def linear_modules(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def router_weights(model: nn.Module, word: str) -> dict[str, tuple[int, ...]]:
    """Full name -> shape of weights [experts, hidden] in modules of this name that are no linear ones: the routers."""
    return {
        f"{name}.weight": tuple(module.weight.shape)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == word and not isinstance(module, nn.Linear) and _has_matrix(module)
    }


def _has_matrix(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return "weight" in own and own["weight"].dim() == 2


def expert_matrices(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Full name -> shape of every matrix of routed experts."""
    return {
        f"{name}.{parameter}": tuple(tensor.shape)
        for name, module in expert_modules(model).items()
        for parameter, tensor in module.named_parameters(recurse=False)
        if tensor.dim() == 3
    }


def _all_modules(model: nn.Module) -> list[str]:
    homes = {name.rpartition(".")[0] for name in expert_modules(model)}  # blocks that hold experts
    found = []
    for name, _ in linear_modules(model):
        parts = set(name.split("."))
        inside = any(name.startswith(f"{home}.") for home in homes if home.rpartition(".")[2] not in ("", "layers"))
        if parts & ATTENTION_BLOCKS and not parts & VISION_BLOCKS and not inside:
            found.append(name)
    return found


def _modules_named(model: nn.Module, word: str) -> list[str]:
    """Linear modules that end with the word, or lie in a module that does."""
    return [
        name
        for name, _ in linear_modules(model)
        if f".{name}.".find(f".{word}.") >= 0 and not set(name.split(".")) & VISION_BLOCKS
    ]


def find_targets(model: nn.Module, settings: LoraSettings) -> Targets:
    experts = expert_matrices(model)
    ends = {name.rpartition(".")[2] for name in experts}
    modules: dict[str, None] = {}
    parameters: dict[str, None] = {}
    for word in settings.lora_target:
        if word == "all":
            modules |= dict.fromkeys(_all_modules(model))
            parameters |= dict.fromkeys(experts)
            continue
        named = [] if word in ("lm_head", "embed_tokens") else _modules_named(model, word)
        if word in ends or word in EXPERT_GROUP_NAMES or (word in GATE_UP_HALVES and "gate_up_proj" in ends):
            wanted = {"gate_up_proj"} if word in GATE_UP_HALVES else ends if word in EXPERT_GROUP_NAMES else {word}
            parameters |= dict.fromkeys(name for name in experts if name.rpartition(".")[2] in wanted)
        elif router_weights(model, word):
            parameters |= dict.fromkeys(router_weights(model, word))
        elif not named:
            known = sorted({name.rpartition(".")[2] for name, _ in linear_modules(model)} | ends)
            raise InputError("lora_target", word, "`all`, `experts`, or one of " + ", ".join(known))
        modules |= dict.fromkeys(named)
    if not modules and not parameters:
        raise InputError("lora_target", ", ".join(settings.lora_target), "something to train")
    return Targets(tuple(modules), tuple(parameters))


def count_trained_parameters(model: nn.Module, targets: Targets, rank: int) -> int:
    """How many numbers the adapter has."""
    shapes = dict(linear_modules(model))
    count = sum(rank * (shapes[name].in_features + shapes[name].out_features) for name in targets.modules)
    for name in targets.parameters:
        *experts, rows, columns = model.get_parameter(name).shape
        count += math.prod(experts) * rank * (rows + columns)
    return count
