"""Stock PEFT and what we write: it loads both of its formats, and its own files survive a trip through every other."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from ktransformers.adapters import convert
from tests.support.stock_peft_models import LOADS_PER_EXPERT, PARAMETERS, TARGETS, build_model, logits


def trained(family: str, directory: Path, rank: int = 4, **options: Any) -> torch.Tensor:
    """An adapter as PEFT saves it (all factors random), with the model's config.json beside; returns its logits."""
    model = build_model(family)
    model.config.save_pretrained(directory / "model")
    config = LoraConfig(r=rank, lora_alpha=2 * rank, init_lora_weights=False, **(TARGETS[family] | options))
    peft = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_((torch.randn_like(parameter) * 0.1).bfloat16())
    peft.save_pretrained(directory / "peft")
    return logits(peft)


def loaded(family: str, directory: Path) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        warnings.filterwarnings("error", message=".*unexpected keys.*")
        return logits(PeftModel.from_pretrained(build_model(family), directory).eval())


@pytest.mark.parametrize("family", list(TARGETS))
def test_peft_adapter_survives_round_trip(family: str, tmp_path: Path) -> None:
    expected = trained(family, tmp_path)
    assert float((expected - logits(build_model(family))).abs().max()) > 0.05  # the adapter matters
    model = str(tmp_path / "model")
    saved = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    for name in ("per-expert", "sglang", "kt", "gguf"):
        if name == "gguf" and family == "qwen3_5_moe_text":
            continue  # out_proj of linear attention has no row of its own in llama.cpp
        convert(tmp_path / "peft", tmp_path / name, name, base_model_name_or_path=model)
        convert(tmp_path / name, tmp_path / f"{name}-peft", "peft")
        back = load_file(tmp_path / f"{name}-peft" / "adapter_model.safetensors")
        assert set(back) == set(saved)
        assert {key: tensor.shape for key, tensor in back.items()} == {key: t.shape for key, t in saved.items()}
        torch.testing.assert_close(loaded(family, tmp_path / f"{name}-peft"), expected, rtol=0, atol=2e-5)
    if family in LOADS_PER_EXPERT:
        torch.testing.assert_close(loaded(family, tmp_path / "per-expert"), expected, rtol=0, atol=2e-5)


def test_both_formats_give_the_same_logits_when_ranks_differ(tmp_path: Path) -> None:
    """Down has another rank and scaling than gate and up, attention another one still."""
    patterns = {"rank_pattern": {"down_proj": 2, "q_proj": 3}, "alpha_pattern": {"down_proj": 8, "q_proj": 3}}
    expected = trained("qwen3_moe", tmp_path, **patterns)
    model = str(tmp_path / "model")
    convert(tmp_path / "peft", tmp_path / "fused", "peft", base_model_name_or_path=model)
    convert(tmp_path / "fused", tmp_path / "single", "per-expert")
    for name in ("fused", "single"):
        torch.testing.assert_close(loaded("qwen3_moe", tmp_path / name), expected, rtol=0, atol=2e-5)


def test_shared_experts_and_dense_layers_round_trip(tmp_path: Path) -> None:
    """PEFT takes gate_proj and so on for the routed experts; ours are named by their weight, so they load too."""
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.shared_experts.up_proj.weight"]
    options = {"target_modules": ["o_proj"], "target_parameters": [*names, "mlp.down_proj.weight"]}
    expected = trained("deepseek_v3", tmp_path, **options)
    for name in ("peft", "per-expert"):
        convert(
            tmp_path / "peft", tmp_path / "out", name, base_model_name_or_path=str(tmp_path / "model"), overwrite=True
        )
        torch.testing.assert_close(loaded("deepseek_v3", tmp_path / "out"), expected, rtol=0, atol=2e-5)


def test_single_fused_parameter_round_trips(tmp_path: Path) -> None:
    for parameter in PARAMETERS:
        place = tmp_path / parameter
        expected = trained("gpt_oss", place, target_modules=["q_proj"], target_parameters=[parameter])
        for name in ("per-expert", "gguf"):
            convert(place / "peft", place / name, name, base_model_name_or_path=str(place / "model"))
            convert(place / name, place / f"{name}-peft", "peft")
            torch.testing.assert_close(loaded("gpt_oss", place / f"{name}-peft"), expected, rtol=0, atol=2e-5)


def test_adapter_of_some_layers_round_trips(tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj"], "target_parameters": ["model.layers.1.mlp.experts.gate_up_proj"]}
    expected = trained("qwen3_moe", tmp_path, **options, layers_to_transform=[0])
    convert(tmp_path / "peft", tmp_path / "a", "per-expert", base_model_name_or_path=str(tmp_path / "model"))
    convert(tmp_path / "a", tmp_path / "b", "peft")
    torch.testing.assert_close(loaded("qwen3_moe", tmp_path / "b"), expected, rtol=0, atol=2e-5)


def test_modules_to_save_are_carried(tmp_path: Path) -> None:
    expected = trained("qwen3_moe", tmp_path, modules_to_save=["lm_head"])
    convert(tmp_path / "peft", tmp_path / "a", "sglang", base_model_name_or_path=str(tmp_path / "model"))
    convert(tmp_path / "a", tmp_path / "b", "peft")
    torch.testing.assert_close(loaded("qwen3_moe", tmp_path / "b"), expected, rtol=0, atol=2e-5)
