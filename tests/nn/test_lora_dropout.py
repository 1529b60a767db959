"""Dropout of LoRA's inputs through the operator: against float64 with the masks spelled again, and when it rests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ktransformers.nn.lora import ExpertLora, Factor
from ktransformers.nn.lora_factors import empty_gradients, factors_of, packed_adapter
from ktransformers.nn.operator import apply_experts
from ktransformers.nn.store import Dropout

from .test_lora_operator import FORMS, found, leaves, make_lora
from .test_operator import EXPERTS, Case, relative


def with_dropout(lora: ExpertLora, share: float = 0.4) -> ExpertLora:
    return replace(lora, dropout=share)


def seeded(case: Case, lora: ExpertLora, retain: bool = True, seed: int = 3) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(seed)
    return found(case, lora, retain)


def mask(share: float, seed: int, place: int, salt: int, columns: int) -> Tensor:
    """What the core drops of one row's inputs, spelled again: 0 or 1 / (1 - share)."""
    x = (seed + 0x9E3779B97F4A7C15 * (2 * place + salt)) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    row = (x ^ (x >> 31)) >> 32
    n = (torch.arange(columns, dtype=torch.int64) * 0x9E3779B9) % 2**32 ^ row
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        n = (n ^ (n >> shift)) * factor % 2**32
    n ^= n >> 16
    return (n >= int(share * 2**32)).double() / (1 - share)


def exact_with_dropout(case: Case, lora: ExpertLora, drop: Dropout) -> tuple[Tensor, list[Tensor]]:
    hidden = case.hidden.detach().double().requires_grad_()
    weights = case.weights.detach().double().requires_grad_()
    layer, top_k = case.layer, case.ids.shape[1]

    def add(factor: Factor | None, expert: int, x: Tensor) -> Tensor | float:
        if factor is None:
            return 0.0
        return factor.scale * (factor.b[expert].double() @ (factor.a[expert].double() @ x))

    rows = []
    for token, slot in torch.cartesian_prod(torch.arange(len(case.ids)), torch.arange(top_k)).tolist():
        e, place = int(case.ids[token, slot]), token * top_k + slot
        if not 0 <= e < EXPERTS:
            continue
        x = hidden[token]
        thin = x * mask(drop.share, drop.seed, place, 1, len(x))
        up = layer.up[e].double() @ x
        if layer.gate is None:
            inner = torch.nn.functional.silu(up + add(lora.up, e, thin))
        else:
            gate = layer.gate[e].double() @ x
            if lora.gate_up is not None:
                both = add(lora.gate_up, e, thin)
                assert isinstance(both, Tensor)
                more: tuple[Tensor | float, Tensor | float] = both.chunk(2)  # type: ignore[assignment]
            else:
                more = add(lora.gate, e, thin), add(lora.up, e, thin)
            inner = torch.nn.functional.silu(gate + more[0]) * (up + more[1])
        y = layer.down[e].double() @ inner + add(
            lora.down, e, inner * mask(drop.share, drop.seed, place, 2, len(inner))
        )
        rows.append((token, y * weights[token, slot]))
    out = torch.zeros(case.hidden.shape, dtype=torch.float64)
    out = out.index_add(0, torch.tensor([token for token, _ in rows]), torch.stack([row for _, row in rows]))
    return out.detach(), list(torch.autograd.grad(out, [hidden, weights, *leaves(lora)], case.grad.double()))


@pytest.mark.parametrize("name", ["split", "shared", "no_gate"])
def test_dropout(isa: str, name: str) -> None:
    form, drop = FORMS[name], Dropout(0.4, 0x123456789ABCDEF)
    case = Case(isa, tokens=19, hidden=70, intermediate=41, gated=form.gated)
    lora = make_lora(case, form)
    factors = factors_of(lora)
    adapters = [packed_adapter(case.store, factors)]
    out = case.store.forward(case.hidden, case.ids, case.weights, adapters=adapters, dropout=drop)
    grads, views = empty_gradients(factors)
    given = case.grad, case.hidden.detach(), case.ids, case.weights.detach()
    both = case.store.backward(*given, adapters=adapters, factors=[views], dropout=drop)
    expected_out, expected = exact_with_dropout(case, lora, drop)
    assert relative(out, expected_out) < case.tolerance()
    for got, want in zip((*both, *grads), expected, strict=True):
        assert relative(got, want.double()) < 2 * case.tolerance()


def test_dropout_is_the_same_on_every_variant(isa: str) -> None:
    case, plain = Case(isa, tokens=30), Case("generic", tokens=30)
    lora = with_dropout(make_lora(case, FORMS["split"]))
    out, grads = seeded(case, lora)
    expected_out, expected = seeded(plain, lora)
    assert relative(out, expected_out.double()) < case.tolerance()
    for got, want in zip(grads, expected, strict=True):
        assert relative(got, want.double()) < 2 * case.tolerance()
    kept, computed = seeded(case, lora, retain=True), seeded(case, lora, retain=False)
    for a, b in zip(kept[1], computed[1], strict=True):
        assert torch.equal(a, b)


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    case = Case("generic", tokens=20)
    lora = make_lora(case, FORMS["down"])
    base = apply_experts(case.store, case.hidden, case.ids, case.weights).detach()
    whole = found(case, lora)[0] - base
    runs = torch.stack([seeded(case, with_dropout(lora, 0.3), seed=s)[0] - base for s in range(300)])
    assert relative(runs.mean(0), whole.double()) < 0.1
    assert relative(runs[0], whole.double()) > 0.3  # 0.3 / 0.7 of the variance of one run
    assert not torch.equal(runs[0], runs[1])


def test_dropout_replays_under_checkpointing_and_rests_without_gradients() -> None:
    case = Case("generic")
    lora = with_dropout(make_lora(case, FORMS["split"]))
    expected = seeded(case, lora)[1]
    torch.manual_seed(3)
    out = checkpoint(
        lambda h, w: apply_experts(case.store, h, case.ids, w, lora=lora),
        case.hidden,
        case.weights,
        use_reentrant=False,
    )
    assert isinstance(out, Tensor)
    for got, want in zip(
        torch.autograd.grad(out, [case.hidden, case.weights, *leaves(lora)], case.grad), expected, strict=True
    ):
        assert torch.equal(got, want)
    with torch.no_grad():
        quiet = apply_experts(case.store, case.hidden, case.ids, case.weights, lora=lora)
    assert torch.equal(quiet, found(case, replace(lora, dropout=0.0))[0])
    with pytest.raises(ValueError, match="dropout"):
        case.store.forward(case.hidden, case.ids, case.weights, dropout=Dropout(1.0, 0))
