"""Small models with LoRA on attention under gradient checkpointing, and their comparison with stock ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from ktransformers.modeling.attention_graphs.replay import GraphPair
from tests.support.tiny_models import VOCABULARY, build

CPU = torch.device("cpu")
LENGTH = 40  # of a sequence, in a place for 64
FAMILIES = ("qwen3_moe", "deepseek_v2", "gpt_oss", "qwen3_next")


def make(family: str = "qwen3_moe", dropout: float = 0.0, reentrant: bool = False, device: torch.device = CPU) -> Any:
    torch.manual_seed(0)
    model = build(family).to(device)
    config = LoraConfig(r=4, target_modules=r".*self_attn\.(q|k|v|o|kv_b|q_a)_proj", lora_dropout=dropout)
    peft = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    peft.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    peft.enable_input_require_grads()
    return peft.train()


def batch(
    seed: int, length: int = LENGTH, padded: int = 0, device: torch.device = CPU, count: int = 2
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (count, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, -padded:] = 0
    words = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}
    if padded:
        words["attention_mask"] = mask
    return {name: tensor.to(device) for name, tensor in words.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return found


def compare(model: nn.Module, stock: nn.Module, given: dict[str, Tensor], rtol: float = 1e-4) -> None:
    losses = []
    for one in (model, stock):
        loss = one(**given).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    got, want = gradients(model), gradients(stock)
    assert got.keys() == want.keys() and got
    for name in want:
        assert want[name].norm() > 0
        assert (got[name] - want[name]).norm() <= rtol * want[name].norm(), name


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is replayed from now on, in the order in which it comes."""
    found: list[str] = []
    for name in ("compute", "differentiate"):
        inner = getattr(GraphPair, name)

        def noted(self: GraphPair, *args: Any, inner: Any = inner, name: str = name) -> Any:
            found.append(name)
            return inner(self, *args)

        monkeypatch.setattr(GraphPair, name, noted)
    return found
