"""ExpertStore: accepted sources and arguments, and errors for all others."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import ktransformers
from ktransformers import _core
from ktransformers.ground.errors import InputError
from ktransformers.nn import ExpertStore
from tests.support import reference

E, H, I, T, K = 4, 40, 30, 6, 2  # noqa: E741


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "gate": torch.randn(E, I, H).bfloat16() / 6,
        "up": torch.randn(E, I, H).bfloat16() / 6,
        "down": torch.randn(E, H, I).bfloat16() / 6,
    }


@pytest.fixture(scope="module")
def store() -> ExpertStore:
    made = ExpertStore(E, H, I, pool=_core.Pool(2))
    made.pack(**tensors())
    return made


def batch(*leading: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    weights, ids = torch.randn(*leading, E).softmax(-1).topk(K)
    return torch.randn(*leading, H), ids, weights


def test_store_properties(store: ExpertStore) -> None:
    assert (store.num_experts, store.hidden_size, store.intermediate_size) == (E, H, I)
    assert store.isa == _core.isa()
    assert store.threads == 2
    # Tiles of 32 x 16: gate and up 2 x 2 x 2 of them, down 1 x 4, 1 KB each.
    assert store.packed_bytes == E * (8 + 4) * 1024
    assert ktransformers.ExpertStore is ExpertStore


def test_reference_matches_the_expert_loop_of_transformers() -> None:
    """The float64 reference against the expert loop of transformers' models."""
    w = {name: tensor.double() for name, tensor in tensors().items()}
    x, ids, weights = batch(T)
    want = torch.zeros(T, H, dtype=torch.float64)
    for t in range(T):
        for slot in range(K):
            e = ids[t, slot]
            inner = nn.functional.silu(w["gate"][e] @ x[t].double()) * (w["up"][e] @ x[t].double())
            want[t] += weights[t, slot].double() * (w["down"][e] @ inner)
    got = reference.forward(reference.ReferenceLayer(**tensors()), x, ids, weights)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_leading_dimensions_are_flattened(store: ExpertStore) -> None:
    x, ids, weights = batch(2, 3)
    flat = store.forward(x.view(6, H), ids.view(6, K), weights.view(6, K))
    assert torch.equal(store.forward(x, ids, weights), flat.view(2, 3, H))
    one = store.forward(x[0, 0], ids[0, :1], weights[0, :1])
    assert torch.equal(one, flat[0])
    out = torch.empty(2, 3, H, dtype=torch.bfloat16)
    assert store.forward(x, ids, weights, out=out) is out
    assert torch.equal(out, flat.view(2, 3, H).bfloat16())
    adapter = torch.full((2, 3), -1, dtype=torch.int32)
    assert torch.equal(store.forward(x, ids, weights, adapter=adapter), flat.view(2, 3, H))
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(store.forward(turned, ids, weights), flat.view(2, 3, H))


def test_empty_batch(store: ExpertStore) -> None:
    assert store.forward(*batch(0)).shape == (0, H)
    assert store.forward(*batch(0, 5)).shape == (0, 5, H)
    call = store.prepare(*batch(0))
    call.submit()
    assert call.wait().shape == (0, H)


def test_forward_of_a_store_has_no_graph(store: ExpertStore) -> None:
    x, ids, weights = batch(T)
    y = store.forward(x.requires_grad_(), ids, weights.requires_grad_())
    assert not y.requires_grad
    assert y.dtype == x.dtype
    store.pack(**{name: nn.Parameter(tensor) for name, tensor in tensors().items()})


def test_prepared_call_matches_forward(store: ExpertStore) -> None:
    x, ids, weights = batch(2, 3)
    want = store.forward(x, ids, weights)
    call = store.prepare(x, ids, weights)
    assert call.out.shape == x.shape
    call.submit()
    assert torch.equal(call.wait(), want)
    x.mul_(0)
    call.submit()
    assert (call.wait() == 0).all()
    assert call.address
    with pytest.raises(InputError, match=r"hidden: given strides .*contiguous"):
        store.prepare(x.transpose(0, 1), ids.transpose(0, 1), weights.transpose(0, 1))


def test_experts_packed_one_by_one() -> None:
    whole, single = (ExpertStore(E, H, I, pool=_core.Pool(1)) for _ in range(2))
    w = tensors()
    whole.pack(**w)
    for e in (2, 0, 3, 1):
        with pytest.raises(RuntimeError, match="is not packed"):
            single.forward(*batch(T))
        single.pack(gate=w["gate"][e], up=w["up"][e], down=w["down"][e], first_expert=e)
    assert torch.equal(single.forward(*batch(T)), whole.forward(*batch(T)))


