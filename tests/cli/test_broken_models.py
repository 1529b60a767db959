"""A broken config.json, generation_config.json or tokenizer file: every verb ends with one line that names the file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktransformers.ground.errors import InputError
from ktransformers.modeling.pretrained import read_generation_config, read_pretrained_config, read_tokenizer
from tests.support.cli import RunKt
from tests.support.tiny_models import build, save
from tests.support.training import TOKENIZER

for package in ("trl", "datasets"):
    pytest.importorskip(package)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save(build("qwen3_moe", vocab_size=6400, max_position_embeddings=512), folder)
    for file in TOKENIZER.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "model")
    return tmp_path / "model"


def set_keys(**values: Any) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def cut(file: Path) -> None:
    file.write_text(file.read_text()[: file.stat().st_size // 2])


def as_list(file: Path) -> None:
    file.write_text("[]")


def binary(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00\x81" * 40)


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    ("config.json", cut),
    ("config.json", as_list),
    ("config.json", set_keys(hidden_size="many")),
    ("config.json", set_keys(model_type="nosuch")),
    ("config.json", set_keys(head_dim=0)),
    ("tokenizer.json", cut),
    ("tokenizer.json", binary),
    ("tokenizer.json", set_keys(model={"type": "Nope"})),
    ("tokenizer.json", set_keys(added_tokens=[{"id": 10**9, "content": "<far>"}])),
    ("tokenizer_config.json", as_list),
    ("tokenizer_config.json", set_keys(tokenizer_class=7, added_tokens_decoder=5)),
    ("generation_config.json", cut),
    ("generation_config.json", set_keys(eos_token_id={})),
    ("generation_config.json", set_keys(temperature="hot")),
]
# Files that a verb reads; `kt quant` copies the others, if they are JSON.
VERBS: dict[str, list[str]] = {
    "train": ["train", "recipe.yaml", "--dry-run"],
    "run": ["run", "model", "hello"],
    "serve": ["serve", "model"],
    "eval": ["eval", "model", "--task", "arithmetic", "--limit", "1"],
    "quant": ["quant", "model", "-o", "packed", "--format", "int8"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_broken_file_is_named(verb: str, model: Path, kt: RunKt) -> None:
    rows = [{"instruction": "Say yes", "output": "Yes."}] * 4
    Path("rows.json").write_text(json.dumps(rows))
    keys = {"model_name_or_path": str(model), "dataset": "rows.json", "output_dir": "out", "max_steps": 1}
    Path("recipe.yaml").write_text(json.dumps(keys))
    for name, damage in DAMAGES:
        if verb == "serve" and damage is not cut:  # opens the model as `kt run` does
            continue
        if verb == "quant" and name != "config.json" and damage not in (cut, as_list, binary):
            continue
        content = (model / name).read_bytes()
        damage(model / name)
        done = kt(*VERBS[verb])
        assert done.code == 1 and re.search(rf"{model.name}/{re.escape(name)}[:,] ", done.error), (name, done.error)
        assert "\n" not in done.error and len(done.error) < 600, done.error
        (model / name).write_bytes(content)
    assert not Path("out").exists() and not Path("packed").exists()


def test_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer: given .*nowhere .*expected a directory, or a hub id"):
        read_tokenizer(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"config\.json: given .*, expected a configuration"):
        read_tokenizer(tmp_path)
    assert read_generation_config(tmp_path) is None


def test_whole_files_are_read(whole: Path) -> None:
    assert len(read_tokenizer(whole)) == 6400
    generation = read_generation_config(whole)
    assert generation is not None


def test_wrong_values_are_named(model: Path) -> None:
    set_keys(hidden_act="swoosh")(model / "config.json")
    with pytest.raises(InputError, match=r"config\.json: hidden_act: given 'swoosh', expected "):
        read_pretrained_config(model)
    for name, value in {"temperature": -1, "top_p": 1.5, "top_k": "50", "repetition_penalty": True}.items():
        set_keys(**{name: value})(model / "generation_config.json")
        with pytest.raises(InputError, match=rf"generation_config\.json: {name}: given .*, expected a number from"):
            read_generation_config(model)
        set_keys(**{name: None})(model / "generation_config.json")
    assert read_generation_config(model) is not None
