"""`kt train` as a user calls it: dry runs of every recipe, the plan as text and JSON, errors without a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ktransformers.cli.train import sft
from ktransformers.ground import system
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import RECIPES as PACKAGE_RECIPES
from ktransformers.ground.files import find_example
from ktransformers.operators.rules import find_rules
from ktransformers.serve.yaml_keys import check_keys
from ktransformers.train.plan import make_plan, plan_document
from ktransformers.train.resolve import read_settings
from ktransformers.train.settings import SECTION_OF_KEY
from tests.support.training import recipe
from tests.support.training_files import SEEDS

pytest.importorskip("trl")

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPES = sorted((ROOT / "examples").glob("*_*.yaml"))  # of `kt train`; demo.yaml is a loop
SHIPPED_RECIPES = sorted(file.name for file in (PACKAGE_RECIPES / "train_lora").glob("*_kt.yaml"))
FAMILY = {
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "deepseek2": "deepseek_v2",
    "deepseek3": "deepseek_v3",
    "kimi": "deepseek_v3",
    "qwen3_5": "qwen3_5_moe_text",
    "smollm2": "mixtral",
}


def family_of(name: str) -> str:
    return next((family for start, family in FAMILY.items() if name.startswith(start)), "qwen3_moe")


def test_every_model_and_stage_has_a_recipe() -> None:
    models = ("deepseek_v2_lite", "deepseek_v3", "qwen3_30b", "qwen3_235b", "qwen3_5", "kimi_k2")
    assert {path.stem for path in RECIPES} >= {f"{model}_{stage}" for model in models for stage in ("sft", "dpo")}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid(path: Path, model_of: Callable[[str], Path], tmp_path: Path) -> None:
    """As they stand, with the model still on the hub, and on a tiny model of the same family."""
    output = f"output_dir={tmp_path / 'out'}"
    if "/" in yaml.safe_load(path.read_text())["model_name_or_path"]:
        bare = make_plan(read_settings(path, [output]))
        assert bare.directory is None and "not on this machine" in bare.plan.notes[-1]
    words = [output, f"model_name_or_path={model_of(family_of(path.stem))}", "max_samples=8"]
    plan = make_plan(read_settings(path, words)).plan
    assert plan.data is not None and plan.data.train_rows > 0 and plan.data.steps > 0
    assert plan.targets is not None and plan.targets.parameters and plan.targets.modules
    assert plan.trained_numbers


@pytest.mark.parametrize("name", SEEDS)
def test_published_files_are_planned(
    name: str, model_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "forced_dense_products", "bfloat16")  # as on a machine where bf16: true is fast
    words = [f"model_name_or_path={model_of(family_of(name))}", f"output_dir={tmp_path / 'out'}"]
    if "alpaca_en_demo" in SEEDS[name]["dataset"]:
        with pytest.raises(InputError, match="get it from"):
            make_plan(read_settings(SEEDS[name], words))
        (tmp_path / "alpaca.json").write_text('[{"instruction": "a", "input": "", "output": "b"}]')
        entry = {"alpaca_en_demo": {"file_name": "alpaca.json"}}
        (tmp_path / "dataset_info.json").write_text(json.dumps(entry))
        words.append(f"dataset_dir={tmp_path}")
    plan = make_plan(read_settings(SEEDS[name], words)).plan
    assert plan.data is not None and plan.dtype == "bfloat16"


def invoke(*words: str) -> Any:
    return CliRunner().invoke(sft, ["train", *words])


def test_dry_run_prints_the_plan(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(recipe(tiny, tmp_path / "out", chunk_size=512)))
    done = invoke(str(file), "lora_rank=16", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "identity: 16 rows" in done.output and "«" in done.output
    assert "chunk_size: has no effect" in done.output and "gate_up_proj" in done.output
    assert not (tmp_path / "out").exists(), "nothing is written"
    done = invoke(str(file), "lora_rank=16", "--dry-run", "--json")
    plan = json.loads(done.output)
    assert list(plan.pop("summary")) == ["fits", "time", "memory"]
    assert plan["settings"]["lora"]["lora_rank"] == 16
    assert plan["data"]["steps"] == 4 and plan["settings"]["trainer"]["max_steps"] == 4
    assert plan == json.loads(json.dumps(plan_document(make_plan(read_settings(file, ["lora_rank=16"])).plan)))


def test_run_prints_progress_and_writes_the_adapter(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(recipe(tiny, tmp_path / "out", max_steps=2)))
    done = invoke(str(file))
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if line.startswith("step ")]
    assert len(lines) == 2 and "loss" in lines[0] and "left" in lines[0] and "tokens/s" in lines[1]
    assert "trained  24 tensors" in done.output
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_published_files_run(
    name: str, model_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the file, on a tiny model of the family, with few and short rows; data that may not be shipped is there."""
    monkeypatch.chdir(tmp_path)
    if "alpaca_en_demo" in SEEDS[name]["dataset"]:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "alpaca.json").write_text('[{"instruction": "Say sea.", "input": "", "output": "sea!"}]')
        (tmp_path / "data" / "dataset_info.json").write_text('{"alpaca_en_demo": {"file_name": "alpaca.json"}}')
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(SEEDS[name], sort_keys=False))
    done = invoke(
        "x.yaml", f"model_name_or_path={model_of(family_of(name))}", "max_samples=4", "cutoff_len=96", "logging_steps=1"
    )
    assert done.exit_code == 0, done.output
    output = tmp_path / SEEDS[name]["output_dir"]
    lines = [json.loads(line) for line in (output / "trainer_log.jsonl").read_text().splitlines()]
    assert [line["current_steps"] for line in lines if "loss" in line] == [1, 2, 3], "an epoch is one step"
    assert (output / "training_loss.png").is_file() and (output / "kt_manifest.json").is_file()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_name_or_path": "/no/where"}, "which does not exist"),
        ({"template": "qwen4"}, "`qwen`, perhaps"),
        ({"lora_target": "p_proj"}, "lora_target"),
        ({"lr_scheduler_type": "zigzag"}, "zigzag"),
        ({"dataset": "identty"}, "`identity`, perhaps"),
        ({"stage": "dpo"}, "identity.json, line 2"),
        ({"dataset": "dpo_en_demo"}, "dpo_en_demo.json, line 2"),
        ({"resume_from_checkpoint": "/no/where"}, "checkpoint-N folder"),
        ({"val_size": 100}, "fewer than the 16 rows"),
        ({"eval_strategy": "steps"}, "give val_size or eval_dataset"),
    ],
)
def test_dry_run_reports_errors_of_a_run(keys: dict[str, Any], message: str, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        make_plan(read_settings(recipe(tiny, tmp_path / "out") | keys))
    assert message in str(error.value)


def test_packing_with_linear_attention_is_refused(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="given true for qwen3_5_moe_text, which has layers of type linear_attention"):
        make_plan(read_settings(recipe(model_of("qwen3_5_moe_text"), tmp_path / "out", packing=True)))


def test_docs_list_every_key() -> None:
    pages = (ROOT / "docs" / "train.md").read_text() + (ROOT / "docs" / "preference.md").read_text()
    assert [key for key in SECTION_OF_KEY if f"`{key}`" not in pages] == []


@pytest.mark.parametrize("name", SHIPPED_RECIPES)
def test_recipes_of_the_package_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names of the guides, without a checkout; the keys of inference are those that a server reads."""
    monkeypatch.chdir(tmp_path)
    settings = read_settings(f"examples/train_lora/{name}", [f"output_dir={tmp_path / 'out'}"])
    rule = find_rules(settings.place.kt_optimize_rule)
    assert rule is not None and rule.shipped
    file = find_example(f"examples/inference/{name}")
    keys = yaml.safe_load(file.read_text())
    check_keys(file, keys)
    assert (
        keys["adapter_name_or_path"]
        == yaml.safe_load((PACKAGE_RECIPES / "train_lora" / name).read_text())["output_dir"]
    )
    assert keys["template"] == settings.data.template
    assert Path(keys["kt_optimize_rule"]).name == rule.path.name
