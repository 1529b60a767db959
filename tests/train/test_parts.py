"""The pieces that compute: targets, preference losses, cutting a step by tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ktransformers.ground.errors import InputError
from ktransformers.train.batches import pair_weights, split_by_budget, split_pairs
from ktransformers.train.preference import AnswerLogprobs, pair_losses
from ktransformers.train.settings import LoraSettings, PreferenceSettings
from ktransformers.train.targets import count_trained_parameters, find_targets
from tests.support.tiny_models import COMMON, FAMILIES


def skeleton(family: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(COMMON | FAMILIES[family])))


ATTENTION = {
    "qwen3_moe": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "deepseek_v3": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    "qwen3_next": {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"},
    "qwen2_moe": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "gpt_oss": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mixtral": {"q_proj", "k_proj", "v_proj", "o_proj"},
}


@pytest.mark.parametrize("family", ATTENTION)
def test_target_all_means_attention_and_experts(family: str) -> None:
    model = skeleton(family)
    found = find_targets(model, LoraSettings())
    assert {name.rpartition(".")[2] for name in found.modules} == ATTENTION[family]
    assert set(found.module_names(model)) == ATTENTION[family], "short names suffice"
    assert {name.rpartition(".")[2] for name in found.parameters} == {"gate_up_proj", "down_proj"}
    for name in found.parameter_names(model):
        assert any(full.endswith(f".{name}") for full, _ in model.named_parameters())
    expected = sum(8 * (m.in_features + m.out_features) for n, m in model.named_modules() if n in set(found.modules))
    for name in found.parameters:
        shape = model.get_parameter(name).shape
        expected += shape[0] * 8 * (shape[1] + shape[2])
    assert count_trained_parameters(model, found, 8) == expected


def test_named_targets_are_resolved() -> None:
    model = skeleton("deepseek_v3")

    def ends(*words: str) -> tuple[set[str], set[str]]:
        found = find_targets(model, LoraSettings(lora_target=words))
        return set(found.modules), {name.rpartition(".")[2] for name in found.parameters}

    shared = {f"model.layers.1.mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    assert ends("shared_experts") == (shared, set())
    assert ends("experts") == (set(), {"gate_up_proj", "down_proj"})
    assert ends("shared_experts.up_proj")[0] == {"model.layers.1.mlp.shared_experts.up_proj"}
    modules, parameters = ends("gate_proj", "up_proj")
    assert shared - {"model.layers.1.mlp.shared_experts.down_proj"} <= modules and parameters == {"gate_up_proj"}
    dense = find_targets(model, LoraSettings(lora_target=("gate_proj",)))
    assert dense.module_names(model) == [], "PEFT would take the name for the experts"
    expected = ["mlp.experts.gate_up_proj", "mlp.gate_proj.weight", "mlp.shared_experts.gate_proj.weight"]
    assert [name for name in dense.parameter_names(model) if "shared" not in name] == [expected[0], expected[1]]
    assert ends("gate") == (set(), {"weight"}), "the router"
    with pytest.raises(InputError, match="kv_b_proj"):
        ends("kv_c_proj")


def answers() -> tuple[AnswerLogprobs, tuple[torch.Tensor, torch.Tensor]]:
    policy = AnswerLogprobs(
        torch.tensor([-3.0, -8.0]), torch.tensor([-6.0, -7.0]), torch.tensor([3, 4]), torch.tensor([2, 7])
    )
    return policy, (torch.tensor([-4.0, -7.5]), torch.tensor([-5.0, -7.25]))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_preference_losses_match_formulas() -> None:
    """The formulas, spelled out for each pair with plain numbers."""
    policy, base = answers()
    pairs = [(-3.0, -6.0, 3, 2, -4.0, -5.0), (-8.0, -7.0, 4, 7, -7.5, -7.25)]
    beta, gamma = 0.3, 0.5

    def check(kind: str, formula: Any, **more: Any) -> None:
        settings = PreferenceSettings(pref_loss=kind, pref_beta=beta, simpo_gamma=gamma, **more)  # type: ignore[arg-type]
        expected = [formula(*pair) for pair in pairs]
        assert pair_losses(policy, base, settings).tolist() == pytest.approx(expected, rel=1e-5), kind

    def margin(c: float, r: float, nc: int, nr: int, bc: float, br: float) -> float:
        return (c - r) - (bc - br)

    check("sigmoid", lambda *p: -math.log(sigmoid(beta * margin(*p))))
    check("hinge", lambda *p: max(0.0, 1 - beta * margin(*p)))
    smooth = 0.1
    check(
        "sigmoid",
        lambda *p: (
            -(1 - smooth) * math.log(sigmoid(beta * margin(*p))) - smooth * math.log(sigmoid(-beta * margin(*p)))
        ),
        dpo_label_smoothing=smooth,
    )
    check("ipo", lambda c, r, nc, nr, bc, br: ((c / nc - r / nr) - (bc / nc - br / nr) - 1 / (2 * beta)) ** 2)
    check("simpo", lambda c, r, nc, nr, bc, br: -math.log(sigmoid(beta * (c / nc - r / nr) - gamma)))

    def orpo(c: float, r: float, nc: int, nr: int, bc: float, br: float) -> float:
        c, r = c / nc, r / nr
        odds = (c - r) - (math.log(1 - math.exp(c)) - math.log(1 - math.exp(r)))
        return -c - beta * math.log(sigmoid(odds))

    check("orpo", orpo)
    check("sigmoid", lambda *p: -math.log(sigmoid(beta * margin(*p))) - 0.2 * p[0] / p[2], pref_ftx=0.2)


def test_reference_free_losses_need_no_reference() -> None:
    policy, _ = answers()
    for kind in ("orpo", "simpo"):
        assert pair_losses(policy, None, PreferenceSettings(pref_loss=kind)).shape == (2,)


def test_split_by_budget_keeps_every_row() -> None:
    lengths = [5, 40, 12, 7, 33, 5, 90, 2]
    parts = split_by_budget(lengths, 80)
    assert sorted(row for part in parts for row in part) == list(range(8))
    for part in parts:
        assert len(part) == 1 or len(part) * max(lengths[row] for row in part) <= 80
    assert len(parts) < 6
    assert split_by_budget([], 10) == []


def test_split_pairs_keeps_pairs_together() -> None:
    lengths = [3, 5, 2, 4, 1, 6]  # three pairs: (3, 4), (5, 1), (2, 6)
    mask = torch.zeros(6, 6, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    ids = torch.arange(6)[:, None].expand(6, 6) * mask
    inputs = {"input_ids": ids, "attention_mask": mask, "ref_chosen_logps": torch.arange(3.0)}
    weights = [0.25, 0.25, 0.5]  # batches of two count alike, and the last is short
    parts = split_pairs(inputs, budget=20, batch=2)
    assert len(parts) > 1
    seen = []
    for part in parts:
        half = part["input_ids"].shape[0] // 2
        first = part["input_ids"][:, 0].tolist()
        assert part["weights"].tolist() == [weights[row] for row in first[:half]]
        assert [row + 3 for row in first[:half]] == first[half:]
        assert part["ref_chosen_logps"].tolist() == [float(row) for row in first[:half]]
        assert part["attention_mask"].any(0).all(), "cut to the longest row"
        seen += first[:half]
    assert sorted(seen) == [0, 1, 2]
    assert pair_weights(3, 1).tolist() == pytest.approx([1 / 3] * 3) and pair_weights(2, 8).tolist() == [0.5, 0.5]
