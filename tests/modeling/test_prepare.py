"""`kt model prepare`: a directory of links that stock `from_pretrained` opens with packed experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from ktransformers.cli.main import app
from ktransformers.ground.errors import InputError
from ktransformers.modeling import prepare
from ktransformers.nn import load_model
from tests.support.tiny_models import build, save, tokens

EXACT = 1e-4
UNKNOWN = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
    "gptq": {"quant_method": "gptq", "bits": 3, "group_size": 128},
}


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        actual: torch.Tensor = model(tokens()).logits
    return actual


def edit(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def kt(*words: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["model", "prepare", *map(str, words), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    actual: dict[str, Any] = json.loads(done.stdout)
    return actual


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_checkpoint_is_linked(dtype: torch.dtype, tmp_path: Path) -> None:
    source, out = save(build("qwen3_moe").to(dtype), tmp_path / "model", max_shard_size="60KB"), tmp_path / "new" / "kt"
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    actual = kt(source, "-o", out)
    assert actual == {
        "directory": str(out),
        "source": str(source),
        "model_type": "qwen3_moe",
        "quantised": None,
        "links": len(before) - 1,
    }
    assert {file.name for file in out.iterdir()} == before.keys()
    assert all(
        file.is_symlink() and file.samefile(source / file.name) for file in out.iterdir() if file.suffix != ".json"
    )
    assert not (out / "config.json").is_symlink()
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    assert [entry.name for entry in out.parent.iterdir()] == ["kt"]  # nothing half-written beside it
    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert sum(hasattr(module, "kt") for module in plain.modules()) == 2
    want = logits(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32))
    torch.testing.assert_close(logits(plain), want, rtol=2e-3, atol=2e-3)
    assert torch.equal(logits(load_model(out, dtype=torch.float32)), logits(plain))


@pytest.mark.parametrize("method", UNKNOWN)
def test_unsupported_quantisation_is_refused_by_name(method: str, tmp_path: Path) -> None:
    """Supported formats are in test_load_formats.py."""
    source, out = save(build("qwen3_moe"), tmp_path / "model"), tmp_path / "kt"
    edit(source, quantization_config=UNKNOWN[method])
    with pytest.raises(InputError, match=f"a checkpoint quantised with '{method}'"):
        prepare.prepare(source, out)
    assert not out.exists()
    edit(source, quantization_config={"quant_method": "kt", "source": UNKNOWN[method]})
    for load in (load_model, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(InputError, match=f"a checkpoint quantised with '{method}'"):
            load(source)


def test_kimi_k2_becomes_deepseek_v3(tmp_path: Path) -> None:
    model = build("deepseek_v3")
    source, out = save(model, tmp_path / "model"), tmp_path / "kt"
    edit(source, model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"})
    assert kt(source, "--out", out)["model_type"] == "deepseek_v3"
    words = json.loads((out / "config.json").read_text())
    assert words["architectures"] == ["DeepseekV3ForCausalLM"] and "auto_map" not in words
    for actual in (
        AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32),
        load_model(out, dtype=torch.float32),
    ):
        torch.testing.assert_close(logits(actual), logits(model), rtol=EXACT, atol=EXACT)


def test_quantisation_inside_text_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of Kimi-K2.5: text_config contains the quantisation and the unknown model type."""
    words = {
        "model_type": "kimi_k25",
        "text_config": {"model_type": "kimi_k2", "quantization_config": {"quant_method": "compressed-tensors"}},
    }
    left, taken = prepare.split_quantisation(words)
    assert taken == {"quant_method": "compressed-tensors"}
    assert "quantization_config" in words["text_config"]  # the given words are left alone
    for known, expected in (
        (True, {"model_type": "kimi_k25", "text_config": {"model_type": "deepseek_v3"}}),
        (False, {"model_type": "deepseek_v3"}),
    ):
        monkeypatch.setattr(prepare, "_is_stock", lambda _, known=known: known)
        assert prepare.to_stock_config(left) == expected


def test_kimi_k25_loads_its_text_model_if_transformers_lacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text model alone, as deepseek_v3, from files with a vision tower; by load_model and from_pretrained."""
    monkeypatch.setattr(prepare, "_is_stock", lambda _: False)
    model = build("deepseek_v3")
    source, out = save(model, tmp_path / "model"), tmp_path / "kt"
    words = json.loads((source / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (source / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": words}))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(source / "model.safetensors").items()}
    assert "language_model.model.layers.1.mlp.experts.0.up_proj.weight" in tensors
    tower = {"vision_tower.encoder.weight": torch.zeros(2, 2), "mm_projector.proj.0.weight": torch.zeros(2, 2)}
    save_file(tensors | tower, source / "model.safetensors")
    assert kt(source, "-o", out)["model_type"] == "deepseek_v3"
    for actual in (
        load_model(source, dtype=torch.float32),
        load_model(out, dtype=torch.float32),
        AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32),
    ):
        torch.testing.assert_close(logits(actual), logits(model), rtol=EXACT, atol=EXACT)


def test_existing_target_and_prepared_source_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = save(build("qwen3_moe"), tmp_path / "model"), tmp_path / "kt"
    with pytest.raises(InputError, match=r"nowhere: given no directory with a config\.json"):
        prepare.prepare(tmp_path / "nowhere", out)
    out.mkdir()
    with pytest.raises(InputError, match="kt: given something that exists, expected a new directory"):
        prepare.prepare(source, out)
    assert list(out.iterdir()) == []
    out.rmdir()
    prepare.prepare(source, out)
    with pytest.raises(InputError, match="prepared already"):
        prepare.prepare(out, tmp_path / "again")
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "config.json").write_text("[1]")
    with pytest.raises(InputError, match=r"given a JSON list, expected the model's config\.json, a JSON object"):
        prepare.prepare(tmp_path / "words", tmp_path / "again")

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare.prepare(source, tmp_path / "again")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["kt", "model", "words"]


def test_links_of_a_relative_source_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(build("qwen3_moe"), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    prepare.prepare("model", "kt")
    monkeypatch.chdir("/")
    assert load_file(tmp_path / "kt" / "model.safetensors")
