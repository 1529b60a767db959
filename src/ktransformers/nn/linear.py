"""Linear layers of a model on the CPU for the few rows that decoding has: weights are read once, as they lie.

torch hands a product of one row to a library that sorts the whole weight into blocks first, and memory is all that
decoding waits for. `hasten` gives the large bf16 layers of a model another `forward`: without gradients and for up to 8
rows it is the core's own product, otherwise torch's as before. A row's result does not depend on the rows beside it;
between 8 rows and 9 it changes by a rounding.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ktransformers import _core
from ktransformers.nn.pool import default_pool

ROWS = 8
LEAST = 1 << 15  # weights: a smaller layer is not worth waking threads for
COLUMNS = 32  # K is a multiple of


def hasten(model: nn.Module, pool: _core.Pool | None = None) -> int:
    """Of how many layers; those of other types, dtypes or devices stay as they are."""
    found = [module for module in model.modules() if isinstance(module, nn.Linear) and _fits(module)]
    for module in found:
        module.forward = functools.partial(_forward, module, pool)  # type: ignore[method-assign]
    return len(found)


def _fits(module: nn.Linear) -> bool:
    if type(module) is not nn.Linear or isinstance(module.forward, functools.partial):
        return False
    weight = module.weight
    plain = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.is_contiguous()
    return plain and weight.numel() >= LEAST and weight.shape[1] % COLUMNS == 0


def _forward(module: nn.Linear, pool: _core.Pool | None, x: Tensor) -> Tensor:
    rows = x.numel() // max(1, x.shape[-1])
    if not 0 < rows <= ROWS or torch.is_grad_enabled() or x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return F.linear(x, module.weight, module.bias)
    out = torch.empty(rows, module.weight.shape[0], dtype=x.dtype)
    (pool or default_pool()).linear(x.reshape(rows, -1).contiguous(), module.weight.detach(), out)
    if module.bias is not None:
        out += module.bias
    return out.view(*x.shape[:-1], -1)
