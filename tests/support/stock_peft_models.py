"""Tiny stock models with PEFT adapters on disk, and their logits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from tests.support.tiny_models import COMMON, FAMILIES, VOCABULARY

TOKENS = torch.arange(2 * 6).reshape(2, 6) % (VOCABULARY - 3) + 3
# PEFT's targets: families whose experts it accepts by module names, and those by parameter names.
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"target_modules": ["q_proj", "v_proj", "gate", "gate_proj", "up_proj", "down_proj"]},
    "mixtral": {"target_modules": ["q_proj", "o_proj", "gate", "w1", "w2", "w3"]},
    "deepseek_v3": {"target_modules": ["o_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj", "down_proj"]},
    "gpt_oss": {"target_modules": ["q_proj", "o_proj"], "target_parameters": PARAMETERS},
    "qwen3_5_moe_text": {"target_modules": ["q_proj", "out_proj"], "target_parameters": PARAMETERS},
}
LOADS_PER_EXPERT = ("qwen3_moe", "mixtral", "deepseek_v3")


def build_model(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **(COMMON | FAMILIES[family]))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def save_model_and_adapter(
    family: str, directory: Path, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> torch.Tensor:
    """Saves a model and an adapter; returns the logits of the model with the adapter merged in float32."""
    model = build_model(family)
    with torch.no_grad():  # the numbers that the file will have; buffers (rotary frequencies) stay as they are
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    copy.deepcopy(model).to(dtype).save_pretrained(directory / "model", max_shard_size="40KB")
    (directory / "model" / "tokenizer_config.json").write_text("{}")
    targets = {key: list(value) for key, value in TARGETS[family].items()}
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **(targets | options)))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_((torch.randn_like(parameter) * 0.1).bfloat16())
    peft.save_pretrained(directory / "adapter")
    return logits(peft.merge_and_unload())
