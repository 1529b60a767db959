"""Parses and builds names of LoRA tensors.

Files spell one module in several ways: with PEFT's prefix `base_model.model.`, with the adapter's name before
`.weight`, with `.orig_module` where a trainer wrapped the module, with Mixtral's `block_sparse_moe` where the model in
transformers says `mlp`. The code uses one spelling, that of the model: `model.layers.3.self_attn.q_proj`, and
`model.layers.3.mlp` for the block that contains the experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ktransformers.checkpoint.layout import MATRICES, MIXTRAL_MATRICES, PLACE, PROJECTIONS

PREFIX = "base_model.model."
FACTOR_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.(?!weight$)[\w-]+)?(?:\.weight)?")
EXPERT_MODULE = re.compile(r"(?P<root>.+)\.experts\.(?P<expert>\d+)\.(?P<matrix>" + "|".join(MATRICES) + ")")
FUSED_EXPERTS = re.compile(r"(?P<root>.+)\.experts(?P<inner>\.base_layer)?")
KT_KERNEL_KEY = re.compile(r"layers\.(?P<layer>\d+)\.experts\.(?P<role>gate|up|down)_lora_(?P<factor>[ab])")
TARGET_ORDER = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGET_ORDER += ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "embed_tokens", "lm_head"]


@dataclass(frozen=True)
class ExpertNaming:
    """Names of the MoE block and of the expert matrices in per-expert files."""

    block: str
    matrices: Mapping[str, str]  # gate, up, down -> name

    def matrix(self, role: str) -> str:
        return self.matrices[role]


PROJ_NAMING = ExpertNaming("mlp", PROJECTIONS)
W123_NAMING = ExpertNaming("block_sparse_moe", MIXTRAL_MATRICES)
# Families whose released files use W123 while the model in transformers says `mlp`.
W123_FAMILIES = {"mixtral", "minimax", "minimax_m2", "phimoe"}


def strip_prefixes(key: str) -> str:
    """The key without what PEFT, SGLang and wrapping trainers add around the model's name."""
    if key.startswith(PREFIX):
        key = key.removeprefix(PREFIX)
    elif key.startswith("base_model."):
        key = key.removeprefix("base_model.")
    return key.replace(".orig_module", "")


def parse_factor(key: str) -> tuple[str, str] | None:
    """(module, "A" or "B") of a LoRA key, None for anything else."""
    match = FACTOR_KEY.fullmatch(strip_prefixes(key))
    return (match["module"], match["factor"]) if match else None


def name_in_model(name: str, naming: ExpertNaming = W123_NAMING) -> str:
    """The model's spelling of a module whose files spell the MoE block differently."""
    if naming.block == "mlp":
        return name
    return name.replace(f".{W123_NAMING.block}.", ".mlp.").removesuffix(f".{W123_NAMING.block}") + (
        ".mlp" if name.endswith(f".{W123_NAMING.block}") else ""
    )


def name_in_checkpoint(name: str, naming: ExpertNaming) -> str:
    """The checkpoint's spelling. Only the MoE block is renamed: a dense `mlp` has no experts and no router."""
    if naming.block == "mlp":
        return name
    return re.sub(r"\.mlp(?=$|\.gate\b|\.experts\b)", f".{naming.block}", name)


def layers_prefix(name: str) -> str | None:
    """What precedes the layer number, wrappers included: "model.language_model.layers"."""
    match = PLACE.fullmatch(name)
    return None if not match else f"{match['outer']}.layers" if match["outer"] else "layers"


def merge_names(spelled: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Tensors of several pairs -> their names in the model."""
    return {theirs: ours for names in spelled for theirs, ours in names.items()}


def order_targets(leaves: set[str]) -> list[str]:
    """target_modules in the order that kt-kernel's converter writes."""
    return [name for name in TARGET_ORDER if name in leaves] + sorted(leaves - set(TARGET_ORDER))
