"""The operator under autograd: gradients against float64, both policies, and the ways in which PyTorch uses it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ktransformers.nn import ExpertStore, reference
from ktransformers.nn.operator import apply_experts, experts, handle_of

EXPERTS, TOP_K = 5, 3
PACKED = {"bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


class Case:
    """A layer, its store and a batch; activations and biases are float32, weights exactly bf16. With an exact precision
    everything is of it."""

    def __init__(
        self,
        isa: str,
        tokens: int = 23,
        hidden: int = 70,
        intermediate: int = 41,
        gated: bool = True,
        activation: str = "silu",
        limit: float = 0.0,
        alpha: float = 0.0,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        precision: str = "bf16",
    ) -> None:
        g = torch.Generator().manual_seed(tokens + hidden)
        packed = PACKED[precision]
        fine = torch.float64 if precision == "f64" else torch.float32
        dtype = fine if precision != "bf16" else dtype

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=g, dtype=fine) * scale).to(packed)

        up = normal(EXPERTS, intermediate, hidden, scale=hidden**-0.5)
        gate = normal(EXPERTS, intermediate, hidden, scale=hidden**-0.5) if gated else None
        down = normal(EXPERTS, hidden, intermediate, scale=intermediate**-0.5)
        biases = {}
        if bias:
            biases = {"up_bias": normal(EXPERTS, intermediate).to(fine), "down_bias": normal(EXPERTS, hidden).to(fine)}
            if gated:
                biases["gate_bias"] = normal(EXPERTS, intermediate).to(fine)
        form = {"activation": activation, "limit": limit, "alpha": alpha}
        self.layer = reference.ReferenceLayer(up, down, gate, packed=packed, **form, **biases)
        self.store = ExpertStore(EXPERTS, hidden, intermediate, gated=gated, isa=isa, precision=precision, **form)
        self.store.pack(gate=gate, up=up, down=down, **biases)
        self.hidden = normal(tokens, hidden).to(dtype).requires_grad_()
        self.ids = torch.randint(-1, EXPERTS + 1, (tokens, TOP_K), generator=g)
        self.weights = torch.rand(tokens, TOP_K, generator=g, dtype=fine).requires_grad_()
        self.grad = normal(tokens, hidden).to(dtype)

    def exact(self) -> tuple[Tensor, Tensor]:
        hidden = self.hidden.detach().double().requires_grad_()
        weights = self.weights.detach().double().requires_grad_()
        out = reference.forward(self.layer, hidden, self.ids, weights)
        grads: tuple[Tensor, Tensor] = torch.autograd.grad(out, (hidden, weights), self.grad.double())
        return grads

    def found(self, retain: bool = True) -> tuple[Tensor, Tensor]:
        out = apply_experts(self.store, self.hidden, self.ids, self.weights, retain=retain)
        grads: tuple[Tensor, Tensor] = torch.autograd.grad(out, (self.hidden, self.weights), self.grad)
        return grads

    def tolerance(self) -> float:
        """f32 activations: rounding of sums. bf16 ones: hidden rows, gradients and kept gate/up are rounded to 2^-8,
        and a gate that rounds across its clamp loses or gains its whole gradient."""
        if self.store.precision == "f64":
            return 1e-13
        if self.store.isa in ("generic", "avx2", "avx512"):
            return 1e-5
        return 6e-2 if self.layer.limit else 1.5e-2


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
def test_gradients(isa: str, form: dict[str, object]) -> None:
    case = Case(isa, **form)  # type: ignore[arg-type]
    for found, expected in zip(case.found(), case.exact(), strict=True):
        assert relative(found, expected) < case.tolerance()


@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate"),
    [(1, 32, 32), (3, 33, 65), (200, 48, 40), (40, 2700, 24), (12, 24, 3200)],
    ids=str,
)
def test_sizes(isa: str, tokens: int, hidden: int, intermediate: int) -> None:
    case = Case(isa, tokens, hidden, intermediate)
    for found, expected in zip(case.found(), case.exact(), strict=True):
        assert relative(found, expected) < 2 * case.tolerance()


def test_retain_and_recompute_give_the_same_bits(isa: str) -> None:
    case = Case(isa, tokens=50)
    for kept, computed in zip(case.found(retain=True), case.found(retain=False), strict=True):
        assert torch.equal(kept, computed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    case = Case("generic", dtype=dtype)
    grad_hidden, grad_weights = case.found()
    assert grad_hidden.dtype == dtype and grad_weights.dtype == torch.float32
    for found, expected in zip((grad_hidden, grad_weights), case.exact(), strict=True):
        assert relative(found, expected) < 2**-8


def test_finite_differences() -> None:
    case = Case("generic", tokens=4, hidden=16, intermediate=24)
    grad_hidden, grad_weights = case.found()
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


def test_checkpointing_and_accumulation() -> None:
    case = Case("generic")
    expected = case.found()

    def layer(hidden: Tensor, weights: Tensor) -> Tensor:
        return apply_experts(case.store, hidden, case.ids, weights)

    for _ in range(2):
        out = checkpoint(layer, case.hidden, case.weights, use_reentrant=False)
        assert isinstance(out, Tensor)
        out.backward(case.grad)
    assert case.hidden.grad is not None and case.weights.grad is not None
    assert torch.allclose(case.hidden.grad, 2 * expected[0])
    assert torch.allclose(case.weights.grad, 2 * expected[1])


def test_selective_checkpointing_keeps_the_output() -> None:
    case = Case("generic")
    expected = case.found()
    calls = []

    def policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        mine = op == torch.ops.ktransformers.experts.default
        return CheckpointPolicy.MUST_SAVE if mine else CheckpointPolicy.PREFER_RECOMPUTE

    forward = case.store.forward

    def counted(*args: object, **kwargs: object) -> Tensor:
        calls.append(1)
        return forward(*args, **kwargs)  # type: ignore[arg-type]

    case.store.forward = counted  # type: ignore[method-assign]
    out = checkpoint(
        lambda h, w: apply_experts(case.store, h, case.ids, w) * 1.0,
        case.hidden,
        case.weights,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    assert isinstance(out, Tensor)
    found = torch.autograd.grad(out, (case.hidden, case.weights), case.grad)
    assert len(calls) == 1, "the forward pass ran again although its outputs were kept"
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_no_gradient_is_made_for_what_is_kept() -> None:
    """It would be zeros of the size of all gates and ups, larger than anything else in a backward pass."""
    case = Case("generic")
    out = apply_experts(case.store, case.hidden, case.ids, case.weights)
    made = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operator(*args, **(kwargs or {}))
            made.append(result.dtype if isinstance(result, Tensor) else None)
            return result

    with Watching():
        torch.autograd.grad(out, (case.hidden, case.weights), case.grad)
    assert made and torch.uint8 not in made


def test_the_operator_is_well_formed() -> None:
    case = Case("generic", tokens=6)
    ids = case.ids.clamp(0, EXPERTS - 1)  # what is kept of rows that nobody computes is whatever lay there
    for retain in (True, False):
        torch.library.opcheck(
            experts, (case.hidden, ids, case.weights, [], handle_of(case.store), "", [1.0, 1.0, 1.0], retain, 0.0, 0)
        )


def test_no_grad_and_inference_pay_no_operator() -> None:
    case = Case("generic")
    with torch.no_grad():
        plain = apply_experts(case.store, case.hidden, case.ids, case.weights)
    assert plain.grad_fn is None
    learned = apply_experts(case.store, case.hidden, case.ids, case.weights)
    assert learned.grad_fn is not None and torch.equal(plain, learned)


def test_leading_dimensions_and_frozen_routing() -> None:
    case = Case("generic", tokens=24)
    hidden = case.hidden.detach().view(2, 3, 4, -1).requires_grad_()
    ids, weights = case.ids.view(2, 3, 4, -1), case.weights.detach().view(2, 3, 4, -1)
    out = apply_experts(case.store, hidden, ids, weights)
    (found,) = torch.autograd.grad(out, hidden, case.grad.view_as(out))
    assert torch.equal(found.view_as(case.hidden), case.found()[0])


def test_a_store_that_is_gone_is_named() -> None:
    case = Case("generic")
    handle = handle_of(case.store)
    batch = copy.copy((case.hidden, case.ids, case.weights))
    del case
    with pytest.raises(RuntimeError, match="was deleted"):
        experts(*batch, [], handle, "", [1.0, 1.0, 1.0], False, 0.0, 0)


def test_bad_gradients_are_refused_by_name() -> None:
    case = Case("generic", tokens=4)
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
        with pytest.raises((TypeError, ValueError), match=name if name != "grad_hidden" else "out"):
            core.backward(hidden=hidden, ids=ids, weights=weights, **given)
