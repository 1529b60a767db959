"""Short names of released models: one file, known to every verb that takes a model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ktransformers.ground import model_registry
from ktransformers.ground.errors import InputError
from ktransformers.modeling.spec import locate_model
from ktransformers.plan import model_shape, open_shape, shipped_shapes
from ktransformers.train.resolve import read_settings
from tests.support.cli import RunKt, write_model

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ("m2", "m2.1", "k2", "k2-thinking", "v3", "v3.1", "v3.2", "r1", "glm-4.7", "glm-5", "qwen3-30b")


def test_names_of_the_guides_are_known_and_unique() -> None:
    names = model_registry.known_names()
    assert set(GUIDES) <= set(names) and len(set(names)) == len(names)
    repos = [repo for known in model_registry.known_models() for repo in known.releases.values()]
    assert len(set(repos)) == len(repos) and all(repo.count("/") == 1 for repo in repos)
    for known in model_registry.known_models():
        assert known.shape is None or known.shape in shipped_shapes(), known.name


def test_unserved_families_are_those_of_the_page() -> None:
    """The table of docs/models.md, which other tests hold to the code."""
    rows = re.findall(r"^\| (\w+) \|(.*)\|$", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE)
    served = {family: cells.split("|")[-2].strip() for family, cells in rows if cells.count("|") == 4}
    for known in model_registry.known_models():
        said = f"no: {known.unserved}" if known.unserved else ("batched", "one sequence at a time")
        assert served[known.type] in said, known.name


def test_short_name_is_the_download_of_its_hub_id(kt: RunKt, tmp_path: Path) -> None:
    assert model_registry.resolve("M2.1") == "MiniMaxAI/MiniMax-M2.1"
    directory = write_model(tmp_path / "disk" / "some-name")
    kt("model", "add", str(directory), "--repo", "zai-org/GLM-4.7-FP8")
    assert model_registry.resolve("glm-4.7") == str(directory)  # any release of it
    assert model_registry.resolve("zai-org/GLM-4.7") == "zai-org/GLM-4.7"  # a hub id is that one alone
    assert model_registry.portable_name("r1") == "deepseek-ai/DeepSeek-R1-0528"
    assert model_registry.complete("k2") == [
        "k2",
        "k2-thinking",
        "k2.5",
        "k2.6",
        "k2.7",
    ] and "m2" not in model_registry.complete("")
    kt("model", "add", str(write_model(tmp_path / "disk" / "m2")))
    assert model_registry.resolve("m2") == str(tmp_path / "disk" / "m2")  # a name of the user's comes first


def test_a_recipe_may_name_one(kt: RunKt, tmp_path: Path) -> None:
    keys = {"model_name_or_path": "m2", "stage": "sft", "do_train": True, "finetuning_type": "lora"}
    keys |= {"dataset": "x", "output_dir": str(tmp_path / "out"), "template": "qwen3"}
    assert read_settings(keys).model.model_name_or_path == "MiniMaxAI/MiniMax-M2"


def test_unknown_names_come_with_near_ones(kt: RunKt) -> None:
    for given, near in (("k2-thinkin", "k2-thinking"), ("deepseek-v31", "deepseek-v3.1")):
        with pytest.raises(InputError, match=rf"did you mean {re.escape(near)}"):
            locate_model(given)
        with pytest.raises(InputError, match=rf"did you mean {re.escape(near)}"):
            open_shape(given)
    assert "did you mean minimax-m2.5" in kt("model", "download", "minimax-m25").error
    assert "`kt model download m2` fetches it" in kt("model", "info", "m2").error
    with pytest.raises(InputError, match="`kt model known` list the names"):
        locate_model("nothing-like-it-at-all")


def test_shapes_have_the_format_of_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_shape("k2").stored == "fp8" and open_shape("k2-thinking").stored == "int4"
    assert open_shape("glm-4.7").stored == "bf16" and open_shape("zai-org/GLM-4.7-FP8").stored == "fp8"
    assert open_shape("k2-thinking").name == open_shape("kimi-k2").name
    assert open_shape("gpt-oss-20b").stored == open_shape("openai/gpt-oss-120b").stored == "mxfp4"
    without = replace(model_registry.known_models()[0], shape=None)
    monkeypatch.setattr(model_shape, "known_model", lambda _: without)
    with pytest.raises(InputError, match="whose shape is not shipped"):
        open_shape("m2-next")


def test_list_of_known_models(kt: RunKt) -> None:
    documents = {entry["name"]: entry for entry in json.loads(kt("model", "known", "--json").out)}
    assert documents["v3"]["memory"]["host"] == pytest.approx(658.7e9, rel=0.001)
    assert documents["v3"]["memory"]["host_int4"] < documents["v3"]["memory"]["host"]
    assert all(entry["memory"] is not None for entry in documents.values())
    shown = kt("model", "known").out
    assert re.search(r"^m2 +228\.3 GB +129\.2 GB +16\.5 GB +fp8 +MiniMaxAI/MiniMax-M2$", shown, re.MULTILINE)
    assert "refuses" not in shown
