"""Linear layers of a model on the CPU for the few rows that decoding has: weights are read once, as they lie.

torch hands a product of one row to a library that sorts the whole weight into blocks first, and memory is all that
decoding waits for. `hasten` gives the large bf16 layers of a model another `forward`: without gradients and for as many
rows as the core takes at once (8 to 32, by CPU) it is the core's own product, otherwise torch's as before. A row's
result does not depend on the rows beside it; where torch takes over it changes by a rounding.

Routers and their like are no `nn.Linear`: they call `F.linear` with a parameter of their own. Their parameter becomes a
`Weight`, which is asked by torch itself whenever it takes part in something, and answers for that one function.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ktransformers import _core
from ktransformers.nn.pool import default_pool

LEAST = 1 << 15  # weights: a smaller layer is not worth waking threads for
COLUMNS = 32  # K is a multiple of


class Weight(nn.Parameter):
    """To everything but `F.linear` a parameter like any other."""

    pool: _core.Pool | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and not kwargs and isinstance(args[1], cls) and _takes(args[0]):
                return _product(args[1].pool, *args)
            return func(*args, **(kwargs or {}))


def hasten(model: nn.Module, pool: _core.Pool | None = None) -> int:
    """Of how many layers; those of other types, dtypes or devices stay as they are."""
    found = 0
    owners = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    for module in model.modules():
        if type(module) is nn.Linear:
            if not isinstance(module.forward, functools.partial) and _fits(module.weight):
                module.forward = functools.partial(_forward, module, pool)  # type: ignore[method-assign]
                found += 1
        elif not type(module).__module__.startswith("torch."):
            for name, one in list(module.named_parameters(recurse=False)):
                if type(one) is nn.Parameter and owners[id(one)] == 1 and _fits(one):
                    weight = Weight(one.data, one.requires_grad)
                    weight.pool = pool
                    module.register_parameter(name, weight)
                    found += 1
    return found


def _fits(weight: Tensor) -> bool:
    plain = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.is_contiguous()
    return plain and weight.dim() == 2 and weight.numel() >= LEAST and weight.shape[1] % COLUMNS == 0


def _takes(x: Tensor) -> bool:
    if x.dtype != torch.bfloat16 or torch.is_grad_enabled() or not x.is_cpu:
        return False
    return 0 < x.numel() <= _core_rows() * x.shape[-1]


@functools.cache
def _core_rows() -> int:
    return _core.linear_rows()


def _product(pool: _core.Pool | None, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty(rows.shape[0], weight.shape[0], dtype=x.dtype)
    (pool or default_pool()).linear(rows, [weight.detach()], [out])
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], -1)


def _forward(module: nn.Linear, pool: _core.Pool | None, x: Tensor) -> Tensor:
    if _takes(x):
        return _product(pool, x, module.weight, module.bias)
    return F.linear(x, module.weight, module.bias)
