"""RMS norms of a model in one kernel instead of seven operators of torch: of the core on the CPU, for small batches,
and of Triton on a GPU (`norm_triton.py`).

A decoder layer has two to four norms. While one token is decoded they cause most of the Python overhead on the CPU, and
on a GPU they are a third of all kernels. A module is recognised by what it computes, not by its class: its `forward` is
called once with random numbers, and a module that returns x / rms(x), rounded to x's dtype, times the weight gets a new
`forward`. The fused kernel runs without gradients, on the CPU for up to `MAX_ELEMENTS` elements; otherwise the module's
own `forward` runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ktransformers import _core
from ktransformers.ground.packages import import_triton_module
from ktransformers.modeling.substitute import Substitution, matches

TRITON = "ktransformers.modeling.norm_triton"
MAX_ELEMENTS = 1 << 16  # of the input on the CPU; the kernel runs in one thread
DTYPES = {"cpu": (torch.bfloat16, torch.float32), "cuda": (torch.bfloat16, torch.float16, torch.float32)}
EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")


def epsilon_of(module: Any) -> float | None:
    """Of a module that may be a norm."""
    epsilons = (getattr(module, name, None) for name in EPSILON_NAMES)
    return next((value for value in epsilons if isinstance(value, float)), None)


def norm_epsilon(module: Any) -> float | None:
    """Of an RMS norm whose forward was replaced; None: of any other module."""
    forward = getattr(module, "forward", None)
    if not isinstance(forward, functools.partial) or forward.func is not _forward:
        return None
    epsilon: float = forward.args[2]
    return epsilon


def _fits(module: Any) -> bool:
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    if list(parameters) != ["weight"] or list(module.children()) or isinstance(module.forward, functools.partial):
        return False
    if epsilon_of(module) is None:
        return False
    if len(inspect.signature(module.forward).parameters) != 1:  # gated norms of linear attention take a second tensor
        return False
    if weight is None or weight.dim() != 1 or weight.dtype not in DTYPES.get(weight.device.type, ()):
        return False
    return weight.is_cpu or import_triton_module(TRITON) is not None


def _probe(module: Any) -> float | None:
    """The epsilon of a module that computes an RMS norm."""
    epsilon, size = epsilon_of(module), module.weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, size, generator=generator).to(module.weight)
    # A weight of ones would not distinguish w from 1 + w.
    weight = torch.rand(size, generator=generator).to(module.weight) + 0.5
    assert epsilon is not None
    return epsilon if matches(_norm(x, weight, epsilon), functional_call(module, {"weight": weight}, (x,))) else None


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    kernels = None if rows.is_cpu else import_triton_module(TRITON)
    if kernels is None:
        _core.rms_norm(rows, weight, out, epsilon)
    else:
        kernels.rms_norm(rows, weight, out, epsilon)
    return out.view(x.shape)


def _forward(module: nn.Module, stock_forward: Callable[[Tensor], Tensor], epsilon: float, x: Tensor) -> Tensor:
    weight: Any = module.weight
    too_many = x.is_cpu and x.numel() > MAX_ELEMENTS
    if too_many or torch.is_grad_enabled() or x.dtype != weight.dtype or x.device != weight.device or not x.numel():
        return stock_forward(x)
    return _norm(x, weight.detach(), epsilon)


NORMS: Substitution[Any, float] = Substitution(
    "RMS norms",
    lambda model: filter(_fits, model.modules()),
    _probe,
    lambda module, found, restore: restore.put(
        module, "forward", functools.partial(_forward, module, module.forward, found)
    ),
)
