"""Two hundred steps of attention and expert LoRA with one seed: the loss curve of every variant is the stock model's.

The best variant of this CPU runs in `make test`; the others, of which some are emulated, are slow.
"""

from __future__ import annotations

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ktransformers import _core
from ktransformers.modeling.quantizer import attach
from tests.support.slow_cases import others_slow
from tests.support.tiny_models import build, tokens

STEPS = 200
VARIANTS = [variant["name"] for variant in _core.variants() if variant["native"] or variant["emulated"]]
BEST = [variant["name"] for variant in _core.variants() if variant["native"]][-1]


def curve(isa: str | None) -> list[float]:
    """Losses of the stock model, or with its experts packed for a variant."""
    torch.manual_seed(0)
    model = build("qwen3_moe")
    if isa is not None:
        attach(model, free=True, isa=isa)
    peft = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"])
    )
    optimizer = torch.optim.AdamW((p for p in peft.parameters() if p.requires_grad), lr=5e-4)
    batches = tokens(8).split(2)
    actual = []
    peft.train()
    for step in range(STEPS):
        batch = batches[step % len(batches)]
        loss = peft(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        actual.append(loss.item())
    return actual


stock_curve = functools.cache(lambda: curve(None))


@pytest.mark.parametrize("variant", others_slow(VARIANTS, (BEST,)))
def test_loss_curve_matches_the_stock_model(variant: str) -> None:
    expected, actual = torch.tensor(stock_curve()), torch.tensor(curve(variant))
    assert expected[-8:].mean() < 0.5 * expected[:8].mean(), "the stock model does not learn either"
    # Rounding of LoRA to bf16, and of activations where the variant multiplies bf16, now and then sends a token to
    # another expert and moves a single step; over the four batches it must neither show nor lean to one side.
    off = (actual / expected - 1).view(-1, 4).mean(1)
    assert off.abs().max() < 0.04 and off.mean().abs() < 0.005, (float(off.abs().max()), float(off.mean()))
