"""Two linear operators of one's own, for docs/operators.md: one counts its calls, one has weights of three bits.

PYTHONPATH=examples/operators kt serve MODEL --kt-optimize-rule examples/operators/three_bits.yaml
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ktransformers.operators import BaseInjectedModule, KLinearBase


class CountingLinear(BaseInjectedModule, KLinearBase):
    """The product of the original layer, and the number of its calls."""

    def __init__(
        self,
        key: str,
        gguf_loader: Any,
        config: Any,
        orig_module: nn.Module | None = None,
        generate_device: str = "cuda",
        start: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(key, gguf_loader, config, orig_module, generate_device, **kwargs)
        KLinearBase.__init__(self)
        self.calls = start

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.linear(x, self.weight, self.bias)


class ThreeBitLinear(BaseInjectedModule, KLinearBase):
    """Every group of `group` weights of a row is rounded to eight numbers between its least and its largest one. The
    rounded numbers are stored as they are, so nothing is saved: the class shows what three bits cost in quality."""

    def __init__(
        self,
        key: str,
        gguf_loader: Any,
        config: Any,
        orig_module: nn.Module | None = None,
        generate_device: str = "cuda",
        group: int = 32,
        **kwargs: Any,
    ) -> None:
        super().__init__(key, gguf_loader, config, orig_module, generate_device, **kwargs)
        KLinearBase.__init__(self)
        self.group = group

    def load(self, w: Any = None, device: Any = None) -> None:
        given = self.load_weight(device=device) if w is None else w
        weight = given[0] if isinstance(given, tuple) else given
        self.weight = nn.Parameter(three_bits(weight.detach(), self.group), requires_grad=False)

    def unload(self) -> None:
        self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def three_bits(weight: Tensor, group: int) -> Tensor:
    """`[N, K]`, K a multiple of `group`."""
    groups = weight.float().view(weight.shape[0], -1, group)
    least = groups.amin(-1, keepdim=True)
    step = (groups.amax(-1, keepdim=True) - least).clamp(min=torch.finfo(torch.float32).tiny) / 7
    return (((groups - least) / step).round() * step + least).view_as(weight).to(weight.dtype)
