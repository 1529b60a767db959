"""A `.gguf` file, by path or by registered name, is a model for `kt run`, `kt train`, `kt eval` and `kt serve`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from ktransformers.checkpoint.gguf_directory import given_file, is_gguf_directory, model_directory
from ktransformers.cli.main import app
from ktransformers.ground.errors import InputError
from ktransformers.nn import load_model
from tests.support.gguf_models import gguf_fields, to_gguf
from tests.support.loaded_models import SIZES
from tests.support.releases import write_gguf
from tests.support.tiny_models import build, logits

for package in ("trl", "datasets", "fastapi", "gguf"):
    pytest.importorskip(package)

TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] }}<|end|>{% endfor %}"


@pytest.fixture
def gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny qwen3_moe with a tokenizer of bytes, as llama.cpp's converter writes it."""
    from tokenizers.pre_tokenizers import ByteLevel

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    tokens = ["<|end|>", *sorted(ByteLevel.alphabet()), "ab"]
    model = build("qwen3_moe", **SIZES | {"vocab_size": len(tokens), "max_position_embeddings": 512})
    tokenizer: dict[str, Any] = {
        "model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": [3] + [1] * (len(tokens) - 1),
        "merges": ["a b"], "eos_token_id": 0,
    }  # fmt: skip
    fields = {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}
    fields |= gguf_fields(model.config, "qwen3moe") | {"tokenizer.chat_template": TEMPLATE}
    file = tmp_path / "models" / "tiny-Q8_0.gguf"
    file.parent.mkdir()
    write_gguf(file, "qwen3moe", fields, to_gguf(model, "qwen3moe", dict.fromkeys(("gate", "up", "down"), "Q8_0")))
    return file


def kt(*words: object) -> Any:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output + str(done.exception)
    return done


def test_directory_of_a_gguf_file_is_made_once(gguf_file: Path) -> None:
    directory = model_directory(gguf_file)
    assert is_gguf_directory(directory) and given_file(directory) == gguf_file
    assert (directory / gguf_file.name).is_symlink() and model_directory(gguf_file) == directory
    assert not [path for path in directory.parent.iterdir() if path.name.startswith(".")]
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.chat_template == TEMPLATE and tokenizer.decode(tokenizer("ab c").input_ids) == "ab c"
    whole = load_model(directory, dtype=torch.float32)
    torch.testing.assert_close(logits(whole), logits(load_model(gguf_file, dtype=torch.float32)))
    os.utime(gguf_file, ns=(1, 1))
    assert model_directory(gguf_file) != directory, "a file that was replaced"
    assert model_directory(gguf_file.parent) == gguf_file.parent, "a directory stays as it is"


def test_gguf_file_without_usable_tokenizer_is_refused(gguf_file: Path) -> None:
    data = gguf_file.read_bytes()
    gguf_file.write_bytes(data.replace(b"qwen2", b"other"))
    with pytest.raises(InputError, match="pre-tokenizer 'other'"):
        model_directory(gguf_file)


def test_gguf_file_is_run_trained_and_evaluated(gguf_file: Path, tmp_path: Path) -> None:
    asked = ("ab", "--max-tokens", 3, "--temperature", 0, "--json")
    by_path = json.loads(kt("run", gguf_file, *asked).stdout)
    assert by_path["prompt_tokens"] == len("u:") + 1 + 1
    kt("model", "add", gguf_file, "--name", "tiny-gguf")
    by_name = json.loads(kt("run", "tiny-gguf", *asked).stdout)
    assert by_name["content"] == by_path["content"]
    recipe = {
        "model_name_or_path": str(gguf_file), "dataset": "identity", "max_samples": 4, "cutoff_len": 64,
        "output_dir": str(tmp_path / "out"), "max_steps": 1, "per_device_train_batch_size": 1, "lora_rank": 2,
        "gradient_accumulation_steps": 1, "save_strategy": "no", "learning_rate": 1e-2,
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    kt("train", tmp_path / "recipe.yaml")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(gguf_file)
    assert json.loads(kt("run", tmp_path / "out", *asked).stdout)["prompt_tokens"] == by_path["prompt_tokens"]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"instruction": "a", "output": "b"}))
    task = {"name": "own", "title": "own", "kind": "generate", "data": "rows.jsonl", "metrics": ["loss"]}
    (tmp_path / "own.yaml").write_text(json.dumps(task))
    kt("eval", gguf_file, "--task", tmp_path / "own.yaml", "--adapter", f"out={tmp_path / 'out'}", "-o", tmp_path / "e")
    assert (tmp_path / "e" / "out" / "own" / "result.json").is_file()
