"""`kt_tokens_per_batch: auto`: what it chooses, on which machine, and that a run comes out the same."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ktransformers.adapters.manifest import read_manifest
from ktransformers.cli.main import app
from ktransformers.ground.errors import InputError
from ktransformers.plan import open_shape, profile, with_gpus
from ktransformers.train import grouping
from ktransformers.train.forecast import PlanInputs
from ktransformers.train.grouping import (
    GROUPING_FILE,
    GroupingCandidate,
    RowLengths,
    choose_grouping,
    decide_grouping,
    pick_candidate,
)
from ktransformers.train.plan import make_plan, plan_document
from ktransformers.train.resolve import read_settings
from ktransformers.train.settings import TrainSettings
from tests.support.training import RunRecorder, recipe
from tests.support.training_runs import adapter, difference, first_gradients, run

PUBLISHED = {
    "model_name_or_path": "m",
    "output_dir": "o",
    "dataset": "identity",
    "cutoff_len": 512,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 16,
    "bf16": True,
}
OFF = "kt_tokens_per_batch=off"
V2_LITE = "deepseek-ai/DeepSeek-V2-Lite"


def site(machine: Any, *policies: str) -> PlanInputs:
    return PlanInputs(open_shape(V2_LITE), machine, policies or ("auto", "cpu"), 2)


def settings_of(**keys: Any) -> TrainSettings:
    return read_settings(PUBLISHED | keys)


def test_published_recipe_combines_all_batches() -> None:
    found = choose_grouping(settings_of(), site(profile("amx16-h200")))
    assert (found.tokens, found.batches, found.of) == (8192, 16, 16)
    assert found.seconds is not None and found.seconds_apart is not None and found.seconds_apart > 5 * found.seconds
    assert found.note == (
        f"kt_tokens_per_batch: 8192, 16 batches of a step at once: {found.seconds:.2g} s a step instead of "
        f"{found.seconds_apart:.2g}; off with kt_tokens_per_batch: off"
    )
    pairs = choose_grouping(settings_of(stage="dpo", dataset="dpo_en_demo"), site(profile("amx16-h200")))
    assert pairs.tokens == 16384, "both answers of a pair"
    short = choose_grouping(settings_of(), site(profile("amx16-h200")), RowLengths([(300, 200)] * 64, 300, 0))
    assert short.tokens == 16 * 300, "rows are no longer than they are"


def test_candidate_without_memory_margin_is_not_chosen() -> None:
    """GPUs of less and less memory: fewer batches at once, at last one by one; and never more than what fits."""
    machine, settings, chosen = profile("amx16-h200"), settings_of(cutoff_len=2048), []
    for size in ("24GB", "16GB", "12GB", "10GB", "8GB"):
        here = site(with_gpus(machine, size), "auto")
        found = choose_grouping(settings, here)
        plan = here.forecast(grouping.with_tokens_per_batch(settings, found.tokens), None)
        (table,) = plan.nearest.memory.gpus
        estimated = sum(size for name, size in table.items() if name not in grouping.EXACT_SIZES)
        assert plan.best is not None
        assert sum(table.values()) - table["residents"] + 0.1 * estimated <= plan.machine.gpus[0].memory
        chosen.append(found.batches)
    assert chosen[0] == 16 and chosen[-1] == 1 and len(set(chosen)) > 2, chosen
    assert all(more >= less for more, less in itertools.pairwise(count or 0 for count in chosen)), chosen
    little = choose_grouping(settings_of(), site(replace(with_gpus(machine, "none"), memory=10**9), "cpu"))
    assert little.tokens is None and "would not fit" in little.why and little.note is None


@pytest.mark.parametrize(
    ("tried", "batches"),
    [
        ([(16, 2.0, True), (8, 3.0, True)], 16),
        ([(16, 2.0, False), (8, 3.0, True), (4, 4.0, True)], 8),  # the fastest does not fit
        ([(16, 2.0, True), (8, 2.05, True), (4, 2.2, True)], 8),  # as good as equal: less memory
        ([(16, 9.5, True), (8, 9.6, True)], 1),  # too little is gained
        ([(16, 4.0, True), (8, 2.0, True)], 8),  # padding
        ([(16, 2.0, False)], 1),
        ([], 1),
    ],
)
def test_candidate_selection_rule(tried: list[tuple[int, float, bool]], batches: int) -> None:
    trials = [GroupingCandidate(count, 512 * count, seconds, fits) for count, seconds, fits in tried]
    assert pick_candidate(GroupingCandidate(1, None, 10.0, True), trials).batches == batches


def test_padding_is_counted_in_predicted_time() -> None:
    """A CPU that multiplies slowly gains nothing from fewer passes once most of what they hold is padding."""
    machine = with_gpus(profile("amx16-h200"), "none")
    machine = replace(machine, memory=10**12, cpu=replace(machine.cpu, read_bytes=20e9))
    settings, here = settings_of(), site(machine, "cpu")
    equal = choose_grouping(settings, here, RowLengths([(512, 100)] * 64, 512, 0))
    mixed = choose_grouping(settings, here, RowLengths([(16, 10)] * 60 + [(512, 100)] * 4, 512, 0))
    assert equal.tokens == 4096, "all at once would be as fast"
    assert mixed.tokens == 1024 and mixed.seconds is not None and mixed.seconds_apart is not None
    assert mixed.seconds <= mixed.seconds_apart < (equal.seconds_apart or 0)


def test_short_rows_are_combined_on_a_cpu() -> None:
    """A model of 162 million parameters, rows of 56 tokens: a pass of one is mostly Python, whatever its format is read
    with, so that a step one by one takes twice as long and more."""
    machine = with_gpus(profile("amx16-h200"), "none")
    for read, dense in ((40e9, 0.26e12), (150e9, 2e12)):
        cpu = replace(machine.cpu, read_bytes=read, dense_flops=dense, dense_flops_f32=dense)
        shape = replace(open_shape("qwen3-30b-a3b"), layers=6, expert_layers=6, hidden=512, intermediate=256)
        shape = replace(shape, experts=64, top_k=4, vocabulary=6400, embedding=6400 * 512, rest_per_layer=690_000)
        shape = replace(shape, attention_width=1280, scores_width=1024, linears=shape.linears[:24])
        found = choose_grouping(
            settings_of(), PlanInputs(shape, replace(machine, cpu=cpu), ("cpu",), 4), RowLengths([(56, 30)] * 64, 56, 0)
        )
        assert found.batches is not None and found.batches >= 8, (read, found)
        assert found.seconds_apart is not None and found.seconds is not None
        assert found.seconds_apart > 2 * found.seconds


@pytest.mark.parametrize(
    "keys",
    [{"packing": True}, {"moe_aux_loss_coef": 0.01}, {"dataloader_drop_last": True}, {"neftune_noise_alpha": 5}],
    ids=lambda keys: next(iter(keys)),
)
def test_auto_keeps_batches_if_results_would_change(keys: dict[str, Any]) -> None:
    found = decide_grouping(settings_of(**keys), None, site(profile("amx16-h200")), None)
    assert found.tokens is None and found.note is None and found.why


def test_no_forecast_or_multiple_processes_keep_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decide_grouping(settings_of(), None, None, None).tokens is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert decide_grouping(settings_of(), None, site(profile("amx16-h200")), None).tokens is None
    assert decide_grouping(settings_of(kt_tokens_per_batch=4096), None, None, None).tokens == 4096, "who asks gets it"


def test_kt_plan_and_kt_train_choose_the_same_grouping(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(json.dumps(PUBLISHED))
    words = ["plan", "deepseek-v2-lite", "--train", str(tmp_path / "x.yaml"), "--machine", "amx16-h200", "--json"]
    found, off = (json.loads(CliRunner().invoke(app, [*words, *more]).output)["train"] for more in ((), (OFF,)))
    assert found["plan"]["work"]["tokens"] == 8192 and off["plan"]["work"]["tokens"] == 512
    assert found["notes"][-1].startswith("kt_tokens_per_batch: 8192, 16 batches of a step at once")
    assert found["plan"]["seconds"] < off["plan"]["seconds"] / 5 and not any(
        "per_batch" in note for note in off["notes"]
    )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which a tiny model's passes cost nothing but their launches, whatever this one is."""
    machine = with_gpus(profile("amx16-h200"), "none")
    cpu = replace(machine.cpu, dense_flops=1e15, dense_flops_f32=1e15, tile_flops=1e15, read_bytes=1e13)
    monkeypatch.setattr("ktransformers.plan.calibrate.this_machine", lambda: replace(machine, cpu=cpu))


