"""What the operator needs to know of the LoRA of one layer of experts: up to four low-rank factors, each for all of its
experts at once (`a` [E, r, in], `b` [E, out, r]), any strides, in host memory.

The surprising decision: nothing here is a parameter or a module. The factors are views of whatever holds the trained
tensors, so that gradients flow to them and no adapter framework needs to know of the operator. Whether they changed
since they were packed is told by the tensors' version, which torch's fused optimisers forget to count; so it is counted
for them, after every step of any optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


@dataclass(frozen=True)
class Factor:
    """y += scale * B (A x) for every expert: a [E, r, in], b [E, out, r], any strides; both may carry graphs."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class ExpertLora:
    """The LoRA of one layer of experts; each factor may be None.

    `gate_up` holds gate's rows first, then up's, as one factor with a shared A (b [E, 2I, r]); or `gate` and `up` stand
    apart (b [E, I, r]), where the same tensor object as `a` in both is a shared A too. Experts without a gate use `up`.
    `down` has b [E, H, r]. `dropout` is the share of the LoRA input's elements that training drops.
    """

    gate_up: Factor | None = None
    gate: Factor | None = None
    up: Factor | None = None
    down: Factor | None = None
    dropout: float = 0.0


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        increment_version([parameter for parameter in group["params"] if parameter.device.type == "cpu"])


register_optimizer_step_post_hook(_count_step)
