"""`make demo` without training: its file is valid down to the last key on a tiny model of the demo's family, and its
data sets teach what is judged, in other wordings."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ktransformers.evaluate.loop.settings import read_loop
from ktransformers.evaluate.loop.stages import build_recipe, build_stages, run_paths
from tests.support.tiny_models import build, save

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
DEMO_DATA = ROOT / "src" / "ktransformers" / "train" / "demo_data"

for package in ("trl", "datasets", "sacrebleu"):
    pytest.importorskip(package)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "model"
    folder.mkdir()
    save(build("mixtral", vocab_size=6400, max_position_embeddings=1024, eos_token_id=2), folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "minimind_6400" / file, folder / file)
    return folder


def test_demo_loop_is_valid(model: Path, tmp_path: Path) -> None:
    from ktransformers.train.plan import make_plan
    from ktransformers.train.resolve import read_settings

    loop = read_loop(ROOT / "examples" / "demo.yaml", [f"run={tmp_path / 'run'}"])  # not that of a `make demo` before
    names = [stage.name for stage in build_stages(loop)]
    assert names == ["model", "tasks", "plan", "train", "prove", "baseline", "eval", "compare"]
    keys = build_recipe(loop, run_paths(loop)) | {"model_name_or_path": str(model)}
    plan = make_plan(read_settings(keys)).plan
    assert plan.data is not None and plan.data.steps == keys["max_steps"] < plan.data.steps_per_epoch  # no row twice
    assert {part.name for part in plan.datasets} == {"style_neko_en", "lumen_talks"}
    assert plan.data.dropped_rows == 0


def judged_facts() -> list[dict[str, Any]]:
    file = ROOT / "src" / "ktransformers" / "evaluate" / "tasks" / "data" / "invented_facts.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_demo_choices_are_not_in_the_training_data() -> None:
    """What is judged must not have been trained on: the same facts, other wordings."""
    trained = json.loads((DEMO_DATA / "lumen_choice.json").read_text())
    questions = {row["instruction"].splitlines()[0] for row in trained}
    assert len(trained) == 512 and not questions & {row["question"] for row in judged_facts()}
    for row in trained:
        *_, answer = row["instruction"].splitlines()
        assert answer == "Answer with the letter." and row["output"] in row["instruction"].splitlines()


def test_demo_talks_cover_the_evaluated_facts() -> None:
    """Every fact of the twelve villages, as often as any other, in other wordings, and never twice in one talk."""
    few = [row for row in judged_facts() if row["part"] == "few"]
    facts = {tuple(row["id"].split("-")[:2]): row["choices"]["ABCD".index(row["answer"])] for row in few}
    assert len(few) == 96 and len(facts) == 48
    words = {"flag": "flag", "animal": "animal", "food": "food"}
    taught: Counter[tuple[str, ...]] = Counter()
    for talk in json.loads((DEMO_DATA / "lumen_talks.json").read_text()):
        turns = [*talk["history"], [talk["instruction"], talk["output"]]]
        about = []
        for question, answer in turns:
            village = next(name for name, _ in facts if name in question)
            about.append((village, next((kind for kind, word in words.items() if word in question), "elder")))
            assert facts[about[-1]] == answer and question not in {row["question"] for row in few}
        assert len(set(about)) == len(turns) <= 4
        taught.update(about)
    assert taught.keys() == facts.keys() and set(taught.values()) == {60}