def losses(watcher: RunRecorder) -> list[float]:
    return [step.values["loss"] for step in watcher.steps if "loss" in step.values]


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_combined_batches_give_the_same_adapter_and_a_note(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "auto", optim="sgd", learning_rate=0.5, precision="f32", max_steps=6)
    keys |= {"gradient_accumulation_steps": 4, "max_samples": 13}  # the second step of an epoch is short
    auto, off = RunRecorder(), RunRecorder()
    run(keys, auto)
    run(keys | {"output_dir": str(tmp_path / "off"), "kt_tokens_per_batch": "off"}, off)
    plan = auto.plans[0]
    tokens = plan.settings.experts.tokens_per_pass
    assert tokens == 8 * plan.data.longest == plan.forecast.nearest.work.tokens
    assert any(note.startswith(f"kt_tokens_per_batch: {tokens}, 4 batches of a step at once") for note in plan.notes)
    document = plan_document(plan)
    assert document["settings"]["experts"]["kt_tokens_per_batch"] == tokens == document["grouping"]["tokens"]
    assert document["grouping"]["asked"] == "auto" and document["forecast"]["work"]["tokens"] == tokens
    assert read_manifest(tmp_path / "auto")["kt_tokens_per_batch"] == tokens
    assert read_manifest(tmp_path / "off")["kt_tokens_per_batch"] is None
    assert off.plans[0].forecast.nearest.work.tokens == 2 * plan.data.longest
    assert len(losses(auto)) == 6 and losses(auto) == pytest.approx(losses(off), rel=1e-5)
    assert difference(adapter(tmp_path / "auto"), adapter(tmp_path / "off")) < 1e-5


