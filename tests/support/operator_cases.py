"""A random expert layer, its store, a batch, and float64 reference gradients, for tests of the operator."""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.experts.backend import LocalExperts
from ktransformers.experts.operator import apply_experts
from ktransformers.nn import ExpertStore
from tests.support import reference
from tests.support.variants import ROUNDING

EXPERTS, TOP_K = 5, 3
PACKED_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


class OperatorCase:
    """A layer, its store and a batch. Activations and biases are float32, and weights are representable in bf16; with
    precision f32 or f64 everything has that dtype."""

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
        packed = PACKED_DTYPES[precision]
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
        self.backend = LocalExperts(self.store)
        self.hidden = normal(tokens, hidden).to(dtype).requires_grad_()
        self.ids = torch.randint(-1, EXPERTS + 1, (tokens, TOP_K), generator=g)
        self.weights = torch.rand(tokens, TOP_K, generator=g, dtype=fine).requires_grad_()
        self.grad = normal(tokens, hidden).to(dtype)

    def reference_gradients(self) -> tuple[Tensor, Tensor]:
        hidden = self.hidden.detach().double().requires_grad_()
        weights = self.weights.detach().double().requires_grad_()
        out = reference.forward(self.layer, hidden, self.ids, weights)
        grads: tuple[Tensor, Tensor] = torch.autograd.grad(out, (hidden, weights), self.grad.double())
        return grads

    def gradients(self, retain: bool = True) -> tuple[Tensor, Tensor]:
        out = apply_experts(self.backend, self.hidden, self.ids, self.weights, retain=retain)
        grads: tuple[Tensor, Tensor] = torch.autograd.grad(out, (self.hidden, self.weights), self.grad)
        return grads

    def tolerance(self) -> float:
        """f32 activations: rounding of sums. bf16 ones: hidden rows, gradients and kept gate/up are rounded to 2^-8,
        and a gate that rounds across its clamp loses or gains its whole gradient."""
        if self.store.precision == "f64":
            return 1e-13
        if self.store.isa not in ROUNDING:
            return 1e-5
        return 6e-2 if self.layer.limit else 1.5e-2
