"""Dropout of LoRA's inputs through the operator: against float64 with independently computed masks, and when it is
off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ktransformers.experts.lora import ExpertLora, empty_gradients, packed_adapter
from ktransformers.experts.operator import apply_experts
from ktransformers.experts.store import Dropout
from tests.support.lora_cases import LORA_FORMS, apply_lora, factor_tensors, make_lora, reference_with_dropout
from tests.support.operator_cases import OperatorCase, relative_error


def with_dropout(lora: ExpertLora, rate: float = 0.4) -> ExpertLora:
    return replace(lora, dropout=rate)


def seeded(case: OperatorCase, lora: ExpertLora, retain: bool = True, seed: int = 3) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(seed)
    return apply_lora(case, lora, retain)


@pytest.mark.parametrize("name", ["split", "shared", "no_gate"])
def test_dropout_matches_float64(isa: str, name: str) -> None:
    form, drop = LORA_FORMS[name], Dropout(0.4, 0x123456789ABCDEF)
    case = OperatorCase(isa, tokens=19, hidden=70, intermediate=41, gated=form.gated)
    lora = make_lora(case, form)
    factors = lora
    adapters = [packed_adapter(case.store, factors)]
    out = case.store.forward(case.hidden, case.ids, case.weights, adapters=adapters, dropout=drop)
    grads, views = empty_gradients(factors)
    given = case.grad, case.hidden.detach(), case.ids, case.weights.detach()
    both = case.store.backward(*given, adapters=adapters, factors=[views], dropout=drop)
    expected_out, expected = reference_with_dropout(case, lora, drop)
    assert relative_error(out, expected_out) < case.tolerance()
    for got, want in zip((*both, *grads), expected, strict=True):
        assert relative_error(got, want.double()) < 2 * case.tolerance()


def test_dropout_is_the_same_on_every_variant(isa: str) -> None:
    case, plain = OperatorCase(isa, tokens=30), OperatorCase("generic", tokens=30)
    lora = with_dropout(make_lora(case, LORA_FORMS["split"]))
    out, grads = seeded(case, lora)
    expected_out, expected = seeded(plain, lora)
    assert relative_error(out, expected_out.double()) < case.tolerance()
    for got, want in zip(grads, expected, strict=True):
        assert relative_error(got, want.double()) < 2 * case.tolerance()
    kept, computed = seeded(case, lora, retain=True), seeded(case, lora, retain=False)
    for a, b in zip(kept[1], computed[1], strict=True):
        assert torch.equal(a, b)


def test_dropout_rate_and_mean() -> None:
    case = OperatorCase("generic", tokens=20)
    lora = make_lora(case, LORA_FORMS["down"])
    base = apply_experts(case.backend, case.hidden, case.ids, case.weights).detach()
    undropped = apply_lora(case, lora)[0] - base
    runs = torch.stack([seeded(case, with_dropout(lora, 0.3), seed=s)[0] - base for s in range(300)])
    assert relative_error(runs.mean(0), undropped.double()) < 0.1
    assert relative_error(runs[0], undropped.double()) > 0.3  # 0.3 / 0.7 of the variance of one run
    assert not torch.equal(runs[0], runs[1])


def test_dropout_replays_under_checkpointing_and_is_off_without_gradients() -> None:
    case = OperatorCase("generic")
    lora = with_dropout(make_lora(case, LORA_FORMS["split"]))
    expected = seeded(case, lora)[1]
    torch.manual_seed(3)
    out = checkpoint(
        lambda h, w: apply_experts(case.backend, h, case.ids, w, lora=lora),
        case.hidden,
        case.weights,
        use_reentrant=False,
    )
    assert isinstance(out, Tensor)
    for got, want in zip(
        torch.autograd.grad(out, [case.hidden, case.weights, *factor_tensors(lora)], case.grad), expected, strict=True
    ):
        assert torch.equal(got, want)
    with torch.no_grad():
        quiet = apply_experts(case.backend, case.hidden, case.ids, case.weights, lora=lora)
    assert torch.equal(quiet, apply_lora(case, replace(lora, dropout=0.0))[0])
    with pytest.raises(ValueError, match="dropout"):
        case.store.forward(case.hidden, case.ids, case.weights, dropout=Dropout(1.0, 0))