@pytest.mark.usefixtures("quick")
def test_auto_grouping_of_pairs_keeps_accumulation_gradients(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "x", stage="dpo", dataset="style_neko_en_dpo", gradient_accumulation_steps=3)
    keys |= {"cutoff_len": 64, "max_samples": 5}
    plan = make_plan(read_settings(keys)).plan
    assert plan.data is not None and plan.settings.experts.tokens_per_pass == 2 * 6 * plan.data.longest
    assert difference(first_gradients(keys), first_gradients(keys | {"kt_tokens_per_batch": "off"})) < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_resumed_run_keeps_its_grouping(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = recipe(tiny, tmp_path / "whole", save_strategy="steps", save_steps=2, lora_dropout=0.1)
    whole, again = RunRecorder(), RunRecorder()
    run(keys, whole)
    tokens = whole.plans[0].settings.experts.tokens_per_pass
    checkpoint = tmp_path / "part" / "checkpoint-2"
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", checkpoint)
    assert json.loads((checkpoint / GROUPING_FILE).read_text()) == {"kt_tokens_per_batch": tokens}
    monkeypatch.setattr(grouping, "MIN_SPEEDUP", 1e9)  # today the plan would choose otherwise
    keys |= {"output_dir": str(tmp_path / "part")}
    asked = make_plan(read_settings(keys | {"kt_tokens_per_batch": 96})).plan
    assert asked.settings.experts.tokens_per_pass == 96, "who asks gets it"
    run(keys, again)
    plan = again.plans[0]
    assert tokens is not None and plan.settings.experts.tokens_per_pass == tokens
    assert any("as stored in" in note for note in plan.notes)
    assert losses(again) == losses(whole)[2:], "dropout included"
    anew = make_plan(read_settings(keys | {"overwrite_output_dir": True, "resume_from_checkpoint": False})).plan
    assert anew.settings.experts.kt_tokens_per_batch == "off"


def test_old_checkpoints_resume_batch_by_batch(tmp_path: Path) -> None:
    here = site(profile("amx16-h200"))
    assert decide_grouping(settings_of(), tmp_path, here, None).tokens is None
    (tmp_path / GROUPING_FILE).write_text('{"kt_tokens_per_batch": 2048}')
    assert decide_grouping(settings_of(), tmp_path, here, None).tokens == 2048
    assert decide_grouping(settings_of(kt_tokens_per_batch="off"), tmp_path, here, None).tokens is None
    (tmp_path / GROUPING_FILE).write_text("{}")
    with pytest.raises(InputError, match=GROUPING_FILE):
        decide_grouping(settings_of(), tmp_path, here, None)
