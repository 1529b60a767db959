"""Experts over decoded weights against the float64 reference: forward and all gradients, on the CPU (torch's grouped
product runs there too) and on a GPU. The oracle's gradients are autograd's, in float64.

Tolerance: numbers are rounded to bf16 where a product begins or ends, about six times on the way of a gradient, each
time by up to 2^-9 of themselves; differences are taken relative to the norm of the whole tensor, where they add up like
random steps. 1 % is twice what is seen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ktransformers.experts.gate import ACTIVATIONS, Gate
from ktransformers.experts.lora import ExpertLora
from ktransformers.experts.store import Dropout
from ktransformers.nn import ExpertStore
from ktransformers.place.gpu.device_lora import factor_slots, stack_factors
from ktransformers.place.gpu.epilogue import DropoutMask
from ktransformers.place.gpu.grouped_mlp import Decoded, GroupedRows, GroupLora, backward, forward

E, H, I, T, K, R = 5, 64, 48, 37, 2, 4  # noqa: E741
TOLERANCE = 0.01
GATES = [Gate(name) for name in ACTIVATIONS] + [Gate("silu", limit=2.0), Gate("swiglu_oai", limit=7.0, alpha=1.702)]
pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")  # of CPUs that lack it
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double().cpu() - want).norm() / want.norm().clamp(min=1e-12))


def make(gated: bool, biased: bool, adapters: int, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    wide = 2 * I if gated else I

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape) / shape[-1] ** 0.5

    found: dict[str, Any] = {
        "first": random(E, wide, H).bfloat16(),
        "down": random(E, H, I).bfloat16(),
        "first_bias": random(E, wide) if biased else None,
        "down_bias": random(E, H) if biased else None,
        "hidden": torch.randn(T, H).bfloat16(),
        "ids": torch.rand(T, E).topk(K).indices,
        "weights": torch.rand(T, K),
        "grad": torch.randn(T, H).bfloat16(),
        "adapter": torch.randint(-1, adapters, (T,)) if adapters > 1 else torch.zeros(T, dtype=torch.int64),
    }
    found["ids"][0, 0] = -1
    found["ids"][found["ids"] == 3] = 1  # nobody asks for one of them, another is asked twice
    sizes = {"gate_a": (R, H), "gate_b": (I, R), "up_a": (R, H), "up_b": (I, R), "down_a": (R, I), "down_b": (H, R)}
    if not gated:
        sizes = {role: size for role, size in sizes.items() if "gate" not in role}
    found["factors"] = [
        {role: random(E, *size).bfloat16().float() for role, size in sizes.items()} for _ in range(adapters)
    ]
    return found


def oracle(given: dict[str, Any], gate: Gate, scales: tuple[float, float, float]) -> dict[str, Tensor]:
    """float64, one row at a time."""
    hidden, weights = given["hidden"].double().requires_grad_(), given["weights"].double().requires_grad_()
    factors = [{role: t.double().requires_grad_() for role, t in one.items()} for one in given["factors"]]
    gated = given["first"].shape[1] == 2 * I
    rows = []
    for t in range(T):
        total = torch.zeros(H, dtype=torch.float64)
        for slot in range(K):
            e, a = int(given["ids"][t, slot]), int(given["adapter"][t])
            if e < 0:
                continue
            f = factors[a] if factors and a >= 0 else {}
            wide = given["first"][e].double() @ hidden[t]
            if given["first_bias"] is not None:
                wide = wide + given["first_bias"][e].double()
            g, u = wide.chunk(2) if gated else (None, wide)
            if f:
                u = u + scales[1] * f["up_b"][e] @ (f["up_a"][e] @ hidden[t])
                g = g + scales[0] * f["gate_b"][e] @ (f["gate_a"][e] @ hidden[t]) if g is not None else None
            inner = gate(g, u) if g is not None else ACTIVATIONS[gate.activation](u)
            y = given["down"][e].double() @ inner
            if given["down_bias"] is not None:
                y = y + given["down_bias"][e].double()
            if f:
                y = y + scales[2] * f["down_b"][e] @ (f["down_a"][e] @ inner)
            total = total + weights[t, slot] * y
        rows.append(total)
    out = torch.stack(rows)
    out.backward(given["grad"].double())
    found = {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad}
    for at, one in enumerate(factors):
        found |= {f"{role}.{at}": t.grad for role, t in one.items()}
    return found


def ours(given: dict[str, Any], gate: Gate, scales: tuple[float, float, float], device: str) -> dict[str, Tensor]:
    adapters = len(given["factors"])
    on: dict[str, Any] = {
        name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()
    }
    each = adapters + 1  # the last: none
    adapter = torch.where(on["adapter"] < 0, adapters, on["adapter"])
    ids = on["ids"].flatten()
    place = torch.arange(T * K, device=device)[ids >= 0]
    key = ids[place] * each + adapter[place // K]
    key, order = key.sort(stable=True)
    place = place[order]
    ends = torch.bincount(key // each, minlength=E).cumsum(0).int()
    rows = GroupedRows(place // K, on["weights"].flatten()[place], ends)
    lora = None
    if adapters:
        stacked = {
            role: torch.stack(
                [one[role] for one in given["factors"]] + [torch.zeros_like(given["factors"][0][role])], 1
            )
            .flatten(0, 1)
            .to(device)
            for role in given["factors"][0]
        }
        cut = torch.bincount(key, minlength=E * each).cumsum(0).int()
        factors = ExpertLora.of_tensors(tuple(stacked), tuple(stacked.values()), scales)
        pairs = stack_factors(factors, factors.tensors, on["first"].shape[1])
        lora = GroupLora(cut, pairs["first"], pairs["down"])
    weights = Decoded(on["first"], on["down"], on["first_bias"], on["down_bias"])
    out = torch.zeros(T, H, device=device)
    forward(on["hidden"], rows, weights, gate, out, lora)
    grad_hidden = torch.zeros(T, H, device=device)
    grad_rows, grads = backward(
        on["grad"], on["hidden"], rows, weights, gate, grad_hidden, lora, needs_grad=lora is not None
    )
    grad_weights = torch.zeros(T * K, device=device)
    grad_weights[place] = grad_rows
    found = {"out": out, "hidden": grad_hidden, "weights": grad_weights.view(T, K)}
    table = factor_slots(factors.roles, factors.tensors, scales) if adapters else {}
    for role, slot in table.items():
        whole = grads[slot.pair][slot.factor == "b"]
        grad = (whole[:, slot.rank] if slot.factor == "a" else whole[:, slot.rows, slot.rank]) * slot.scale
        parts = grad.unflatten(0, (E, each))
        assert not parts[:, adapters].any() or bool((given["adapter"] < 0).any())
        found |= {f"{role}.{at}": parts[:, at] for at in range(adapters)}
    return found


def compare(
    given: dict[str, Any], gate: Gate, device: str, scales: tuple[float, float, float] = (2.0, 0.5, 1.5)
) -> None:
    want, got = oracle(given, gate, scales), ours(given, gate, scales, device)
    assert want.keys() == got.keys()
    worst = {name: error(got[name], want[name]) for name in want}
    # Next to a clamp a rounded number may lie on the other side of it, where the slope is zero.
    assert max(worst.values()) < TOLERANCE * (3 if gate.limit else 1), worst


@devices
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: f"{gate.activation}-{gate.limit:g}")
def test_gated_experts_match_the_reference(gate: Gate, device: str) -> None:
    compare(make(True, biased=gate.activation in ("swiglu_oai", "gelu"), adapters=1), gate, device)


@devices
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_experts_without_a_gate_match_the_reference(activation: str, device: str) -> None:
    compare(make(False, biased=activation == "gelu", adapters=1), Gate(activation), device)


@devices
@pytest.mark.parametrize("adapters", [0, 2, 3])
def test_adapters_match_the_reference(adapters: int, device: str) -> None:
    compare(make(True, False, adapters), Gate("silu"), device)


def test_dropout_mask_equals_the_cores() -> None:
    """The native core drops the same elements: its result with LoRA that copies its inputs shows which."""
    torch.manual_seed(0)
    store = ExpertStore(1, H, I, gated=False, activation="relu2")
    store.pack(up=torch.zeros(1, I, H), down=torch.eye(H)[:, :I][None].contiguous())
    adapter = store.new_adapter(0, I, 0)
    adapter.pack(up_a=torch.eye(I, H)[None].contiguous(), up_b=torch.eye(I)[None].contiguous())
    hidden, share, seed = torch.ones(T, H).bfloat16(), 0.3, 2**62 - 12345
    ids, weights = torch.zeros(T, 1, dtype=torch.int64), torch.ones(T, 1)
    out = store.forward(hidden, ids, weights, adapters=[adapter], dropout=Dropout(share, seed))
    dropout = DropoutMask(share, seed, torch.arange(T))
    dropped = dropout(hidden, 1)[:, :I] == 0
    assert 0.2 < dropped.float().mean() < 0.4
    assert torch.equal(out[:, :I] == 0, dropped)
