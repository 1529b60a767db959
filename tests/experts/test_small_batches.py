"""Small batches of quantised experts: inference multiplies the packed codes, training always uses the rounded weights
of backward, with or without retained activations and under checkpointing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ktransformers.checkpoint.encoder import encode
from ktransformers.experts.backend import KtExperts, LocalExperts
from ktransformers.experts.contract import Contract, expert_modules, read_contract
from ktransformers.experts.interface import experts_forward
from ktransformers.experts.operator import apply_experts
from ktransformers.nn import ExpertStore
from tests.support.tiny_models import build

EXPERTS, HIDDEN, INTERMEDIATE = 4, 96, 64


def quantised_case(isa: str) -> tuple[ExpertStore, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    matrices = {n: encode(torch.randn(EXPERTS, *shape, generator=random), "int8") for n, shape in shapes.items()}
    store = ExpertStore(EXPERTS, HIDDEN, INTERMEDIATE, isa=isa, formats="int8")
    store.pack(**matrices)  # type: ignore[arg-type]
    hidden = torch.randn(3, HIDDEN, generator=random).requires_grad_()
    return store, hidden, torch.tensor([[0, 1], [2, 1], [3, 0]]), torch.rand(3, 2, generator=random)


def test_training_uses_rounded_weights(isa: str) -> None:
    store, hidden, ids, weights = quantised_case(isa)
    rounded = store.forward(hidden.detach(), ids, weights, needs_grad=True)
    for retain in (True, False):
        out = apply_experts(LocalExperts(store), hidden, ids, weights, retain=retain)
        assert out.grad_fn is not None and torch.equal(out.detach(), rounded)
    with torch.no_grad():
        assert torch.equal(apply_experts(LocalExperts(store), hidden, ids, weights, training=True), rounded)
        inference = apply_experts(LocalExperts(store), hidden, ids, weights)
    assert torch.equal(inference, store.forward(hidden.detach(), ids, weights))
    assert not torch.equal(inference, rounded)


class Experts(nn.Module):
    """A packed experts module."""

    def __init__(self, store: ExpertStore, contract: Contract) -> None:
        super().__init__()
        self.kt = KtExperts(contract, store)

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return experts_forward(self, hidden, ids, weights)


def test_reentrant_checkpointing_uses_rounded_weights_in_both_passes(isa: str) -> None:
    """The first pass runs without gradients and must return the output of the second."""
    store, hidden, ids, weights = quantised_case(isa)
    name, stock = next(iter(expert_modules(build("qwen3_moe")).items()))
    module = Experts(store, read_contract(name, stock))
    rounded = store.forward(hidden.detach(), ids, weights, needs_grad=True)
    out = checkpoint(module, hidden, ids, weights, use_reentrant=True)
    assert torch.equal(out.detach(), rounded)
    out.backward(torch.ones_like(out))
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, store.backward(torch.ones_like(rounded), hidden.detach(), ids, weights)[0])
    with torch.no_grad():
        assert torch.equal(module.eval()(hidden, ids, weights), store.forward(hidden.detach(), ids, weights))
