"""Names of expert tensors: which are found, and to which module they belong."""

from __future__ import annotations

import pytest

from ktransformers.checkpoint import find_experts, locate
from ktransformers.ground.errors import InputError


def single(root: str, matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"), experts: int = 2) -> list[str]:
    return [f"{root}.experts.{e}.{matrix}.weight" for e in range(experts) for matrix in matrices]


@pytest.mark.parametrize(
    "root",
    [
        "model.layers.3.mlp",
        "model.language_model.layers.3.mlp",
        "language_model.model.layers.3.mlp",
        "layers.3.ffn",
        "backbone.layers.3.mixer",
        "model.layers.3",
    ],
)
def test_prefixes(root: str) -> None:
    layers = find_experts([*single(root), "model.layers.3.mlp.gate.weight", "lm_head.weight"])
    assert [layer.root for layer in layers] == [root]
    found = locate(layers, "model.layers.3.mlp.experts")
    assert found.single[1] == {
        "gate": f"{root}.experts.1.gate_proj.weight",
        "up": f"{root}.experts.1.up_proj.weight",
        "down": f"{root}.experts.1.down_proj.weight",
    }
    assert not found.fused


def test_mixtral_words() -> None:
    root = "model.layers.0.block_sparse_moe"
    found = locate(find_experts(single(root, ("w1", "w2", "w3"))), "model.layers.0.mlp.experts")
    assert found.single[0] == {
        "gate": f"{root}.experts.0.w1.weight",
        "down": f"{root}.experts.0.w2.weight",
        "up": f"{root}.experts.0.w3.weight",
    }


def test_fused_and_biases() -> None:
    root = "model.layers.0.mlp"
    leaves = {"gate_up": "gate_up_proj", "down": "down_proj", "gate_up_bias": "gate_up_proj_bias"}
    found = locate(find_experts(f"{root}.experts.{leaf}" for leaf in leaves.values()), f"{root}.experts")
    assert found.fused == {role: f"{root}.experts.{leaf}" for role, leaf in leaves.items()}
    assert not found.single
    granite = "model.layers.0.block_sparse_moe"
    names = [f"{granite}.input_linear.weight", f"{granite}.output_linear.weight"]
    shared = [name.replace("block_sparse_moe", "shared_mlp") for name in names]
    found = locate(find_experts(names + shared), "model.layers.0.block_sparse_moe.experts")
    assert list(found.fused.values()) == names


def test_other_stacks_are_not_the_model() -> None:
    layers = find_experts([*single("mtp.layers.0.mlp"), *single("model.layers.0.mlp"), *single("model.layers.61.mlp")])
    assert locate(layers, "model.layers.0.mlp.experts").root == "model.layers.0.mlp"
    only_mtp = find_experts(single("mtp.layers.0.mlp"))
    with pytest.raises(InputError, match=r"model\.layers\.0\.mlp\.experts: given no expert tensors"):
        locate(only_mtp, "model.layers.0.mlp.experts")


def test_two_blocks_in_one_layer() -> None:
    layers = find_experts([*single("model.layers.0.text_moe"), *single("model.layers.0.vision_moe")])
    assert locate(layers, "model.layers.0.vision_moe.experts").root == "model.layers.0.vision_moe"
    with pytest.raises(InputError, match="no expert tensors"):
        locate(layers, "model.layers.0.mlp.experts")


def test_shared_experts_are_not_routed() -> None:
    assert not find_experts(
        ["model.layers.0.mlp.shared_experts.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"]
    )
