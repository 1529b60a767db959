"""The norms of a model on the CPU for the few rows that decoding has: seven operators of torch are one of the core's.

A decoder layer has two to four of them, and while one token is computed they are most of what Python does. A module is
known by what it computes, not by its class: its own `forward` is asked with random numbers once, and modules whose
answer is x over its root mean square, rounded to x's type, times the weight get another `forward`. It is taken without
gradients and for up to `MOST` numbers, otherwise the module's own as before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers import _core

MOST = 1 << 16  # numbers: one thread has them
TYPES = (torch.bfloat16, torch.float32)
NAMES = ("variance_epsilon", "eps", "epsilon")


def hasten_norms(model: nn.Module) -> int:
    """Of how many modules."""
    found = 0
    for module in model.modules():
        epsilon = next((value for name in NAMES if isinstance(value := getattr(module, name, None), float)), None)
        if epsilon is not None and _fits(module) and _is_plain(module, epsilon):
            module.forward = functools.partial(_forward, module, module.forward, epsilon)
            found += 1
    return found


def _fits(module: Any) -> bool:
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    if list(parameters) != ["weight"] or list(module.children()) or isinstance(module.forward, functools.partial):
        return False
    if len(inspect.signature(module.forward).parameters) != 1:  # the norms of some states take a gate as well
        return False
    return weight is not None and weight.dim() == 1 and weight.device.type == "cpu" and weight.dtype in TYPES


def _is_plain(module: nn.Module, epsilon: float) -> bool:
    weight = module.get_parameter("weight")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, weight.shape[0], generator=generator).to(weight.dtype)
    other = torch.rand(weight.shape[0], generator=generator).to(weight.dtype) + 0.5
    before = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(other)  # all ones would not tell w from 1 + w
        try:
            wanted = module(x)
            found = _norm(x, other, epsilon)
        except (TypeError, ValueError, RuntimeError):
            return False
        finally:
            weight.copy_(before)
    if not isinstance(wanted, Tensor) or wanted.dtype != x.dtype or wanted.shape != x.shape:
        return False
    return bool(
        (found.float() - wanted.float()).norm() <= (1e-2 if x.dtype == torch.bfloat16 else 1e-5) * wanted.float().norm()
    )


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    _core.rms_norm(rows, weight, out, epsilon)
    return out.view(x.shape)


def _forward(module: nn.Module, own: Callable[[Tensor], Tensor], epsilon: float, x: Tensor) -> Tensor:
    weight: Any = module.weight
    if x.numel() > MOST or torch.is_grad_enabled() or x.dtype != weight.dtype or x.device.type != "cpu":
        return own(x)
    return _norm(x, weight.detach(), epsilon)
