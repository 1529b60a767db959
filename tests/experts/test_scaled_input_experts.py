"""Experts whose input is scaled by the router (Llama 4): the numbers of the stock block."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ktransformers.experts.contract import expert_modules
from ktransformers.experts.scaled_input_experts import adapt_experts
from ktransformers.ground.errors import InputError
from ktransformers.nn import attach, load_model
from ktransformers.serve.scheduler.forward import Forward, make_forward
from ktransformers.train.packing import require_masked_layers
from tests.support.family_checks import served_tokens
from tests.support.tiny_models import build, logits, save, tokens


@pytest.mark.parametrize("top_k", [1, 2])
def test_loaded_model_equals_stock(top_k: int, tmp_path: Path) -> None:
    stock = build("llama4_text", num_experts_per_tok=top_k)
    save(stock, tmp_path)
    model: Any = load_model(tmp_path, dtype=torch.float32, precision="f32")
    assert float((logits(model) - logits(stock)).norm() / logits(stock).norm()) < 1e-5
    assert len(expert_modules(model)) == 2 and not expert_modules(stock)


def test_gradients_of_inputs_equal_stock() -> None:
    stock: Any = build("llama4_text")
    model: Any = build("llama4_text")
    attach(model, free=True, precision="f32")
    gradients = []
    for one in (stock, model):
        embedded = one.get_input_embeddings()(tokens()).detach().requires_grad_()
        one(inputs_embeds=embedded).logits.square().mean().backward()
        gradients.append(embedded.grad)
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 1e-4


def test_adapted_model_computes_the_same_without_packing() -> None:
    stock: Any = build("llama4_text")
    adapted = copy.deepcopy(stock)
    assert adapt_experts(adapted) == 2 and adapt_experts(adapted) == 0
    assert float((logits(adapted) - logits(stock)).norm() / logits(stock).norm()) < 1e-6


def test_block_that_computes_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the scores were multiplied to the outputs."""
    from transformers.models.llama4 import modeling_llama4

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        hidden = hidden_states.reshape(-1, self.hidden_dim)
        scores, found = self.router(hidden)
        routed = self.experts(hidden.repeat(scores.shape[1], 1)) * scores.transpose(0, 1).reshape(-1, 1)
        return self.shared_expert(hidden) + routed.reshape(scores.shape[1], -1, hidden.shape[1]).sum(0), found

    model = build("llama4_text")
    monkeypatch.setattr(modeling_llama4.Llama4TextMoe, "forward", forward)
    assert adapt_experts(model) == 0
    assert adapt_experts(nn.Sequential(nn.Linear(2, 2))) == 0


@pytest.mark.parametrize(
    "changes",
    [{}, {"layer_types": ["full_attention", "full_attention"]}, {"no_rope_layers": [1, 1]}],
    ids=["released", "scaled", "chunked"],
)
def test_served_and_not_packed(changes: dict[str, Any], tmp_path: Path) -> None:
    """Layers without rotary embeddings scale queries by their index in a row, and chunks are chunks of it: in packed
    rows that is not the position. A server computes both by position."""
    stock: Any = build("llama4_text", **changes)
    save(stock, tmp_path)
    model = load_model(tmp_path, dtype=torch.float32)
    with pytest.raises(InputError, match="packing"):
        require_masked_layers(model)
    forward = make_forward(model)
    assert isinstance(forward, Forward)
    forward.check_against_stock()
    prompt = tokens(1, 40)
    with torch.no_grad():
        made = stock.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, use_cache=False)
    assert served_tokens(forward, prompt[0].tolist(), 8) == made[0, 40:].tolist()
