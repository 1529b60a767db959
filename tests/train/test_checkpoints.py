"""Checkpoints are verified before anything is loaded, and a directory of another recipe is not continued."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktransformers.ground.errors import InputError, KTError
from ktransformers.train.checkpoints import CHECKPOINT_MANIFEST_FILE, ResumePoint, find_problem, find_resume_point
from ktransformers.train.plan import make_plan
from ktransformers.train.recipe import make_recipe
from ktransformers.train.resolve import read_settings
from tests.support.training import RunRecorder, recipe
from tests.support.training_runs import adapter, difference, run

ROWS = [{"instruction": f"What is {n} plus one?", "output": f"It is {n + 1}."} for n in range(16)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "rows.json"
    file.write_text(json.dumps(ROWS))
    return file


@pytest.fixture(scope="module")
def saved(tiny: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keys of a finished run with checkpoint-2 and checkpoint-4."""
    output = tmp_path_factory.mktemp("saved") / "run"
    keys = recipe(tiny, output, dataset=str(data), save_strategy="steps", save_steps=2, lora_dropout=0.1)
    run(keys)
    return keys


@pytest.fixture
def copied(saved: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    output = tmp_path / "run"
    shutil.copytree(saved["output_dir"], output)
    return saved | {"output_dir": str(output)}


def resume_point(keys: dict[str, Any]) -> ResumePoint:
    return find_resume_point(read_settings(keys))


def flip(file: Path, at: int = -20) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "flipped adapter": ("adapter_model.safetensors", flip, "another checksum"),
    "flipped tokenizer": ("tokenizer.json", flip, "another checksum"),
    "truncated optimizer": ("optimizer.pt", truncate, "bytes, "),
    "empty state": ("trainer_state.json", lambda file: file.write_text(""), "has 0 bytes"),
    "no random state": ("rng_state.pth", Path.unlink, "rng_state.pth missing"),
    "no scheduler": ("scheduler.pt", Path.unlink, "scheduler.pt missing"),
    "no gradients": ("kt_gradients.json", Path.unlink, "kt_gradients.json missing"),
    "broken manifest": (CHECKPOINT_MANIFEST_FILE, truncate, "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_latest_checkpoint_is_named_and_the_last_whole_one_taken(copied: dict[str, Any], damage: str) -> None:
    output = Path(copied["output_dir"])
    assert resume_point(copied).checkpoint == output / "checkpoint-4"
    name, change, problem = DAMAGES[damage]
    change(output / "checkpoint-4" / name)
    point = resume_point(copied)
    assert point.checkpoint == output / "checkpoint-2" and point.damaged == (output / "checkpoint-4",)
    (note,) = point.notes
    assert note.startswith(f"{output / 'checkpoint-4'}: ") and problem in note
    for asked in ("checkpoint-4", "checkpoint-2"):
        explicit = copied | {"resume_from_checkpoint": str(output / asked)}
        if asked == "checkpoint-2":
            assert resume_point(explicit).checkpoint == output / asked
        else:
            with pytest.raises(InputError, match=r"resume_from_checkpoint: given .*checkpoint-4"):
                resume_point(explicit)


def test_run_goes_on_from_the_last_whole_checkpoint(copied: dict[str, Any], saved: dict[str, Any]) -> None:
    """It gives what the first run gave; the damaged checkpoint is kept under another name and not counted."""
    output, watcher = Path(copied["output_dir"]), RunRecorder()
    (output / "checkpoint-4" / "rng_state.pth").unlink()
    (output / "checkpoint-4").rename(output / "checkpoint-6")
    run(copied | {"save_total_limit": 2}, watcher)
    assert [step.step for step in watcher.steps if "loss" in step.values] == [3, 4]
    assert any("checkpoint-6: rng_state.pth missing; it is not used" in note for note in watcher.plans[0].notes)
    assert sorted(path.name for path in output.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-6.damaged",
    ]
    assert difference(adapter(output), adapter(Path(saved["output_dir"]))) < 1e-6


def test_without_a_whole_checkpoint_nothing_is_removed(copied: dict[str, Any]) -> None:
    output = Path(copied["output_dir"])
    flip(output / "checkpoint-4" / "optimizer.pt")
    (output / "checkpoint-2" / "optimizer.pt").unlink()
    for more in ({}, {"resume_from_checkpoint": True}):
        with pytest.raises(InputError, match=r"checkpoint-4: optimizer\.pt has .*; checkpoint-2: optimizer\.pt"):
            run(copied | more)
    assert (output / "checkpoint-4").is_dir() and (output / "adapter_model.safetensors").is_file()
    assert "starts over; 2 checkpoints" in resume_point(copied | {"overwrite_output_dir": True}).start


def test_checkpoints_without_a_manifest(copied: dict[str, Any]) -> None:
    """Those of earlier versions are parsed as far as possible, and the note says that this is all."""
    last = Path(copied["output_dir"]) / "checkpoint-4"
    (last / CHECKPOINT_MANIFEST_FILE).unlink()
    point = resume_point(copied)
    assert point.checkpoint == last and "not verified" in point.notes[0] and point.recipe is None
    for name, change in (("optimizer.pt", truncate), ("adapter_model.safetensors", truncate), ("rng_state.pth", flip)):
        content = (last / name).read_bytes()
        at = content.index(b"numpy") if name == "rng_state.pth" else -20
        change(last / name) if change is truncate else flip(last / name, at)
        assert name in (find_problem(last) or ""), name
        (last / name).write_bytes(content)
    assert find_problem(last) is None
    (last / "rng_state.pth").unlink()
    assert find_problem(last) == "rng_state.pth missing"


def test_checkpoint_of_the_model_alone_is_not_resumed(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "x", save_strategy="steps", save_steps=1, max_steps=1, save_only_model=True)
    run(keys)
    with pytest.raises(InputError, match=r"save_only_model: true\).*overwrite_output_dir: true"):
        resume_point(keys)


def test_best_checkpoint_is_verified_before_it_is_loaded(tiny: Path, tmp_path: Path) -> None:
    class Damaging(RunRecorder):
        def on_step(self, progress: Any) -> None:
            if progress.step == 2 and "loss" in progress.values:
                flip(tmp_path / "x" / "checkpoint-1" / "adapter_model.safetensors")

    keys = recipe(tiny, tmp_path / "x", val_size=2, max_steps=2, save_strategy="steps", save_steps=1)
    keys |= {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_only_model": True}
    keys |= {"greater_is_better": True, "learning_rate": 1e-2}  # the loss falls: the first is the "best"
    with pytest.raises(KTError, match=r"the best checkpoint: adapter_model\.safetensors has another checksum"):
        run(keys, Damaging())


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "rate": ({"learning_rate": 1e-2}, "learning_rate: 0.001, now 0.01"),
    "seed": ({"seed": 7}, "seed: 42, now 7"),
    "rank": ({"lora_rank": 8}, "lora_rank: 4, now 8; lora_alpha: 8, now 16"),
    "schedule": ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type: linear, now cosine"),
    "batch": ({"gradient_accumulation_steps": 4}, "rows of a step: 4, now 8"),
    "rows": ({"max_samples": 8}, r"max_samples: 16, now 8; rows: 16 \(sha256 \w+\), now 8"),
    "template": ({"template": "qwen3_nothink"}, "template: nothing, now qwen3_nothink; rows: "),
    "data": ({"dataset": "identity"}, r"dataset: .*rows\.json.*, now .*identity.*; rows: "),
}


@pytest.mark.parametrize("change", CHANGES)
def test_directory_of_another_recipe_is_refused_with_the_difference(saved: dict[str, Any], change: str) -> None:
    keys, words = CHANGES[change]
    with pytest.raises(InputError, match=rf"output_dir: given .*another recipe: {words}"):
        make_plan(read_settings(saved | keys))


def test_another_recipe_goes_on_if_told_to(saved: dict[str, Any], tmp_path: Path) -> None:
    changed = saved | {"learning_rate": 1e-2, "max_steps": 5}
    with pytest.raises(InputError, match=r"overwrite_output_dir: true .*; resume_from_checkpoint: .*-4 goes on"):
        make_plan(read_settings(changed | {"resume_from_checkpoint": True}))
    anew = make_plan(read_settings(changed | {"overwrite_output_dir": True})).plan
    assert anew.start.startswith("starts over")
    watcher = RunRecorder()
    named = {"resume_from_checkpoint": f"{saved['output_dir']}/checkpoint-4", "output_dir": str(tmp_path / "x")}
    run(changed | named, watcher)
    assert [step.step for step in watcher.steps if "loss" in step.values] == [5]
    assert any("goes on with this one: learning_rate: 0.001, now 0.01" in note for note in watcher.plans[0].notes)


def test_another_number_of_processes_is_the_same_recipe_if_a_step_has_the_same_rows(saved: dict[str, Any]) -> None:
    prepared = make_plan(read_settings(saved))
    assert prepared.directory is not None and prepared.split is not None and prepared.resume.recipe is not None
    settings = read_settings(saved | {"gradient_accumulation_steps": 1})
    of_two = make_recipe(settings, prepared.directory, prepared.split, processes=2)
    assert prepared.resume.recipe.differences(of_two) == []
    of_four = make_recipe(settings, prepared.directory, prepared.split, processes=4)
    assert prepared.resume.recipe.differences(of_four) == ["rows of a step: 4, now 8"]


def test_what_does_not_change_results_does_not_change_the_recipe(
    saved: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    same = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "kt_num_threads": 1, "max_samples": 99}
    same |= {
        "max_steps": 9,
        "save_steps": 3,
        "logging_steps": 5,
        "dataset": str(shutil.copy(data, tmp_path / "y.json")),
    }
    assert "checkpoint-4" in make_plan(read_settings(saved | same)).plan.start
    rows = [*ROWS[:-1], ROWS[-1] | {"output": "It is another one."}]
    (tmp_path / "y.json").write_text(json.dumps(rows))
    with pytest.raises(InputError, match=r"rows: 16 \(sha256 \w+\), now 16 \(sha256"):
        make_plan(read_settings(saved | same))
