"""Attention replayed from real CUDA graphs: the numbers of stock attention, dropout, and a capture that fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ktransformers.modeling.attention_graphs.replay import record_attention
from tests.support.attention_models import FAMILIES, batch, compare, make, watch

pytestmark = pytest.mark.gpu


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return watch(monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_of_stock_attention(family: str, replayed: list[str]) -> None:
    device = torch.device("cuda:0")
    stock, model = make(family, device=device), make(family, device=device)
    wrapped = record_attention(model, [device])
    for step, (length, padded) in enumerate(((40, 0), (33, 0), (40, 0), (64, 0), (40, 7), (47, 3), (40, 9), (50, 1))):
        compare(model, stock, batch(step, length, padded, device), rtol=1e-3)
    assert replayed.count("differentiate") >= 2 * len(wrapped) and not any(one.graphs.closed for one in wrapped)


def test_backward_has_the_dropout_mask_of_forward() -> None:
    """The output is linear in B, so the gradient of B times B must be what B has added under the mask of forward."""
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
        grad_out = torch.randn(2, 64, 64, generator=generator, device=device)
        with model.disable_adapter():
            base = one.stock(hidden_states=hidden, **words)[0].detach()
        out = module(hidden_states=hidden, **words)[0]
        torch.rand(1000, device=device)  # other draws in between
        (grad,) = torch.autograd.grad(out, weight, grad_out)
        for recomputes in one._recomputes.values():
            recomputes.pending = 0  # these calls are not recomputed
        added, by_gradient = ((out - base) * grad_out).sum(), (grad * weight).sum()
        torch.testing.assert_close(added, by_gradient, rtol=1e-3, atol=1e-3)
        seen.add(round(float(added), 6))
    assert one.graphs.captured and len(seen) == 6


def test_module_whose_capture_fails_goes_on_kernel_by_kernel(
    replayed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The second layer synchronises during its capture: it alone is refused, and random numbers work afterwards."""
    device = torch.device("cuda:0")
    stock, model = make(device=device), make(device=device)
    first, second = record_attention(model, [device])
    stock_forward = second.stock

    def synchronising(**words: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return stock_forward(**words)

    second.stock = synchronising
    before = torch.cuda.current_stream()
    for step in range(5):
        compare(model, stock, batch(step, device=device), rtol=1e-3)
    assert second.graphs.closed and not first.graphs.closed and "run eagerly instead" in caplog.text
    assert torch.cuda.current_stream() == before
    assert torch.nn.functional.dropout(torch.ones(100, device=device), 0.5).sum() != 100
