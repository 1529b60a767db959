"""Attention replayed from real CUDA graphs: the numbers of stock attention, dropout, and a capture that fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ktransformers.nn.attention_graphs.replay import record_attention
from tests.place.test_attention import FAMILIES, batch, compare, make, watch

pytestmark = pytest.mark.gpu


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return watch(monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs(family: str, replayed: list[str]) -> None:
    device = torch.device("cuda:0")
    stock, model = make(family, device=device), make(family, device=device)
    found = record_attention(model, [device])
    for step, (length, padded) in enumerate(((40, 0), (33, 0), (40, 0), (64, 0), (40, 7), (47, 3), (40, 9), (50, 1))):
        compare(model, stock, batch(step, length, padded, device), rtol=1e-3)
    assert replayed.count("differentiate") >= 2 * len(found) and not any(one.barred for one in found)


def test_dropout_falls_the_same_way_back() -> None:
    """The output is linear in B: what B's gradient says of it must be what B has added, under the mask of forward."""
    device = torch.device("cuda:0")
    model = make(dropout=0.4, device=device)
    for name, parameter in model.named_parameters():
        if "lora_B" in name and "o_proj" not in name:
            parameter.data.zero_()
    (one, *_) = record_attention(model, [device])
    module = one.module
    module.requires_grad_(False)
    weight = module.o_proj.lora_B["default"].weight.requires_grad_(True)  # type: ignore[index, union-attr]
    cos = torch.ones(1, 64, 16, device=device)
    words = {"position_embeddings": (cos, 0 * cos), "attention_mask": None}
    generator = torch.Generator(device).manual_seed(3)
    seen = set()
    for _ in range(6):
        hidden = torch.randn(2, 64, 64, generator=generator, device=device)
        rising = torch.randn(2, 64, 64, generator=generator, device=device)
        with model.disable_adapter():
            base = one.stock(hidden_states=hidden, **words)[0].detach()
        out = module(hidden_states=hidden, **words)[0]
        torch.rand(1000, device=device)  # somebody else draws meanwhile
        (grad,) = torch.autograd.grad(out, weight, rising)
        for noted in one._noted.values():
            noted.pending = 0  # nobody repeats these
        added, told = ((out - base) * rising).sum(), (grad * weight).sum()
        torch.testing.assert_close(added, told, rtol=1e-3, atol=1e-3)
        seen.add(round(float(added), 6))
    assert one.known and len(seen) == 6


def test_a_capture_that_fails(replayed: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Somebody asks the device in the middle of the second layer: nothing is recorded any more, all goes on."""
    device = torch.device("cuda:0")
    stock, model = make(device=device), make(device=device)
    found = record_attention(model, [device])
    asks, stock_forward = found[1], found[1].stock

    def waits(**words: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return stock_forward(**words)

    asks.stock = waits
    here = torch.cuda.current_stream()
    for step in range(5):
        compare(model, stock, batch(step, device=device), rtol=1e-3)
    assert asks.barred and not found[0].barred and "is not recorded" in caplog.text
    assert torch.cuda.current_stream() == here
    assert torch.nn.functional.dropout(torch.ones(100, device=device), 0.5).sum() != 100
