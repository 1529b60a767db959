"""Where a model family keeps its experts, under kt-kernel's names, read from the model's configuration.

Wrapping does not need this table: expert layers are found by transformers' experts interface, for every family that has
it (`ktransformers.experts.contract`), and the model's own router routes. It serves programs that call kt-kernel's
functions on the pieces of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kt_kernel.sft.runtime import KTAMXModelNotSupportedError

PROJ_NAMES = ("gate_proj", "up_proj", "down_proj")
FUSED_NAMES = ("gate_up_proj", "gate_up_proj", "down_proj")
# Names of the sizes in configurations; of the experts the first that a configuration has, of I by the block.
EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
INTERMEDIATE_SIZES = {"mlp": "moe_intermediate_size", "block_sparse_moe": "intermediate_size"}
SHARED_EXPERTS = ("n_shared_experts", "shared_expert_intermediate_size")


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


# Part of the architecture's or of the model type's name, without case and underscores; the first that occurs counts ->
# router, names of the matrices, block around the experts.
FAMILIES = {
    "deepseekv4": ("precomputed", PROJ_NAMES, "mlp"),
    "deepseekv2": ("deepseek_gate", PROJ_NAMES, "mlp"),
    "deepseekv3": ("deepseek_gate", PROJ_NAMES, "mlp"),
    "kimik2": ("deepseek_gate", PROJ_NAMES, "mlp"),
    "glm4moe": ("glm4_moe_gate", PROJ_NAMES, "mlp"),
    "qwen2moe": ("linear", PROJ_NAMES, "mlp"),
    "qwen3moe": ("linear", PROJ_NAMES, "mlp"),
    "qwen35moe": ("linear", FUSED_NAMES, "mlp"),
    "qwen3vlmoe": ("linear", FUSED_NAMES, "mlp"),
    "mixtral": ("linear", ("w1", "w3", "w2"), "block_sparse_moe"),
}


def get_moe_arch_config(config: Any) -> MOEArchConfig:
    """The description of a model by its configuration; families that kt-kernel does not know are refused."""
    text = getattr(config, "text_config", None) or config
    described = [*(getattr(config, "architectures", None) or [])[:1], getattr(config, "model_type", "")]
    described.append(getattr(text, "model_type", ""))
    words = [str(name).lower().replace("_", "").replace("-", "") for name in described]
    family = next((FAMILIES[part] for word in words for part in FAMILIES if part in word), None)
    if family is None:
        remedy = "wrap_moe_layers_with_kt_wrapper takes every family of transformers' experts interface without a table"
        given = "a family that is not in the table"
        raise KTAMXModelNotSupportedError(str(described[0]), given, ", ".join(FAMILIES), remedy)

    def size(names: tuple[str, ...]) -> int:
        return int(next((value for name in names if (value := getattr(text, name, None))), 0))

    router_type, weight_names, block = family
    experts, inner, top_k = size(EXPERT_COUNTS), getattr(text, INTERMEDIATE_SIZES[block]), int(text.num_experts_per_tok)
    shared = size(SHARED_EXPERTS) > 0
    return MOEArchConfig(block, "gate", "experts", weight_names, experts, int(inner), top_k, shared, router_type)


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
