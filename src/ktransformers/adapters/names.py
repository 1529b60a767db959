"""Names of LoRA tensors: taken apart, and put together.

Files write one module in many ways: with PEFT's prefix `base_model.model.`, with the adapter's name before `.weight`,
with `.orig_module` where a trainer had wrapped it, with Mixtral's `block_sparse_moe` where the model itself says `mlp`.
Inside there is one name, the model's own: `model.layers.3.self_attn.q_proj`, and `model.layers.3.mlp` for the block
whose experts are meant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ktransformers.checkpoint.layout import MATRICES, PLACE, WRAPPERS

PREFIX = "base_model.model."
FACTOR_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.(?!weight$)[\w-]+)?(?:\.weight)?")
EXPERT_MODULE = re.compile(r"(?P<root>.+)\.experts\.(?P<expert>\d+)\.(?P<matrix>" + "|".join(MATRICES) + ")")
FUSED_EXPERTS = re.compile(r"(?P<root>.+)\.experts(?P<inner>\.base_layer)?")
KT_KERNEL_KEY = re.compile(r"layers\.(?P<layer>\d+)\.experts\.(?P<role>gate|up|down)_lora_(?P<factor>[ab])")
TARGET_ORDER = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGET_ORDER += ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "embed_tokens", "lm_head"]


@dataclass(frozen=True)
class ExpertNaming:
    """How per-expert files call the block of the experts and their matrices."""

    block: str
    gate: str
    up: str
    down: str

    def matrix(self, role: str) -> str:
        return {"gate": self.gate, "up": self.up, "down": self.down}[role]


PROJ_NAMING = ExpertNaming("mlp", "gate_proj", "up_proj", "down_proj")
W123_NAMING = ExpertNaming("block_sparse_moe", "w1", "w3", "w2")
# Families whose released files use W123 while the model in transformers says `mlp`.
W123_FAMILIES = {"mixtral", "minimax", "minimax_m2", "phimoe"}


def strip_prefixes(key: str) -> str:
    """A key without what PEFT, SGLang and wrapping trainers put around the model's own name."""
    if key.startswith(PREFIX):
        key = key.removeprefix(PREFIX)
    elif key.startswith("base_model."):
        key = key.removeprefix("base_model.")
    return key.replace(".orig_module", "")


def parse_factor(key: str) -> tuple[str, str] | None:
    """(module, "A" or "B") of a LoRA key, None for anything else."""
    found = FACTOR_KEY.fullmatch(strip_prefixes(key))
    return (found["module"], found["parse_factor"]) if found else None


def name_in_model(name: str, words: ExpertNaming = W123_NAMING) -> str:
    """The model's own spelling of a module, where its files are known to spell the block of experts differently."""
    if words.block == "mlp":
        return name
    return name.replace(f".{W123_NAMING.block}.", ".mlp.").removesuffix(f".{W123_NAMING.block}") + (
        ".mlp" if name.endswith(f".{W123_NAMING.block}") else ""
    )


def name_in_checkpoint(name: str, words: ExpertNaming) -> str:
    """And back: only the block of the experts is renamed, a dense `mlp` has no experts or router in it."""
    if words.block == "mlp":
        return name
    return re.sub(r"\.mlp(?=$|\.gate\b|\.experts\b)", f".{words.block}", name)


def split_layer_name(name: str) -> tuple[str, int, str]:
    """(what stands before the layers apart from the usual wrappers, layer or -1, path within the layer)."""
    found = PLACE.fullmatch(name)
    if not found:
        words = [word for word in name.split(".") if word not in WRAPPERS]
        return "", -1, ".".join(words)
    outer = [word for word in (found["outer"] or "").split(".") if word and word not in WRAPPERS]
    return ".".join(outer), int(found["layer"]), found["block"] or ""


def layers_prefix(name: str) -> str | None:
    """What stands before the layers' number, wrappers included: "model.language_model.layers"."""
    found = PLACE.fullmatch(name)
    return None if not found else f"{found['outer']}.layers" if found["outer"] else "layers"


def order_targets(leaves: set[str]) -> list[str]:
    """target_modules in the order that kt-kernel's converter writes."""
    return [name for name in TARGET_ORDER if name in leaves] + sorted(leaves - set(TARGET_ORDER))
