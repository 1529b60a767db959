"""Attention LoRA by stock PEFT through frozen packed experts: the losses of the stock model, step by step."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from ktransformers.experts.contract import expert_modules
from ktransformers.experts.interface import pack_module, select_implementation
from tests.support.tiny_models import build, tokens


def losses(model: PreTrainedModel, target: str, steps: int, checkpointing: bool) -> list[float]:
    torch.manual_seed(1)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=target))
    if checkpointing:
        peft.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        peft.enable_input_require_grads()
    optimizer = torch.optim.AdamW((p for p in peft.parameters() if p.requires_grad), lr=1e-2)
    batch = tokens(4)
    actual = []
    peft.train()
    for _ in range(steps):
        loss = peft(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        actual.append(loss.item())
    return actual


@pytest.mark.parametrize("checkpointing", [False, True], ids=["retained", "checkpointed"])
@pytest.mark.parametrize(
    ("family", "target"),
    [
        ("qwen3_moe", r".*\.(q|v)_proj"),
        ("mixtral", r".*\.(q|v)_proj"),
        ("deepseek_v3", r".*\.(q_b|kv_b)_proj"),
        ("gpt_oss", r".*\.(q|v)_proj"),
    ],
)
def test_attention_lora_losses_match_the_stock_model(family: str, target: str, checkpointing: bool) -> None:
    stock = build(family)
    ours = copy.deepcopy(stock)
    for module in expert_modules(ours).values():
        pack_module(module, free=True)
    select_implementation(ours)
    expected = losses(stock, target, 10, checkpointing)
    assert expected[-1] < expected[0] - 0.05, "the stock model does not learn either"
    assert losses(ours, target, 10, checkpointing) == pytest.approx(expected, rel=1e-3)
