"""Where a model family keeps its experts, under kt-kernel's names, read from the model's configuration.

Wrapping does not need this table: expert layers are found by transformers' experts interface, for every family that has
it (`ktransformers.experts.contract`), and the model's own router routes. It serves programs that call kt-kernel's
functions on the pieces of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kt_kernel.sft.errors import KTAMXModelNotSupportedError

PROJ_NAMES = ("gate_proj", "up_proj", "down_proj")
FUSED_NAMES = ("gate_up_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True)
class MOEArchConfig:
    moe_layer_attr: str
    router_attr: str
    experts_attr: str
    weight_names: tuple[str, str, str]  # gate, up, down
    expert_num: int
    intermediate_size: int
    num_experts_per_tok: int
    has_shared_experts: bool = False
    router_type: str = "linear"


@dataclass(frozen=True)
class _Family:
    """How the configuration of a family names its sizes."""

    experts: tuple[str, ...] = ("num_experts", "num_local_experts")
    names: tuple[str, str, str] = PROJ_NAMES
    block: str = "mlp"
    intermediate: str = "moe_intermediate_size"
    shared: str | None = None  # the field that is positive if there are shared experts
    router_type: str = "linear"


DEEPSEEK = _Family(("n_routed_experts", "num_local_experts"), shared="n_shared_experts", router_type="deepseek_gate")
QWEN = _Family(shared="shared_expert_intermediate_size")
# Part of the architecture's or of the model type's name, without case and underscores -> family; the first that occurs.
FAMILIES = {
    "deepseekv4": _Family(
        ("n_routed_experts", "num_local_experts"), shared="n_shared_experts", router_type="precomputed"
    ),
    "deepseekv2": DEEPSEEK,
    "deepseekv3": DEEPSEEK,
    "kimik2": DEEPSEEK,
    "glm4moe": _Family(("n_routed_experts", "num_experts"), shared="n_shared_experts", router_type="glm4_moe_gate"),
    "qwen2moe": QWEN,
    "qwen3moe": QWEN,
    "qwen35moe": _Family(names=FUSED_NAMES, shared="shared_expert_intermediate_size"),
    "qwen3vlmoe": _Family(names=FUSED_NAMES),
    "mixtral": _Family(names=("w1", "w3", "w2"), block="block_sparse_moe", intermediate="intermediate_size"),
}


def get_moe_arch_config(config: Any) -> MOEArchConfig:
    """The description of a model by its configuration; families that kt-kernel does not know are refused."""
    text = getattr(config, "text_config", None) or config
    described = [*(getattr(config, "architectures", None) or [])[:1], getattr(config, "model_type", "")]
    described.append(getattr(text, "model_type", ""))
    for name in described:
        word = str(name).lower().replace("_", "").replace("-", "")
        family = next((FAMILIES[part] for part in FAMILIES if part in word), None)
        if family is not None:
            return _describe(text, family)
    remedy = "wrap_moe_layers_with_kt_wrapper needs no table: it takes every family of transformers' experts interface"
    raise KTAMXModelNotSupportedError(
        str(described[0]), "a family that is not in the table", ", ".join(FAMILIES), remedy
    )


def _describe(text: Any, family: _Family) -> MOEArchConfig:
    experts = next((getattr(text, name) for name in family.experts if getattr(text, name, None)), 0)
    return MOEArchConfig(
        moe_layer_attr=family.block,
        router_attr="gate",
        experts_attr="experts",
        weight_names=family.names,
        expert_num=int(experts),
        intermediate_size=int(getattr(text, family.intermediate)),
        num_experts_per_tok=int(text.num_experts_per_tok),
        has_shared_experts=family.shared is not None and bool(getattr(text, family.shared, 0)),
        router_type=family.router_type,
    )


def get_moe_module(layer: nn.Module, moe_config: MOEArchConfig) -> nn.Module | None:
    """The MoE block of a decoder layer; None for a layer without experts. transformers says `mlp` where released files
    say `block_sparse_moe`."""
    for name in (moe_config.moe_layer_attr, "mlp"):
        block = getattr(layer, name, None)
        if isinstance(block, nn.Module) and isinstance(getattr(block, moe_config.experts_attr, None), nn.Module):
            return block
    return None


def detect_fused_experts(experts: nn.Module) -> bool:
    """Whether all experts are in two 3-D parameters, as everywhere in transformers 5, and not in modules of their
    own."""
    return all(
        isinstance(tensor := getattr(experts, name, None), Tensor) and tensor.dim() == 3
        for name in ("gate_up_proj", "down_proj")
    )
