"""The LoRA of one expert layer as the operator takes it: up to four low-rank factors, each for all experts at once
(`a` [E, r, in], `b` [E, out, r]), with any strides, in host memory.

Nothing here is a parameter or a module: the factors are views of the tensors that an adapter framework trains, so
gradients flow to those and the framework needs no knowledge of the operator. Factors are packed again when the version
counter of a tensor has changed. torch's fused optimisers do not increment it, so an optimiser hook does, after every
step of any optimiser.
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
    """The LoRA of one expert layer; each factor may be None.

    `gate_up` is one factor with a shared A whose B has gate's rows before up's (b [E, 2I, r]). Alternatively `gate` and
    `up` are separate (b [E, I, r]); the same tensor object as `a` in both is a shared A too. Experts without a gate use
    `up`. `down` has b [E, H, r]. `dropout` is the probability with which training drops an element of LoRA's input.
    """

    gate_up: Factor | None = None
    gate: Factor | None = None
    up: Factor | None = None
    down: Factor | None = None
    dropout: float = 0.0


def _increment_versions(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        increment_version([parameter for parameter in group["params"] if parameter.device.type == "cpu"])


register_optimizer_step_post_hook(_increment_versions)
