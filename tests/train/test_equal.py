"""The numbers of a run are those of plain TRL on the stock model, however its steps are cut, packed or checkpointed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.training import RunRecorder, recipe
from tests.support.training_runs import adapter, difference, first_gradients, run


@pytest.mark.parametrize(
    ("family", "precision", "tolerance"),
    [
        ("qwen3_moe", "bf16", 0.02),
        pytest.param("deepseek_v3", "bf16", 0.02, marks=pytest.mark.slow),
        ("qwen3_moe", "f32", 1e-4),
        ("deepseek_v32", "f32", 1e-4),
        pytest.param("glm_moe_dsa", "f32", 1e-4, marks=pytest.mark.slow),
    ],
)
def test_adapter_equals_plain_trl_training(
    family: str, precision: str, tolerance: float, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = [
        {"prompt": f"Question {n}:\nwhat is {n} + 1?\n", "completion": f"It is {n + 1}, my friend."} for n in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    folder = model_of(family)
    keys = recipe(folder, tmp_path / "ours", dataset=str(tmp_path / "rows.jsonl"), max_steps=5, optim="sgd")
    run(keys | {"learning_rate": 0.5, "disable_shuffling": True, "precision": precision})
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert set(config["target_parameters"]) == {"mlp.experts.down_proj", "mlp.experts.gate_up_proj"}
    targets = {key: config[key] for key in ("target_modules", "target_parameters")}

    arguments = SFTConfig(
        output_dir=str(tmp_path / "plain"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.5,
        max_steps=5,
        optim="sgd",
        train_sampling_strategy="sequential",
        shuffle_dataset=False,
        router_aux_loss_coef=0.0,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    plain = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **targets),
    )
    before = {name: parameter.clone() for name, parameter in plain.model.named_parameters() if parameter.requires_grad}
    plain.train()
    plain.save_model(str(tmp_path / "plain"))
    ours, theirs = adapter(tmp_path / "ours"), adapter(tmp_path / "plain")
    start = {name.replace(".default", ""): tensor for name, tensor in before.items()}
    moved = difference(theirs, {name: start[name] for name in theirs})
    assert moved > 0.01, "the plain script learns nothing"
    learned = [{name: found[name] - start[name] for name in found} for found in (ours, theirs)]
    assert difference(*learned) < tolerance


def test_token_budget_gradients_equal_accumulation(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "x", gradient_accumulation_steps=4, max_samples=8)
    plain = first_gradients(keys | {"kt_tokens_per_batch": "off"})
    budget = first_gradients(keys | {"kt_tokens_per_batch": 200})
    assert difference(budget, plain) < 1e-5
    pairs = recipe(tiny, tmp_path / "y", stage="dpo", dataset="style_neko_en_dpo", gradient_accumulation_steps=3)
    for count in (6, 5):  # with five the last batch of the step is short
        pairs |= {"cutoff_len": 64, "max_samples": count}
        plain = first_gradients(pairs | {"kt_tokens_per_batch": "off"})
        assert difference(first_gradients(pairs | {"kt_tokens_per_batch": 256}), plain) < 1e-5


def test_packed_rows_do_not_attend_to_each_other(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "x", max_samples=6, per_device_train_batch_size=6, gradient_accumulation_steps=1)
    assert difference(first_gradients(keys | {"packing": True, "cutoff_len": 256}), first_gradients(keys)) < 1e-4


def test_checkpointing_does_not_change_gradients(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "x", max_samples=4, gradient_accumulation_steps=1)
    kept = first_gradients(keys | {"disable_gradient_checkpointing": True})
    assert difference(first_gradients(keys), kept) < 1e-6
    assert difference(first_gradients(keys | {"kt_cpu_activation": "retain"}), kept) < 1e-6


SLOW_LOSSES = [pytest.param(loss, marks=pytest.mark.slow) for loss in ("simpo", "ipo", "hinge")]


@pytest.mark.parametrize("loss", ["sigmoid", "orpo", *SLOW_LOSSES])
def test_every_preference_loss_trains(loss: str, tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "dpo", stage="dpo", dataset="style_neko_en_dpo", pref_loss=loss, pref_ftx=0.1)
    keys |= {"cutoff_len": 80, "max_samples": 4, "learning_rate": 5e-3, "max_steps": 3, "val_size": 1}
    keys |= {"gradient_accumulation_steps": 1}
    watcher = RunRecorder()
    result = run(keys, watcher)
    steps = [step.values for step in watcher.steps if "loss" in step.values]
    with_reference = loss not in ("orpo", "simpo")
    assert watcher.referred == (1 if with_reference else 0)  # the last dataset: one row of evaluation
    if with_reference:
        assert steps[0]["rewards/chosen"] == 0 == steps[0]["rewards/rejected"], "the reference is the base, to the bit"
    assert steps[-1]["rewards/margins"] > steps[0]["rewards/margins"]
    assert "eval_loss" in result.results
    if with_reference:  # again in the same place: nothing is computed twice
        again = RunRecorder()
        run(keys | {"overwrite_output_dir": True, "max_steps": 1}, again)
        assert again.referred == 0 and any("earlier run" in note for note in again.notes)


def test_sigmoid_loss_equals_trl(tiny: Path, tmp_path: Path) -> None:
    """Our loss on our rows against TRL's own trainer on the same tokens."""
    from ktransformers.train.trainers import PreferenceTrainer

    keys = recipe(tiny, tmp_path / "x", stage="dpo", dataset="style_neko_en_dpo", cutoff_len=80, max_samples=2)
    ours = first_gradients(keys | {"gradient_accumulation_steps": 1})
    stock = PreferenceTrainer.compute_loss
    try:
        from trl import DPOTrainer

        def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.precompute_ref_logps = True
            return DPOTrainer.compute_loss(self, *args, **kwargs)

        PreferenceTrainer.compute_loss = theirs
        expected = first_gradients(keys | {"gradient_accumulation_steps": 1})
    finally:
        PreferenceTrainer.compute_loss = stock
    assert difference(ours, expected) < 1e-5
