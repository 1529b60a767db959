"""Linear layers of a model on the CPU for the few rows that decoding has: weights are read once, as they lie.

torch hands a product of one row to a library that sorts the whole weight into blocks first, and memory is all that
decoding waits for. `hasten` gives the large bf16 layers of a model another `forward`: without gradients and for as many
rows as the core takes at once (8 to 32, by CPU) it is the core's own product, otherwise torch's as before. A row's
result does not depend on the rows beside it; where torch takes over it changes by a rounding.

Layers of one module that are given the same rows, as q, k and v are, become one call of the core (`Siblings`).

Routers and their like are no `nn.Linear`: they call `F.linear` with a parameter of their own. Their parameter becomes a
`Weight`, which is asked by torch itself whenever it takes part in something, and answers for that one function.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
                x, weight, *bias = args
                return _products(weight.pool, x, [weight], bias or [None])[0]
            return func(*args, **(kwargs or {}))


class Siblings:
    """Linear layers of one module. Which of them are given the same tensor, one after the other, is seen at the first
    time; from then on the first one's call computes all of them, and the others find their share. Who is not asked the
    next time is left out again. The tensor must not be changed in between, which inference mode could not tell; a
    family that does so differs from the stock model when a server compares the two."""

    def __init__(self, pool: _core.Pool | None) -> None:
        self._pool = pool
        self._x: Tensor | None = None  # what was multiplied last; held, so that no other tensor can be taken for it
        self._first: nn.Linear | None = None  # by whom
        self._followers: dict[nn.Linear | None, list[nn.Linear]] = {}
        self._ready: dict[nn.Linear, Tensor] = {}

    def forward(self, module: nn.Linear, x: Tensor) -> Tensor:
        if not _takes(x):
            return F.linear(x, module.weight, module.bias)
        if x is self._x and module is not self._first:
            found = self._ready.pop(module, None)
            if found is not None:
                return found
            if module not in self._followers[self._first]:
                self._followers[self._first].append(module)
            return _products(self._pool, x, [module.weight], [module.bias])[0]
        for unasked in self._ready:
            self._followers[self._first].remove(unasked)
        self._x, self._first = x, module
        asked = [module, *self._followers.setdefault(module, [])]
        out, *rest = _products(self._pool, x, [one.weight for one in asked], [one.bias for one in asked])
        self._ready = dict(zip(asked[1:], rest, strict=True))
        return out


def hasten(model: nn.Module, pool: _core.Pool | None = None) -> int:
    """Of how many layers; those of other types, dtypes or devices stay as they are."""
    found = 0
    owners = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    for module in model.modules():
        siblings = Siblings(pool)
        for child in module.children():
            if type(child) is nn.Linear and not isinstance(child.forward, functools.partial) and _fits(child.weight):
                child.forward = functools.partial(siblings.forward, child)  # type: ignore[method-assign]
                found += 1
        if type(module).__module__.startswith("torch."):
            continue
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


def _products(
    pool: _core.Pool | None, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    outs = [torch.empty(rows.shape[0], weight.shape[0], dtype=x.dtype) for weight in weights]
    (pool or default_pool()).linear(rows, [weight.detach() for weight in weights], outs)
    for out, bias in zip(outs, biases, strict=True):
        if bias is not None:
            out += bias
    return [out.view(*x.shape[:-1], -1) for out in outs]
