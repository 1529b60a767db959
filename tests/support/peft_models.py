"""Tiny models with PEFT's LoRA on attention and experts, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from ktransformers.nn import attach
from tests.support.tiny_models import build, tokens

PARAMETERS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
MODULES = {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}
# Family -> how a user names the experts: PEFT rewrites gate/up/down_proj for the families that it knows.
TARGETS: dict[str, dict[str, Any]] = {
    "qwen2_moe": PARAMETERS,
    "qwen3_moe": MODULES,
    "mixtral": {"target_modules": ["q_proj", "w1", "w2", "w3"]},
    "deepseek_v3": {"target_modules": ["kv_b_proj", "gate_proj", "up_proj", "down_proj"]},
    "glm4_moe": PARAMETERS,
    "olmoe": PARAMETERS | {"target_modules": ["q_proj"]},
    "gpt_oss": PARAMETERS | {"target_modules": ["q_proj"]},
    "nemotron_h": {"target_parameters": ["experts.up_proj", "experts.down_proj"]},
}


def adapt(model: nn.Module, seed: int = 1, name: str = "default", **options: Any) -> PeftModel:
    """PEFT's LoRA with numbers everywhere, so that it counts; bf16 ones, so that packing does not round them."""
    torch.manual_seed(seed)
    config = LoraConfig(**({"r": 4, "lora_alpha": 8} | options))
    if isinstance(model, PeftModel):
        model.add_adapter(name, config)
    else:
        model = get_peft_model(model, config, adapter_name=name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if f"lora_B.{name}" in key:
                parameter.normal_(0, 0.1)
            if f"lora_A.{name}" in key or f"lora_B.{name}" in key:
                parameter.copy_(parameter.bfloat16())
    return model


def packed_model(family: str, **options: Any) -> PreTrainedModel:
    model = build(family, **options)
    attach(model, free=True)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    return {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
