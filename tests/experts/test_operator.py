"""The operator under autograd: gradients against float64, retain and recompute, checkpointing and accumulation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ktransformers.experts.operator import apply_experts, experts, handle_of
from tests.support.operator_cases import EXPERTS, TOP_K, OperatorCase, relative_error

FORMS = [
    {"activation": "silu"},
    {"activation": "silu", "limit": 0.7},
    {"activation": "gelu"},
    {"activation": "gelu_tanh"},
    {"activation": "relu2"},
    {"activation": "swiglu_oai", "alpha": 1.702, "limit": 0.9},
    {"activation": "silu", "gated": False},
    {"activation": "gelu", "gated": False},
    {"activation": "gelu_tanh", "gated": False},
    {"activation": "relu2", "gated": False},
    {"activation": "silu", "bias": True},
    {"activation": "relu2", "gated": False, "bias": True},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda f: "-".join(str(v) for v in f.values()))
def test_gradients_match_float64(isa: str, form: dict[str, object]) -> None:
    case = OperatorCase(isa, **form)  # type: ignore[arg-type]
    for actual, expected in zip(case.gradients(), case.reference_gradients(), strict=True):
        assert relative_error(actual, expected) < case.tolerance()


@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate"),
    [(1, 32, 32), (3, 33, 65), (200, 48, 40), (40, 2700, 24), (12, 24, 3200)],
    ids=str,
)
def test_odd_sizes_match_float64(isa: str, tokens: int, hidden: int, intermediate: int) -> None:
    case = OperatorCase(isa, tokens, hidden, intermediate)
    for actual, expected in zip(case.gradients(), case.reference_gradients(), strict=True):
        assert relative_error(actual, expected) < 2 * case.tolerance()


def test_retain_and_recompute_give_the_same_bits(isa: str) -> None:
    case = OperatorCase(isa, tokens=50)
    for kept, computed in zip(case.gradients(retain=True), case.gradients(retain=False), strict=True):
        assert torch.equal(kept, computed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float16_matches_float64(dtype: torch.dtype) -> None:
    case = OperatorCase("generic", dtype=dtype)
    grad_hidden, grad_weights = case.gradients()
    assert grad_hidden.dtype == dtype and grad_weights.dtype == torch.float32
    for actual, expected in zip((grad_hidden, grad_weights), case.reference_gradients(), strict=True):
        assert relative_error(actual, expected) < 2**-8


def test_gradients_match_finite_differences() -> None:
    case = OperatorCase("generic", tokens=4, hidden=16, intermediate=24)
    grad_hidden, grad_weights = case.gradients()
    step = 1e-2
    for tensor, grad, other in ((case.hidden, grad_hidden, case.weights), (case.weights, grad_weights, case.hidden)):
        for at in range(0, tensor.numel(), 7):
            sums = []
            for sign in (1, -1):
                moved = tensor.detach().clone()
                moved.view(-1)[at] += sign * step
                pair = (moved, other.detach()) if tensor is case.hidden else (other.detach(), moved)
                out = case.store.forward(pair[0], case.ids, pair[1])
                sums.append(float((out.double() * case.grad.double()).sum()))
            slope = (sums[0] - sums[1]) / (2 * step)
            assert abs(slope - float(grad.view(-1)[at])) < 2e-3 * (1 + abs(slope))


def test_checkpointing_and_gradient_accumulation() -> None:
    case = OperatorCase("generic")
    expected = case.gradients()

    def layer(hidden: Tensor, weights: Tensor) -> Tensor:
        return apply_experts(case.backend, hidden, case.ids, weights)

    for _ in range(2):
        out = checkpoint(layer, case.hidden, case.weights, use_reentrant=False)
        assert isinstance(out, Tensor)
        out.backward(case.grad)
    assert case.hidden.grad is not None and case.weights.grad is not None
    assert torch.allclose(case.hidden.grad, 2 * expected[0])
    assert torch.allclose(case.weights.grad, 2 * expected[1])


def test_selective_checkpointing_saves_the_output() -> None:
    case = OperatorCase("generic")
    expected = case.gradients()
    calls = []

    def policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        is_experts = op == torch.ops.ktransformers.experts.default
        return CheckpointPolicy.MUST_SAVE if is_experts else CheckpointPolicy.PREFER_RECOMPUTE

    forward = case.store.forward

    def counted(*args: object, **kwargs: object) -> Tensor:
        calls.append(1)
        return forward(*args, **kwargs)  # type: ignore[arg-type]

    case.store.forward = counted  # type: ignore[method-assign]
    out = checkpoint(
        lambda h, w: apply_experts(case.backend, h, case.ids, w) * 1.0,
        case.hidden,
        case.weights,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    assert isinstance(out, Tensor)
    actual = torch.autograd.grad(out, (case.hidden, case.weights), case.grad)
    assert len(calls) == 1, "the forward pass ran again although its outputs were kept"
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_no_gradient_is_allocated_for_retained_activations() -> None:
    """It would be zeros of the size of all gates and ups, the largest allocation of a backward pass."""
    case = OperatorCase("generic")
    out = apply_experts(case.backend, case.hidden, case.ids, case.weights)
    made = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operator(*args, **(kwargs or {}))
            made.append(result.dtype if isinstance(result, Tensor) else None)
            return result

    with Watching():
        torch.autograd.grad(out, (case.hidden, case.weights), case.grad)
    assert made and torch.uint8 not in made


def test_opcheck_accepts_the_operator() -> None:
    case = OperatorCase("generic", tokens=6)
    ids = case.ids.clamp(0, EXPERTS - 1)  # what is kept of rows that nobody computes is whatever lay there
    for retain in (True, False):
        given = (case.hidden, ids, case.weights, [], handle_of(case.backend), "", [1.0, 1.0, 1.0])
        torch.library.opcheck(experts, (*given, retain, 0.0, 0, 0))


def test_inference_skips_the_operator() -> None:
    case = OperatorCase("generic")
    with torch.no_grad():
        plain = apply_experts(case.backend, case.hidden, case.ids, case.weights)
    assert plain.grad_fn is None
    learned = apply_experts(case.backend, case.hidden, case.ids, case.weights)
    assert learned.grad_fn is not None and torch.equal(plain, learned)


def test_leading_dimensions_and_frozen_routing() -> None:
    case = OperatorCase("generic", tokens=24)
    hidden = case.hidden.detach().view(2, 3, 4, -1).requires_grad_()
    ids, weights = case.ids.view(2, 3, 4, -1), case.weights.detach().view(2, 3, 4, -1)
    out = apply_experts(case.backend, hidden, ids, weights)
    (actual,) = torch.autograd.grad(out, hidden, case.grad.view_as(out))
    assert torch.equal(actual.view_as(case.hidden), case.gradients()[0])


def test_deleted_backend_is_reported() -> None:
    case = OperatorCase("generic")
    handle = handle_of(case.backend)
    batch = copy.copy((case.hidden, case.ids, case.weights))
    del case
    with pytest.raises(RuntimeError, match="was deleted"):
        experts(*batch, [], handle, "", [1.0, 1.0, 1.0], False, 0.0, 0, 0)


def test_bad_gradients_are_refused_by_name() -> None:
    case = OperatorCase("generic", tokens=4)
    core = case.store._experts
    hidden, ids, weights = case.hidden.detach(), case.ids, case.weights.detach()
    good = {"grad_out": case.grad, "grad_hidden": torch.empty_like(hidden), "grad_weights": torch.empty(4, TOP_K)}
    bad = {
        "grad_out": case.grad[:, :-1],
        "grad_hidden": torch.empty(3, hidden.shape[1]),
        "grad_weights": torch.empty(4, TOP_K, dtype=torch.float16),
        "keep": torch.empty(7, dtype=torch.uint8),
    }
    for name, tensor in bad.items():
        given = {**good, name: tensor}
        with pytest.raises((TypeError, ValueError), match=name):
            core.backward(hidden=hidden, ids=ids, weights=weights, **given)
