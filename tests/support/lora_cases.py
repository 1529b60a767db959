"""Random LoRA of expert layers and its float64 reference, with and without dropout, for tests of the operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.experts.lora import ExpertLora, LoraPair
from ktransformers.experts.operator import apply_experts
from ktransformers.experts.store import Dropout
from tests.support.operator_cases import EXPERTS, OperatorCase


@dataclass(frozen=True)
class LoraForm:
    """Ranks of the factors, 0 where there is none; `shared` is one factor for gate and up."""

    gate: int = 0
    up: int = 0
    down: int = 0
    shared: int = 0
    gated: bool = True
    dtype: torch.dtype = torch.float32
    rounded: bool = True  # to bf16


LORA_FORMS = {
    "shared": LoraForm(shared=16, down=8),
    "split": LoraForm(gate=8, up=8, down=8),
    "uneven": LoraForm(gate=3, up=40, down=1),
    "gate": LoraForm(gate=5),
    "up": LoraForm(up=5),
    "down": LoraForm(down=33),
    "no_gate": LoraForm(up=6, down=7, gated=False),
    "wide": LoraForm(shared=256, down=70),
    "bf16": LoraForm(shared=16, down=8, dtype=torch.bfloat16),
    "fp16": LoraForm(gate=8, up=8, down=8, dtype=torch.float16),
}


def make_lora(case: OperatorCase, form: LoraForm, seed: int = 0) -> ExpertLora:
    """Factors of numbers that bf16 holds exactly, unless the form says otherwise, and scales that are powers of two."""
    g = torch.Generator().manual_seed(seed)
    draw = torch.float64 if form.dtype == torch.float64 else torch.float32
    hidden, intermediate = case.store.hidden_size, case.store.intermediate_size

    def factor(rank: int, wide: int, out: int, scale: float) -> LoraPair | None:
        if not rank:
            return None
        a, b = (
            torch.randn(EXPERTS, *shape, generator=g, dtype=draw) * size**-0.5
            for shape, size in (((rank, wide), wide), ((out, rank), rank))
        )
        if form.rounded:
            a, b = a.bfloat16(), b.bfloat16()
        return LoraPair(a.to(form.dtype).requires_grad_(), b.to(form.dtype).requires_grad_(), scale)

    return ExpertLora(
        gate_up=factor(form.shared, hidden, 2 * intermediate, 0.5),
        gate=factor(form.gate, hidden, intermediate, 2.0),
        up=factor(form.up, hidden, intermediate, 0.5),
        down=factor(form.down, intermediate, hidden, 1.0),
    )


def factor_tensors(lora: ExpertLora) -> list[Tensor]:
    return list(lora.tensors)


def delta(factor: LoraPair | None) -> Tensor | float:
    return 0.0 if factor is None else factor.scaling * factor.b.double() @ factor.a.double()


def reference_lora(case: OperatorCase, lora: ExpertLora) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients (hidden, weights, factors) of the layer with LoRA folded in, in float64."""
    hidden = case.hidden.detach().double().requires_grad_()
    weights = case.weights.detach().double().requires_grad_()
    gate_delta, up_delta = delta(lora.gate), delta(lora.up)
    if lora.gate_up is not None:
        gate_delta, up_delta = delta(lora.gate_up).chunk(2, dim=1)  # type: ignore[union-attr]
    layer = case.layer
    out = torch.zeros(case.hidden.shape, dtype=torch.float64)
    for e in range(EXPERTS):
        token, slot = torch.where(case.ids == e)
        x = hidden[token]

        def add(d: Tensor | float, rows: Tensor, expert: int = e) -> Tensor | float:
            return 0.0 if isinstance(d, float) else rows @ d[expert].T

        up = x @ layer.up[e].double().T + add(up_delta, x)
        if layer.gate is None:
            inner = torch.nn.functional.silu(up)
        else:
            inner = torch.nn.functional.silu(x @ layer.gate[e].double().T + add(gate_delta, x)) * up
        y = inner @ layer.down[e].double().T + add(delta(lora.down), inner)
        out = out.index_add(0, token, y * weights[token, slot, None])
    grads = torch.autograd.grad(out, [hidden, weights, *factor_tensors(lora)], case.grad.double())
    return out.detach(), list(grads)


def apply_lora(case: OperatorCase, lora: ExpertLora, retain: bool = True) -> tuple[Tensor, list[Tensor]]:
    out = apply_experts(case.backend, case.hidden, case.ids, case.weights, lora=lora, retain=retain)
    return out.detach(), list(torch.autograd.grad(out, [case.hidden, case.weights, *factor_tensors(lora)], case.grad))


def mask(rate: float, seed: int, row: int, salt: int, columns: int) -> Tensor:
    """What the core drops of one row's inputs, spelled again: 0 or 1 / (1 - share)."""
    x = (seed + 0x9E3779B97F4A7C15 * (2 * row + salt)) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    row = (x ^ (x >> 31)) >> 32
    n = (torch.arange(columns, dtype=torch.int64) * 0x9E3779B9) % 2**32 ^ row
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        n = (n ^ (n >> shift)) * factor % 2**32
    n ^= n >> 16
    return (n >= int(rate * 2**32)).double() / (1 - rate)


def reference_with_dropout(case: OperatorCase, lora: ExpertLora, drop: Dropout) -> tuple[Tensor, list[Tensor]]:
    hidden = case.hidden.detach().double().requires_grad_()
    weights = case.weights.detach().double().requires_grad_()
    layer, top_k = case.layer, case.ids.shape[1]

    def add(factor: LoraPair | None, expert: int, x: Tensor) -> Tensor | float:
        if factor is None:
            return 0.0
        return factor.scaling * (factor.b[expert].double() @ (factor.a[expert].double() @ x))

    rows = []
    for token, slot in torch.cartesian_prod(torch.arange(len(case.ids)), torch.arange(top_k)).tolist():
        e, row = int(case.ids[token, slot]), token * top_k + slot
        if not 0 <= e < EXPERTS:
            continue
        x = hidden[token]
        dropped = x * mask(drop.rate, drop.seed, row, 1, len(x))
        up = layer.up[e].double() @ x
        if layer.gate is None:
            inner = torch.nn.functional.silu(up + add(lora.up, e, dropped))
        else:
            gate = layer.gate[e].double() @ x
            if lora.gate_up is not None:
                fused = add(lora.gate_up, e, dropped)
                assert isinstance(fused, Tensor)
                deltas: tuple[Tensor | float, Tensor | float] = fused.chunk(2)  # type: ignore[assignment]
            else:
                deltas = add(lora.gate, e, dropped), add(lora.up, e, dropped)
            inner = torch.nn.functional.silu(gate + deltas[0]) * (up + deltas[1])
        y = layer.down[e].double() @ inner + add(lora.down, e, inner * mask(drop.rate, drop.seed, row, 2, len(inner)))
        rows.append((token, y * weights[token, slot]))
    out = torch.zeros(case.hidden.shape, dtype=torch.float64)
    out = out.index_add(0, torch.tensor([token for token, _ in rows]), torch.stack([row for _, row in rows]))
    return out.detach(), list(torch.autograd.grad(out, [hidden, weights, *factor_tensors(lora)], case.grad.double()))
