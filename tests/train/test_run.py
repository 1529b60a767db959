"""Whole runs on tiny models: what they learn, what they leave, and that they equal plain TRL on the stock model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from ktransformers.errors import InputError, KTError
from ktransformers.train.manifest import check_gradients, read_manifest
from ktransformers.train.model import open_model
from ktransformers.train.plan import make_plan
from ktransformers.train.resolve import read_settings
from ktransformers.train.run import Result, build_trainer, train
from ktransformers.train.watch import Interrupted

from .conftest import Quiet, recipe

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
    "training_loss.png",
    "README.md",
    "kt_manifest.json",
}


def run(keys: dict[str, Any], watcher: Quiet | None = None) -> Result:
    return train(read_settings(keys), watcher or Quiet())


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a tensor, by norms."""
    assert found.keys() == expected.keys()
    return max(
        ((found[name] - expected[name]).norm() / expected[name].norm().clamp(min=1e-12)).item() for name in expected
    )


class Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.found:
            self.found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def first_gradients(keys: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of the first optimiser step. B is made non-zero before it, so that A has a gradient, too."""
    settings = read_settings(keys | {"max_steps": 1, "max_grad_norm": 0, "lr_scheduler_type": "constant"})
    prepared = make_plan(settings)
    assert prepared.directory is not None
    model, _ = open_model(prepared.directory, settings, torch.float32, torch.device("cpu"))
    trainer = build_trainer(model, prepared, settings)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    if settings.data.stage == "dpo":
        from ktransformers.train.reference import add_reference

        add_reference(trainer, "base", 1000, lambda done, rows: None)
    gradients = Gradients()
    trainer.add_callback(gradients)
    trainer.train()
    return gradients.found


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result, Quiet]:
    output, watcher = tmp_path_factory.mktemp("runs") / "sft", Quiet()
    keys = recipe(tiny, output, val_size=2, plot_loss=True, max_steps=8, save_strategy="steps", save_steps=4)
    keys |= {
        "save_total_limit": 1,
        "learning_rate": 2e-2,
        "lora_dropout": 0.05,
        "eval_strategy": "steps",
        "eval_steps": 8,
    }
    return output, run(keys, watcher), watcher


def test_a_run_learns_and_leaves_the_familiar_directory(finished: tuple[Path, Result, Quiet]) -> None:
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
    assert "kt train" in (output / "README.md").read_text()
    last = [step for step in watcher.steps if "loss" in step.values][-1]
    assert last.tokens_per_second > 0 and 0 < last.expert_share < 1 and last.memory > 0


def test_the_manifest_tells_what_was_trained(finished: tuple[Path, Result, Quiet], tiny: Path) -> None:
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
    read_adapter(output, model=str(tiny))  # every tensor is checked against the manifest


def test_stock_peft_loads_the_adapter(finished: tuple[Path, Result, Quiet], tiny: Path) -> None:
    from peft import PeftModel

    output, _, _ = finished
    stock = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        before = stock(ids).logits
        after = PeftModel.from_pretrained(stock, output)(ids).logits
    assert (after - before).abs().max() > 0.05


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_adapter_is_that_of_a_plain_trl_script(
    family: str, model_of: Callable[[str], Path], tmp_path: Path
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
    run(keys | {"learning_rate": 0.5, "disable_shuffling": True})
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
    assert difference(*learned) < 0.02


def test_token_budget_has_the_gradients_of_accumulation(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "x", gradient_accumulation_steps=4, max_samples=8)
    plain = first_gradients(keys)
    budget = first_gradients(keys | {"kt_tokens_per_batch": 200})
    assert difference(budget, plain) < 1e-5
    pairs = recipe(tiny, tmp_path / "y", stage="dpo", dataset="style_neko_en_dpo", gradient_accumulation_steps=3)
    pairs |= {"cutoff_len": 64, "max_samples": 6}
    plain, budget = first_gradients(pairs), first_gradients(pairs | {"kt_tokens_per_batch": 256})
    assert difference(budget, plain) < 1e-5


def test_packed_rows_do_not_see_each_other(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "x", max_samples=6, per_device_train_batch_size=6, gradient_accumulation_steps=1)
    assert difference(first_gradients(keys | {"packing": True, "cutoff_len": 256}), first_gradients(keys)) < 1e-4


def test_checkpointing_does_not_change_gradients(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "x", max_samples=4, gradient_accumulation_steps=1)
    kept = first_gradients(keys | {"disable_gradient_checkpointing": True})
    assert difference(first_gradients(keys), kept) < 1e-6
    assert difference(first_gradients(keys | {"kt_cpu_activation": "retain"}), kept) < 1e-6


@pytest.mark.parametrize("loss", ["sigmoid", "orpo", "simpo", "ipo", "hinge"])
def test_preference_runs(loss: str, tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "dpo", stage="dpo", dataset="style_neko_en_dpo", pref_loss=loss, pref_ftx=0.1)
    keys |= {"cutoff_len": 80, "max_samples": 4, "learning_rate": 5e-3, "max_steps": 3, "val_size": 1}
    keys |= {"gradient_accumulation_steps": 1}
    watcher = Quiet()
    result = run(keys, watcher)
    steps = [step.values for step in watcher.steps if "loss" in step.values]
    with_reference = loss not in ("orpo", "simpo")
    assert watcher.referred == (1 if with_reference else 0)  # the last dataset: one row of evaluation
    if with_reference:
        assert steps[0]["rewards/chosen"] == 0 == steps[0]["rewards/rejected"], "the reference is the base, to the bit"
    assert steps[-1]["rewards/margins"] > steps[0]["rewards/margins"]
    assert "eval_loss" in result.results
    if with_reference:  # again in the same place: nothing is computed twice
        again = Quiet()
        run(keys | {"overwrite_output_dir": True, "max_steps": 1}, again)
        assert again.referred == 0 and "earlier run" in again.notes[-1]


def test_sigmoid_is_trls_sigmoid(tiny: Path, tmp_path: Path) -> None:
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


def test_going_on_gives_what_an_uninterrupted_run_gives(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "whole", max_steps=6, save_strategy="steps", save_steps=2, lora_dropout=0.1)
    whole = Quiet()
    run(keys, whole)
    part = tmp_path / "part"
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", part / "checkpoint-4")
    (part / ".kt_saving" / "checkpoint-6").mkdir(parents=True)  # what a kill in the middle of a save leaves
    again = Quiet()
    run(keys | {"output_dir": str(part), "resume_from_checkpoint": True}, again)
    assert "goes on from" in again.plans[0].start
    losses = [
        [(step.step, step.values["loss"]) for step in seen.steps if "loss" in step.values] for seen in (whole, again)
    ]
    assert losses[1] == losses[0][4:]
    assert difference(adapter(part), adapter(tmp_path / "whole")) < 1e-6
    manifest = read_manifest(part)
    assert all(tensor["gradient_seen"] for tensor in manifest["tensors"].values())


class Interrupting(Quiet):
    def stepped(self, progress: Any) -> None:
        super().stepped(progress)
        if progress.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_saves_and_goes_on(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "x", max_steps=5, save_strategy="steps", save_steps=100)
    with pytest.raises(Interrupted, match=r"SIGTERM: stopped after step \d, which was saved"):
        run(keys, Interrupting())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    (checkpoint,) = (tmp_path / "x").glob("checkpoint-*")
    assert not (tmp_path / "x" / "kt_manifest.json").exists()
    run(keys | {"resume_from_checkpoint": True})
    lines = [json.loads(line) for line in (tmp_path / "x" / "trainer_log.jsonl").read_text().splitlines()]
    assert [line["current_steps"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5]
    assert int(checkpoint.name[11:]) < 5 and (tmp_path / "x" / "kt_manifest.json").exists()


SCRIPT = "import typer; from ktransformers.cli.train import train; typer.run(train)"


def start_run(keys: dict[str, Any], file: Path) -> subprocess.Popen[str]:
    file.write_text(json.dumps(keys))  # JSON is YAML
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(file)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def test_kill_9_leaves_only_whole_checkpoints(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "x", max_steps=200, save_strategy="steps", save_steps=1, save_total_limit=3)
    process = start_run(keys, tmp_path / "x.yaml")
    limit = time.monotonic() + 120
    while len(list((tmp_path / "x").glob("checkpoint-*"))) < 2 and time.monotonic() < limit and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    _, errors = process.communicate()
    there = sorted((tmp_path / "x").glob("checkpoint-*"))
    assert there, errors
    for checkpoint in there:
        adapter(checkpoint)
        assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == int(checkpoint.name[11:])
        torch.load(checkpoint / "optimizer.pt", weights_only=True)
    last = max(int(path.name[11:]) for path in there)
    watcher = Quiet()
    run(keys | {"resume_from_checkpoint": True, "max_steps": last + 2, "overwrite_output_dir": True}, watcher)
    assert [step.step for step in watcher.steps if "loss" in step.values] == [last + 1, last + 2]


@pytest.mark.slow
def test_kill_9_at_twenty_random_moments(tiny: Path, tmp_path: Path) -> None:
    import random

    keys = recipe(tiny, tmp_path / "whole", max_steps=240, save_strategy="steps", save_steps=1, save_total_limit=2)
    whole = Quiet()
    run(keys, whole)
    output = tmp_path / "x"
    keys |= {"output_dir": str(output), "resume_from_checkpoint": True}
    draw = random.Random(7)

    def last() -> int:
        return max((int(path.name[11:]) for path in output.glob("checkpoint-*") if path.name[11:].isdigit()), default=0)

    killed = 0
    while killed < 20:
        before, process, limit = last(), start_run(keys, tmp_path / "x.yaml"), time.monotonic() + 120
        while last() == before and time.monotonic() < limit and process.poll() is None:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 1))
        process.kill()
        process.communicate()
        killed += 1
        assert last() > before or last() == 240
    watcher = Quiet()
    run(keys, watcher)
    losses = {step.step: step.values["loss"] for step in whole.steps if "loss" in step.values}
    assert all(losses[step.step] == step.values["loss"] for step in watcher.steps if "loss" in step.values)
    assert difference(adapter(output), adapter(tmp_path / "whole")) < 1e-6


@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_batch(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "one", optim="sgd", learning_rate=0.5, disable_shuffling=True, max_samples=16)
    keys |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4, "use_cpu": True}
    one = Quiet()
    run(keys, one)
    (tmp_path / "two.yaml").write_text(json.dumps(keys | {"output_dir": str(tmp_path / "two")}))
    (tmp_path / "two.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "two.py")]
    words = [str(tmp_path / "two.yaml"), "per_device_train_batch_size=2"]
    done = subprocess.run([*launch, *words], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [step.values["loss"] for step in one.steps if "loss" in step.values]
    lines = (tmp_path / "two" / "trainer_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == pytest.approx(losses, rel=1e-4)
    assert difference(adapter(tmp_path / "two"), adapter(tmp_path / "one")) < 1e-4


def test_a_full_disk_is_said_plainly(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from ktransformers.train import trainers

    calls = []

    def full(folder: Path) -> None:
        calls.append(folder)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(trainers, "sync_tree", full)
    keys = recipe(tiny, tmp_path / "x", max_steps=4, save_strategy="steps", save_steps=1)
    with pytest.raises(KTError, match="no space left; what was saved before is whole"):
        run(keys)
    assert [path.name for path in sorted((tmp_path / "x").iterdir())] == ["checkpoint-1", "trainer_log.jsonl"]


def test_no_gradient_is_an_error(tiny: Path, tmp_path: Path) -> None:
    settings = read_settings(recipe(tiny, tmp_path / "x"))
    prepared = make_plan(settings)
    assert prepared.directory is not None
    model, _ = open_model(prepared.directory, settings, torch.float32, torch.device("cpu"))
    trainer = build_trainer(model, prepared, settings)
    witness = trainer.witness
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            dead = "layers.1.self_attn.k_proj" in name
            parameter.grad = torch.zeros_like(parameter) if dead else torch.ones_like(parameter)
    witness.on_pre_optimizer_step(None, None, None)
    with pytest.raises(
        KTError, match=r"1 of 12 adapted modules never got a gradient: model\.layers\.1\.self_attn\.k_proj"
    ):
        check_gradients(witness, 1)
    assert not [m for m in witness.dead() if "k_proj" not in m], "A has no gradient while B is zero, and need not"
    assert witness.unvisited() == {}


def test_experts_that_no_token_visited_are_listed(tiny: Path, tmp_path: Path) -> None:
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


def test_the_router_and_shared_experts_if_named(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    result = run(
        recipe(model_of("deepseek_v3"), tmp_path / "x", lora_target="gate,shared_experts,experts", max_steps=3)
    )
    names = set(result.manifest["tensors"])
    assert any(".mlp.gate.lora_A" in name for name in names)
    assert any(".shared_experts.up_proj.lora_B" in name for name in names)
    assert any(".mlp.experts.lora_B" in name for name in names)
    assert not any("self_attn" in name for name in names)


def test_the_best_checkpoint_is_kept_and_loaded(tiny: Path, tmp_path: Path) -> None:
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


def test_loraplus(tiny: Path, tmp_path: Path) -> None:
    settings = read_settings(recipe(tiny, tmp_path / "x", loraplus_lr_ratio=16, weight_decay=0.1))
    prepared = make_plan(settings)
    assert prepared.directory is not None
    model, _ = open_model(prepared.directory, settings, torch.float32, torch.device("cpu"))
    trainer = build_trainer(model, prepared, settings)
    trainer.create_optimizer()
    rates = {}
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            rates[names[id(parameter)]] = group["lr"]
    assert {rate for name, rate in rates.items() if "lora_A" in name} == {1e-3}
    assert {rate for name, rate in rates.items() if "lora_B" in name} == {16e-3}


def test_an_adapter_is_trained_further(finished: tuple[Path, Result, Quiet], tiny: Path, tmp_path: Path) -> None:
    output, _, before = finished
    watcher = Quiet()
    run(recipe(tiny, tmp_path / "x", adapter_name_or_path=str(output), max_steps=2, learning_rate=1e-6), watcher)
    start = next(step.values["loss"] for step in before.steps if "loss" in step.values)
    assert watcher.steps[0].values["loss"] < start - 0.3
    with pytest.raises(InputError, match=r"adapter_config\.json"):
        run(recipe(tiny, tmp_path / "y", adapter_name_or_path=str(tmp_path / "nothing")))


def test_bf16_as_the_seeds_ask(tiny: Path, tmp_path: Path) -> None:
    watcher = Quiet()
    keys = recipe(tiny, tmp_path / "x", bf16=True, max_steps=1, max_samples=1, cpu_infer=64, template="deepseek")
    keys |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "trust_remote_code": True}
    run(keys, watcher)
    assert any("kt_num_threads: 64 asked for" in note for note in watcher.notes)
    assert all(torch.isfinite(torch.tensor(step.values["loss"])) for step in watcher.steps)
    assert all(tensor.dtype == torch.float32 for tensor in adapter(tmp_path / "x").values())


def test_output_directories_are_not_overwritten_by_accident(finished: tuple[Path, Result, Quiet], tiny: Path) -> None:
    output, _, _ = finished
    keys = recipe(tiny, output, resume_from_checkpoint=False)
    with pytest.raises(InputError, match="overwrite_output_dir: true"):
        make_plan(read_settings(keys))
    assert "goes on from" in make_plan(read_settings(recipe(tiny, output))).plan.start
    anew = make_plan(read_settings(recipe(tiny, output, overwrite_output_dir=True))).plan.start
    assert "1 checkpoints" in anew and "removed" in anew
    nowhere = recipe(tiny, output.parent / "new", resume_from_checkpoint=True)
    assert "no checkpoint" in make_plan(read_settings(nowhere)).plan.start
