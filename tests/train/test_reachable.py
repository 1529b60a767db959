"""Modules that cannot be trained are found before training and left out, or named in an error; what the data did not
reach is not saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.ground.errors import InputError
from ktransformers.nn import attach
from ktransformers.train.model import build_fake_model, build_lora_config, check_readable
from ktransformers.train.plan import make_plan
from ktransformers.train.reachable import predict_targets, trainable_targets
from ktransformers.train.resolve import read_settings
from ktransformers.train.settings import LoraSettings
from ktransformers.train.targets import find_targets
from tests.support.tiny_models import build
from tests.support.training import RunRecorder, recipe
from tests.support.training_runs import adapter, run

LEFT_OUT = {
    "deepseek_v32": ({"wq_b", "wk", "weights_proj"}, "without gradients"),
    "hy_v4": ({"wq_b", "wk", "weights_proj"}, "without gradients"),
    "deepseek_v4": ({"o_a_proj"}, "not a product"),
    "zaya": ({"q_proj", "k_proj"}, "nothing that is learned"),
    "qwen3_moe": (set(), ""),
}


def last_names(names: Any) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize("family", LEFT_OUT)
def test_modules_without_a_gradient_are_left_out(family: str) -> None:
    expected, reason = LEFT_OUT[family]
    model = build(family)
    attach(model, free=True)
    before = {name: (parameter.requires_grad, parameter.grad) for name, parameter in model.named_parameters()}
    targets, notes = trainable_targets(model, LoraSettings())
    named = find_targets(model, LoraSettings())
    assert last_names(named.modules) - last_names(targets.modules) == expected
    assert targets.parameters == named.parameters and len(notes) == bool(expected)
    assert not notes or (reason in notes[0] and all(name in notes[0] for name in expected))
    after = {name: (parameter.requires_grad, parameter.grad) for name, parameter in model.named_parameters()}
    assert after == before and not any(
        module._forward_hooks for module in model.modules() if "Linear" in repr(type(module))
    )


@pytest.mark.parametrize(
    "family",  # without zaya, whose gradients are zeros
    ["qwen3_moe", "deepseek_v32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hy_v4", "deepseek_v4"))],
)
def test_dry_run_leaves_out_the_same_modules(family: str, model_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Without weights; the plan counts what is left."""
    expected, reason = LEFT_OUT[family]
    settings = read_settings(recipe(model_of(family), tmp_path / "x", max_samples=2))
    counted, everything = make_plan(settings, predict=True).plan, make_plan(settings).plan
    assert counted.targets is not None and everything.targets is not None
    assert last_names(everything.targets.modules) - last_names(counted.targets.modules) == expected
    assert counted.targets.parameters == everything.targets.parameters
    assert counted.trained_numbers is not None and everything.trained_numbers is not None
    assert (counted.trained_numbers < everything.trained_numbers) == bool(expected)
    notes = [note for note in counted.notes if note.startswith("left out of lora_target")]
    assert len(notes) == bool(expected) and (not notes or reason in notes[0])


def test_dry_run_of_a_model_that_needs_numbers_says_so(model_of: Callable[[str], Path]) -> None:
    model = build_fake_model(model_of("qwen3_moe"))
    model.model.norm.forward = lambda hidden: hidden * float(hidden.detach().sum())
    targets, notes = predict_targets(model, LoraSettings())
    assert targets == find_targets(model, LoraSettings())
    assert len(notes) == 1 and "are found when the run starts" in notes[0]


def test_named_target_without_a_gradient_is_an_error() -> None:
    model = build("deepseek_v32")
    with pytest.raises(InputError, match=r"lora_target: given wk \(wk \(2\): the model calls them without gradients\)"):
        trainable_targets(model, LoraSettings(lora_target=("wk", "experts")))


def test_modules_that_peft_refuses_are_left_out() -> None:
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8}
    model = build("nemotron_h", layers_block_type=["mamba", "moe", "attention"], num_hidden_layers=3, **mamba)
    targets, notes = trainable_targets(model, LoraSettings())
    assert {"q_proj", "in_proj"} <= last_names(targets.modules) and "out_proj" not in last_names(targets.modules)
    assert notes == ["left out of lora_target: out_proj (1): PEFT refuses them for this architecture"]


def test_attention_beside_experts_of_the_layer_is_trained() -> None:
    """gemma4 has its experts directly in the layer; its vision tower has the text model's names on other modules."""
    for family in ("gemma4_text", "gemma4"):
        model = build(family)
        targets = find_targets(model, LoraSettings())
        assert last_names(targets.modules) == {"q_proj", "k_proj", "v_proj", "o_proj"} and len(targets.parameters) == 4
        from peft import get_peft_model

        adapted = get_peft_model(model, build_lora_config(model, targets, LoraSettings()))
        trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
        assert len(trained) == 2 * (8 - ("v_proj" not in last_names(targets.modules))) + 8
        assert not any("vision" in name for name in trained)


def test_adapter_that_peft_cannot_read_is_an_error_before_training() -> None:
    from peft import LoraConfig, get_peft_model

    check_readable(get_peft_model(build("qwen3_moe"), LoraConfig(target_modules=["q_proj"])))
    adapted = get_peft_model(build("unlimited_ocr"), LoraConfig(target_modules=r".*language_model.*q_proj"))
    with pytest.raises(InputError, match="unlimited_ocr, whose adapter stock PEFT does not read back"):
        check_readable(adapted)


def test_run_saves_what_was_trained(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    """deepseek_v4 with rows that are shorter than what its compressors compress."""
    watcher = RunRecorder()
    keys = recipe(model_of("deepseek_v4"), tmp_path / "x", max_steps=1, max_samples=2)
    result = run(keys, watcher)
    assert any("left out of lora_target: o_a_proj (2)" in note for note in watcher.notes)
    assert any("no row of the data reached them: kv_proj (2), gate_proj (2)" in note for note in watcher.notes)
    saved = adapter(tmp_path / "x")
    assert not any("compressor" in name or "o_a_proj" in name for name in saved) and set(saved) == set(
        result.manifest["tensors"]
    )
    config = json.loads((tmp_path / "x" / "adapter_config.json").read_text())
    assert config["target_modules"] and not any("compressor" in name for name in config["target_modules"])
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(keys["model_name_or_path"], dtype=torch.float32)
    loaded = PeftModel.from_pretrained(stock, str(tmp_path / "x"))
    names = {name.replace(".default.", ".") for name, _ in loaded.named_parameters() if "lora_" in name}
    assert names == set(saved)
