"""Whole runs on tiny models: what they learn and what they leave."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from transformers import AutoModelForCausalLM

from ktransformers.adapters import convert
from ktransformers.adapters.manifest import read_manifest
from ktransformers.ground import system
from ktransformers.ground.errors import InputError, KTError
from ktransformers.train.build import build_trainer
from ktransformers.train.manifest import check_gradients
from ktransformers.train.model import open_trained
from ktransformers.train.plan import make_plan
from ktransformers.train.resolve import read_settings
from ktransformers.train.run import Result
from tests.support.training import RunRecorder, recipe
from tests.support.training_runs import adapter, difference, run

FILES = {
    "adapter_model.safetensors",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "trainer_state.json",
    "trainer_log.jsonl",
    "train_results.json",
    "eval_results.json",
    "all_results.json",
    "training.svg",
    "training_loss.png",
    "README.md",
    "kt_manifest.json",
}


def finished_keys(model: Path, output: Path) -> dict[str, Any]:
    keys = recipe(model, output, val_size=2, plot_loss=True, max_steps=8, save_strategy="steps", save_steps=4)
    return keys | {
        "save_total_limit": 1,
        "learning_rate": 2e-2,
        "lora_dropout": 0.05,
        "eval_strategy": "steps",
        "eval_steps": 8,
    }


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result, RunRecorder]:
    output, watcher = tmp_path_factory.mktemp("runs") / "sft", RunRecorder()
    return output, run(finished_keys(tiny, output), watcher), watcher


def test_run_reduces_loss_and_writes_expected_files(finished: tuple[Path, Result, RunRecorder]) -> None:
    output, result, watcher = finished
    assert {path.name for path in output.iterdir()} >= FILES
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-8"], "save_total_limit"
    assert not (output / ".kt_saving").exists()
    losses = [step.values["loss"] for step in watcher.steps if "loss" in step.values]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.3
    lines = [json.loads(line) for line in (output / "trainer_log.jsonl").read_text().splitlines()]
    assert [line["current_steps"] for line in lines if "loss" in line] == list(range(1, 9))
    assert lines[0]["total_steps"] == 8 and lines[0]["lr"] > 0 and lines[-1]["percentage"] == 100
    assert json.loads((output / "all_results.json").read_text())["eval_loss"] == result.results["eval_loss"]
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == 8
    assert (output / "training_loss.png").read_bytes()[:4] == b"\x89PNG"
    assert all(line["grad_norm"] > 0 for line in lines if "loss" in line)
    panels = ElementTree.parse(output / "training.svg").getroot().findall("{*}svg")
    points = [len(line.attrib["points"].split()) for panel in panels for line in panel.findall("{*}polyline")]
    assert points == [8, 8, 8, 7], "loss, learning rate, gradient norm; the first step has no rate"
    assert "kt train" in (output / "README.md").read_text()
    last = [step for step in watcher.steps if "loss" in step.values][-1]
    assert last.tokens_per_second > 0 and 0 < last.expert_share < 1 and last.memory > 0
    assert 0 < last.roof_share < 1


def test_manifest_lists_trained_tensors(finished: tuple[Path, Result, RunRecorder], tiny: Path) -> None:
    from ktransformers.adapters import read_adapter

    output, _, _ = finished
    manifest, saved = read_manifest(output), adapter(output)
    assert manifest["tensors"].keys() == saved.keys()
    for name, tensor in manifest["tensors"].items():
        assert tensor["gradient_seen"], name
        assert tensor["shape"] == list(saved[name].shape)
        assert tensor["norm"] == pytest.approx(saved[name].norm().item(), rel=1e-4)
    assert manifest["base"]["hash"].startswith("sha256:") and manifest["seed"] == 42
    assert manifest["versions"]["trl"] and manifest["experts"]["isa"] and manifest["steps"] == 8
    assert manifest["lora_dropout"] == 0.05
    assert manifest["experts"]["path"] is None and manifest["experts"]["format"] == "bf16"
    read_adapter(output, model=str(tiny))  # every tensor is checked against the manifest


def test_stock_peft_loads_the_adapter(finished: tuple[Path, Result, RunRecorder], tiny: Path) -> None:
    from peft import PeftModel

    output, _, _ = finished
    stock = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        before = stock(ids).logits
        after = PeftModel.from_pretrained(stock, output)(ids).logits
    assert (after - before).abs().max() > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["mixtral", "gpt_oss", "qwen3_5_moe_text", "qwen2_moe", "glm4_moe", "kimi_linear", "deepseek_v2", "qwen3_next"],
)
def test_every_model_family_trains(family: str, model_of: Callable[[str], Path], tmp_path: Path) -> None:
    watcher = RunRecorder()
    result = run(recipe(model_of(family), tmp_path / "x", learning_rate=1e-2), watcher)
    losses = [step.values["loss"] for step in watcher.steps]
    assert losses[-1] < losses[0] - 0.2
    assert any(".experts.lora_B" in name for name in result.manifest["tensors"])


def test_module_without_gradient_is_an_error(tiny: Path, tmp_path: Path) -> None:
    settings = read_settings(recipe(tiny, tmp_path / "x"))
    prepared = make_plan(settings)
    assert prepared.directory is not None
    model = open_trained(prepared.directory, settings, torch.float32, torch.device("cpu"))
    trainer = build_trainer(model, prepared)
    gradient_check = trainer.gradient_check
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            dead = "layers.1.self_attn.k_proj" in name
            parameter.grad = torch.zeros_like(parameter) if dead else torch.ones_like(parameter)
    gradient_check.on_pre_optimizer_step(None, None, None)
    with pytest.raises(
        KTError, match=r"1 of 12 adapted modules never got a gradient: model\.layers\.1\.self_attn\.k_proj"
    ):
        check_gradients(gradient_check, 1)
    assert not [m for m in gradient_check.dead() if "k_proj" not in m], (
        "A has no gradient while B is zero, and need not"
    )
    assert gradient_check.unvisited() == {}


def test_experts_without_tokens_are_listed(tiny: Path, tmp_path: Path) -> None:
    """The router sends the few tokens of a short run to some experts only; those are named, and it is no error."""
    keys = recipe(tiny, tmp_path / "x", max_samples=1, max_steps=2, cutoff_len=14, per_device_train_batch_size=1)
    result = run(keys | {"gradient_accumulation_steps": 1, "template": "qwen3_nothink"})
    unvisited = result.manifest["experts_without_gradient"]
    saved = adapter(tmp_path / "x")
    for name, experts in unvisited.items():
        assert "experts" in name and 0 < len(experts) < 6
        b = saved[f"base_model.model.{name}.lora_B.weight"]
        zero = b.reshape(b.shape[0], -1, 6).abs().amax((0, 1)) == 0
        assert torch.nonzero(zero).flatten().tolist() == experts
    assert unvisited, "choose fewer tokens"


def test_named_router_and_shared_experts_are_trained(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    result = run(
        recipe(model_of("deepseek_v3"), tmp_path / "x", lora_target="gate,shared_experts,experts", max_steps=3)
    )
    names = set(result.manifest["tensors"])
    assert any(".mlp.gate.lora_A" in name for name in names)
    assert any(".shared_experts.up_proj.lora_B" in name for name in names)
    assert any(".mlp.experts.lora_B" in name for name in names)
    assert not any("self_attn" in name for name in names)


def test_best_checkpoint_is_kept_and_loaded(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(
        tiny, tmp_path / "x", val_size=2, max_steps=6, learning_rate=2e-2, save_strategy="steps", save_steps=2
    )
    keys |= {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    keys |= {"early_stopping_steps": 3}
    run(keys)
    state = json.loads((tmp_path / "x" / "trainer_state.json").read_text())
    best = Path(state["best_model_checkpoint"])
    assert best.parent == tmp_path / "x" and best.is_dir()
    assert difference(adapter(tmp_path / "x"), adapter(best)) == 0


def test_loraplus_scales_the_learning_rate_of_b(tiny: Path, tmp_path: Path) -> None:
    settings = read_settings(recipe(tiny, tmp_path / "x", loraplus_lr_ratio=16, weight_decay=0.1))
    prepared = make_plan(settings)
    assert prepared.directory is not None
    model = open_trained(prepared.directory, settings, torch.float32, torch.device("cpu"))
    trainer = build_trainer(model, prepared)
    trainer.create_optimizer()
    rates = {}
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            rates[names[id(parameter)]] = group["lr"]
    assert {rate for name, rate in rates.items() if "lora_A" in name} == {1e-3}
    assert {rate for name, rate in rates.items() if "lora_B" in name} == {16e-3}


def test_existing_adapter_is_trained_further(
    finished: tuple[Path, Result, RunRecorder], tiny: Path, tmp_path: Path
) -> None:
    output, _, before = finished
    watcher = RunRecorder()
    run(recipe(tiny, tmp_path / "x", adapter_name_or_path=str(output), max_steps=2, learning_rate=1e-6), watcher)
    start = next(step.values["loss"] for step in before.steps if "loss" in step.values)
    assert watcher.steps[0].values["loss"] < start - 0.3
    pytest.importorskip("gguf")
    convert(output, tmp_path / "gguf", "gguf", base_model_name_or_path=str(tiny))
    (file,) = (tmp_path / "gguf").glob("*.gguf")
    again = RunRecorder()
    run(recipe(tiny, tmp_path / "z", adapter_name_or_path=str(file), max_steps=2, learning_rate=1e-6), again)
    assert again.steps[0].values["loss"] == pytest.approx(watcher.steps[0].values["loss"], rel=1e-3)
    with pytest.raises(InputError, match=r"adapter_config\.json"):
        run(recipe(tiny, tmp_path / "y", adapter_name_or_path=str(tmp_path / "nothing")))


def test_bf16_training_runs(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "forced_dense_products", "bfloat16")  # also where it is slow
    watcher = RunRecorder()
    keys = recipe(tiny, tmp_path / "x", bf16=True, max_steps=1, max_samples=1, cpu_infer=64, template="deepseek")
    keys |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "trust_remote_code": True}
    run(keys, watcher)
    assert any("kt_num_threads 64 exceeds the" in note for note in watcher.notes)
    assert all(torch.isfinite(torch.tensor(step.values["loss"])) for step in watcher.steps)
    assert all(tensor.dtype == torch.float32 for tensor in adapter(tmp_path / "x").values())


def test_existing_output_is_not_overwritten(finished: tuple[Path, Result, RunRecorder], tiny: Path) -> None:
    output, _, _ = finished
    keys = finished_keys(tiny, output)
    with pytest.raises(InputError, match="`kt train FILE overwrite_output_dir=true`"):
        make_plan(read_settings(keys | {"resume_from_checkpoint": False}))
    assert "resumes from" in make_plan(read_settings(keys)).plan.start
    anew = make_plan(read_settings(recipe(tiny, output, overwrite_output_dir=True))).plan.start
    assert "1 checkpoints" in anew and "removed" in anew
    nowhere = recipe(tiny, output.parent / "new", resume_from_checkpoint=True)
    assert "no checkpoint" in make_plan(read_settings(nowhere)).plan.start


def test_settings_of_a_tokenizer_that_cannot_be_used_are_refused(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    file = model / "tokenizer_config.json"
    words = json.loads(file.read_text())
    for changed, message in (
        ({"eos_token": None}, "which has no eos token, expected one"),
        ({"model_max_length": "x"}, "tokenizer_config.json: model_max_length: given .*x.*, expected a number"),
    ):
        file.write_text(json.dumps(words | changed))
        with pytest.raises(InputError, match=message):
            make_plan(read_settings(recipe(model, tmp_path / "out")))


def test_experts_are_loaded_from_a_packed_directory(tiny: Path, tmp_path: Path) -> None:
    from ktransformers.quant.convert import convert
    from ktransformers.quant.plan import make_plan as plan_conversion
    from ktransformers.quant.plan import parse_formats

    packed = tmp_path / "int8"
    convert(plan_conversion(tiny, parse_formats("int8"), 2), packed)
    keys = recipe(tiny, tmp_path / "run", max_steps=2, kt_weight_path=str(packed), kt_expert_weight_format="int8")
    assert run(keys).output == tmp_path / "run"
    assert any("experts" in name for name in adapter(tmp_path / "run"))
    told = read_manifest(tmp_path / "run")["experts"]
    assert (told["path"], told["format"], told["precision"]) == (str(packed), "int8", "bf16")
    with pytest.raises(InputError, match="kt_expert_weight_format: given fp8, where"):
        run(keys | {"kt_expert_weight_format": "fp8", "output_dir": str(tmp_path / "other")})