def test_isa_and_default_pool() -> None:
    made = ExpertStore(1, 8, 8, isa="generic")
    made.pack(gate=torch.ones(8, 8), up=torch.ones(8, 8), down=torch.ones(8, 8))
    y = made.forward(torch.full((1, 8), 0.5), torch.tensor([[0]]), torch.ones(1, 1))
    assert made.isa == "generic"
    torch.testing.assert_close(y, torch.full((1, 8), 8 * 16 * torch.tensor(4.0).sigmoid().item()))


fused = torch.ones(E, 2 * I, H)

WRONG = [
    ({}, InputError, "up: given None"),
    ({"up": torch.ones(E, I, H)}, InputError, "gate: given None"),
    ({"gate_up": fused, "gate": torch.ones(E, I, H)}, InputError, "gate: given a tensor, expected None with gate_up"),
    ({"gate_up": fused, "up": torch.ones(E, I, H)}, InputError, "up: given a tensor"),
    (
        {"gate_up": torch.ones(E, I, H)},
        InputError,
        f"gate_up: given shape [{E}, {I}, {H}], expected [experts, {2 * I}, {H}]",
    ),
    ({"gate_up": fused, "transposed": True}, InputError, "it fits with transposed=False"),
    ({"gate_up": fused.transpose(1, 2)}, InputError, "it fits with transposed=True"),
    ({"gate_up": fused.int()}, TypeError, "gate_up: given a tensor of torch.int32"),
    ({"gate_up": fused.to("meta")}, TypeError, "gate_up: given a tensor on meta, expected one in CPU memory"),
    ({"gate_up": [fused]}, TypeError, "gate_up: given a list"),
    ({"gate_up": fused, "gate_up_bias": torch.ones(E, I)}, InputError, f"gate_up_bias: given shape [{E}, {I}]"),
    (
        {"gate_up": fused, "gate_up_bias": torch.ones(E, 2 * I), "up_bias": torch.ones(E, I)},
        InputError,
        "up_bias: given",
    ),
    ({"gate_up": fused, "down_bias": torch.ones(E, I)}, InputError, f"down_bias: given shape [{E}, {I}]"),
    ({"gate_up": fused, "down": torch.ones(E, I, H)}, InputError, "down: given shape"),
    ({"gate_up": fused, "first_expert": 1}, ValueError, "first_expert: given 1"),
    ({"gate_up": fused[:2]}, ValueError, "down: given shape [4, 40, 30], expected [2, 40, 30]"),
]


@pytest.mark.parametrize(("changed", "kind", "part"), WRONG)
def test_wrong_sources_are_refused_by_name(
    store: ExpertStore, changed: dict[str, Any], kind: type[Exception], part: str
) -> None:
    with pytest.raises(kind, match=re.escape(part)):
        store.pack(**({"down": torch.ones(E, H, I)} | changed))


def test_gate_is_refused_for_ungated_experts() -> None:
    ungated = ExpertStore(E, H, I, gated=False, activation="relu2", pool=_core.Pool(1))
    with pytest.raises(InputError, match="gate_up: given a tensor, expected None: these experts have no gate"):
        ungated.pack(gate_up=fused, down=torch.ones(E, H, I))
    with pytest.raises(InputError, match="gate: given a tensor, expected None"):
        ungated.pack(**tensors())
    ungated.pack(up=tensors()["up"], down=tensors()["down"])


def test_wrong_arguments_are_refused_by_name(store: ExpertStore) -> None:
    x, ids, weights = batch(T)
    with pytest.raises(InputError, match=r"out: given shape .*expected the shape of hidden"):
        store.forward(x, ids, weights, out=torch.empty(T, H + 1))
    with pytest.raises(ValueError, match=r"ids: given shape \[5, 2\], expected \[6, 2\]"):
        store.forward(x, ids[:5], weights)
    with pytest.raises(ValueError, match=r"hidden: .*contiguous\(\)"):
        store.forward(x.T.contiguous().T, ids, weights)
    with pytest.raises(TypeError, match="hidden: given a list"):
        store.forward(x.tolist(), ids, weights)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ids: given a list"):
        store.forward(x, ids.tolist(), weights)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"weights: given a Tensor of int32"):
        store.forward(x, ids, weights.int())
    with pytest.raises(InputError, match=r"out: .*viewable as rows"):
        store.forward(
            x.view(2, 3, H), ids.view(2, 3, K), weights.view(2, 3, K), out=torch.empty(3, 2, H).transpose(0, 1)
        )
