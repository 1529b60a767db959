"""Expert tensors of a checkpoint, recognised by their names alone.

Two layouts exist: one tensor for each matrix of each expert (`...mlp.experts.7.gate_proj.weight`, in Mixtral's words
`...block_sparse_moe.experts.7.w1.weight`), and fused ones that hold all experts of a layer
(`...mlp.experts.gate_up_proj`, `[E, 2I, H]`). A model's `model.layers.3.mlp.experts` may be
`model.language_model.layers.3.block_sparse_moe.experts` in the file, so layers are matched by their number and by the
prefix of `layers` without the usual wrappers; `mtp.layers.0` therefore is not `model.layers.0`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ktransformers.ground.errors import InputError

# Roles -> names in checkpoints, and the reverse.
PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL_MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}
MATRICES = {name: role for names in (PROJECTIONS, MIXTRAL_MATRICES) for role, name in names.items()}
SINGLE = re.compile(r"(?P<root>.+)\.experts\.(?P<expert>\d+)\.(?P<matrix>" + "|".join(MATRICES) + r")\.(?P<kind>\w+)")
FUSED = {
    ".experts.gate_up_proj": "gate_up",
    ".experts.up_proj": "up",
    ".experts.down_proj": "down",
    ".experts.gate_up_proj_bias": "gate_up_bias",
    ".experts.up_proj_bias": "up_bias",
    ".experts.down_proj_bias": "down_bias",
    ".experts.gate_up_proj_blocks": "gate_up_blocks",  # gpt-oss: 32 values of e2m1 in 16 bytes
    ".experts.gate_up_proj_scales": "gate_up_scales",
    ".experts.down_proj_blocks": "down_blocks",
    ".experts.down_proj_scales": "down_scales",
    ".experts.gate_up_proj_scale_inv": "gate_up_scale_inv",  # fp8 as transformers saves it
    ".experts.down_proj_scale_inv": "down_scale_inv",
    ".experts.gate_up_proj_scale": "gate_up_scale",
    ".experts.down_proj_scale": "down_scale",
    ".block_sparse_moe.input_linear.weight": "gate_up",  # granitemoe
    ".block_sparse_moe.output_linear.weight": "down",
    ".experts.fc1.weight": "gate_up",  # aria
    ".experts.fc2.weight": "down",
}
WRAPPERS = {"model", "language_model", "backbone"}
PLACE = re.compile(r"(?:(?P<outer>.*)\.)?layers\.(?P<layer>\d+)(?:\.(?P<block>.*))?")


@dataclass(frozen=True)
class ExpertTensors:
    """Names of one layer's expert tensors by role: gate, up, down or gate_up, each alone for the weight itself and with
    an ending for the tensors that belong to it (`gate_bias`, `up_weight_scale_inv`, `down_qweight`,
    `gate_up_blocks`)."""

    root: str  # prefix of "experts"
    fused: Mapping[str, str]  # role -> name
    single: Mapping[int, Mapping[str, str]]  # expert -> role -> name


def find_experts(names: Iterable[str]) -> list[ExpertTensors]:
    """Every layer of experts among these tensors, the model's own and others (MTP layers) alike."""
    fused: dict[str, dict[str, str]] = {}
    single: dict[str, dict[int, dict[str, str]]] = {}
    for name in names:
        if match := SINGLE.fullmatch(name):
            kind = match["kind"]
            role = MATRICES[match["matrix"]] + ("" if kind == "weight" else f"_{kind}")
            single.setdefault(match["root"], {}).setdefault(int(match["expert"]), {})[role] = name
            continue
        for suffix, role in FUSED.items():
            if name.endswith(suffix):
                fused.setdefault(name.removesuffix(suffix), {})[role] = name
    return [ExpertTensors(root, fused.get(root, {}), single.get(root, {})) for root in {**fused, **single}]


def parts(roles: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Matrix -> ending -> name, with "weight" for the ending of the weight itself."""
    names: dict[str, dict[str, str]] = {}
    for role, name in roles.items():
        matrix = "gate_up" if role.startswith("gate_up") else role.partition("_")[0]
        ending = role.removeprefix(matrix).removeprefix("_") or "weight"
        names.setdefault(matrix, {})[ending] = name
    return names


def split_layer_name(name: str) -> tuple[str, int, str]:
    """(prefix before the layers without the usual wrappers, layer number or -1, path within the layer)."""
    match = PLACE.fullmatch(name)
    if not match:
        return "", -1, ".".join(part for part in name.split(".") if part not in WRAPPERS)
    outer = [part for part in (match["outer"] or "").split(".") if part and part not in WRAPPERS]
    return ".".join(outer), int(match["layer"]), match["block"] or ""


def locate(layers: Iterable[ExpertTensors], module: str) -> ExpertTensors:
    """The tensors that belong to the model's module `module`, e.g. "model.layers.3.mlp.experts"."""
    place = split_layer_name(module.removesuffix(".experts"))
    alike = 2 if place[1] >= 0 else 3  # the block may have another name
    candidates = [tensors for tensors in layers if split_layer_name(tensors.root)[:alike] == place[:alike]]
    if len(candidates) > 1:
        candidates = [tensors for tensors in candidates if split_layer_name(tensors.root) == place]
    if len(candidates) != 1:
        count = f"{len(candidates)} candidates" if candidates else "no expert tensors"
        raise InputError(
            module,
            f"{count} in the checkpoint",
            f"{module}.0.gate_proj.weight and so on, or {module}.gate_up_proj",
            "the checkpoint is not of this model, or its layout is not known",
        )
    return candidates[0]
