"""`kt model check` on tiny releases: whole ones, and one fault of every kind, each named in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ktransformers.plan import open_shape
from ktransformers.quant.model_check import check_model, layers_that_fit
from tests.support.quantised_models import release
from tests.support.tiny_models import build, save

TOKENIZER = Path(__file__).parents[1] / "data" / "minimind_6400"
PARTS = ["files", "names and shapes", "scales", "tokenizer", "template", "numbers"]


def with_tokenizer(directory: Path) -> Path:
    for file in TOKENIZER.glob("*.json"):
        shutil.copy(file, directory / file.name)
    return directory


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("check") / "tiny"
    save(build("qwen3_moe", vocab_size=6400, num_hidden_layers=3, eos_token_id=2), directory)
    return with_tokenizer(directory)


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "tiny"))


def faults(directory: Path, layers: int | None = None) -> dict[str, tuple[str, ...]]:
    return {result.name: result.faults for result in check_model(directory, layers)}


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = next(directory.glob("*.safetensors"))
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_whole_release_has_no_faults(whole: Path) -> None:
    results = list(check_model(whole, 2))
    assert [result.name for result in results] == PARTS
    assert not [fault for result in results for fault in result.faults]
    assert "3 layers of experts in bf16" in results[1].detail
    assert "the first 2 of 3 layers; 20 new tokens" in results[-1].detail


def test_a_quantized_release_is_compared_after_dequantizing(tmp_path: Path) -> None:
    directory = tmp_path / "quantized"
    directory.mkdir()
    release(directory, "fp8 blocks")
    results = {result.name: result for result in check_model(with_tokenizer(directory))}
    assert "fp8" in results["names and shapes"].detail and "tensors of scales" in results["scales"].detail
    assert [name for name, result in results.items() if result.faults] == ["tokenizer"]  # its vocabulary is tiny
    assert "from stock transformers" in results["numbers"].detail


def test_scales_that_are_not_finite_are_named(tmp_path: Path) -> None:
    directory = tmp_path / "quantized"
    directory.mkdir()
    release(directory, "fp8 blocks")
    names: list[str] = []

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        names.append(next(name for name in tensors if name.endswith("weight_scale_inv")))
        tensors[names[0]][0] = float("nan")

    change(directory, edit)
    assert faults(directory)["scales"] == (f"{names[0]}: a scale that is not finite",)


def test_missing_and_misshapen_tensors_are_named(copied: Path) -> None:
    norm, query = "model.layers.1.input_layernorm.weight", "model.layers.2.self_attn.q_proj.weight"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[norm]
        tensors[query] = tensors[query][:8].clone()

    change(copied, edit)
    assert faults(copied)["names and shapes"] == (f"{query}: shape [8, 64], not [64, 64]", f"{norm}: no such tensor")


def test_a_missing_expert_is_named(copied: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[next(name for name in tensors if "experts" in name)]

    change(copied, edit)
    (fault,) = faults(copied)["names and shapes"]
    assert "experts" in fault


def test_other_numbers_than_stock_transformers_are_a_fault(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktransformers.quant import model_check

    stock = model_check._stock_model

    def other(view: Path) -> Any:
        model = stock(view)
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        return model

    monkeypatch.setattr(model_check, "_stock_model", other)
    (fault,) = faults(copied, 1)["numbers"]
    assert "log-probabilities differ from stock transformers" in fault


def test_tokenizer_beyond_the_vocabulary_is_a_fault(tmp_path: Path) -> None:
    directory = tmp_path / "small"
    save(build("qwen3_moe"), directory)
    assert "the model has 96" in faults(with_tokenizer(directory))["tokenizer"][0]


def test_layers_that_fit_include_experts(whole: Path) -> None:
    shape = open_shape(str(whole))
    assert layers_that_fit(shape, 0) == 3
    assert layers_that_fit(shape, 2) == 3
