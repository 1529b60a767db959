"""Small-batch matrix products (GEMV) for the bf16 linear layers of a model on the CPU: weights are read once, unpacked.

For a product of one row torch calls a library that first repacks the whole weight into blocks, although decoding is
bound by memory bandwidth. `linears` replaces the `forward` of large layers with bf16 weights, activations in bf16 or,
if the weights are widened (`quantized/widened.py`), in float32: without gradients and for up to as many rows as the
core's kernel takes (8 to 32, by CPU) it calls that kernel, otherwise the layer's own product. A row's result does not
depend on the other rows of its batch; between the kernel and torch it differs by rounding.

Layers of one module with the same input, such as q, k and v, become one call of the core (`SharedInputLinears`).

Routers are not an `nn.Linear`: they call `F.linear` with a parameter of their own. That parameter becomes a
`GemvParameter`, a subclass that intercepts `F.linear` through `__torch_function__`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ktransformers import _core
from ktransformers.ground.pool import default_pool
from ktransformers.modeling.substitute import Substitution, unprobed
from ktransformers.quantized.eligible_modules import is_plain_linear
from ktransformers.quantized.weight import QuantizedWeight
from ktransformers.quantized.widened import COLUMN_MULTIPLE, stored_weight

MIN_WEIGHTS = 1 << 15  # elements; a smaller product takes less time than waking the threads


class GemvParameter(nn.Parameter):
    """An ordinary parameter except in `F.linear`."""

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
            if func is F.linear and not kwargs and isinstance(args[1], cls) and _is_small_batch(args[0], args[1]):
                x, weight, *bias = args
                return _products(weight.pool, x, [weight], bias or [None])[0]
            return func(*args, **(kwargs or {}))


class SharedInputLinears:
    """Linear layers of one module. The first pass records which of them are called with the same tensor in sequence;
    from then on the call of the first one computes all of them, and the others return their cached output. A layer
    whose cached output is not used is removed from its group. The tensor must not be modified between the calls, which
    inference mode cannot detect; a model family that does so shows a difference when a server compares it with the
    stock model."""

    def __init__(self, pool: _core.Pool | None) -> None:
        self._pool = pool
        self._input: Tensor | None = None  # of the last product; referenced, so that its id is not reused
        self._leader: nn.Linear | None = None  # the layer that multiplied it first
        self._followers: dict[nn.Linear | None, list[nn.Linear]] = {}
        self._outputs: dict[nn.Linear, Tensor] = {}  # computed with the leader's, not yet returned

    def forward(self, module: nn.Linear, x: Tensor) -> Tensor:
        if not _is_small_batch(x, module.weight):
            return F.linear(x, module.weight, module.bias)
        if x is self._input and module is not self._leader:
            output = self._outputs.pop(module, None)
            if output is not None:
                return output
            if module not in self._followers[self._leader]:
                self._followers[self._leader].append(module)
            return _products(self._pool, x, [module.weight], [module.bias])[0]
        for unused in self._outputs:
            self._followers[self._leader].remove(unused)
        self._input, self._leader = x, module
        group = [module, *self._followers.setdefault(module, [])]
        first, *others = _products(
            self._pool, x, [linear.weight for linear in group], [linear.bias for linear in group]
        )
        self._outputs = dict(zip(group[1:], others, strict=True))
        return first


Replacement = tuple[nn.Module, str, Any]  # an attribute of a module, and its new value


def linears(pool: _core.Pool | None = None) -> Substitution[Replacement, bool]:
    recognise = functools.partial(_replacements, pool)
    return Substitution("linear layers", recognise, unprobed, lambda one, _, restore: restore.put(*one))


def _replacements(pool: _core.Pool | None, model: nn.Module) -> Iterator[Replacement]:
    """Of every suitable layer. Layers of other types, dtypes or devices are unchanged."""
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for module in model.modules():
        siblings = SharedInputLinears(pool)
        for child in module.children():
            if is_plain_linear(child) and not isinstance(child.forward, functools.partial) and _fits(child.weight):
                yield child, "forward", functools.partial(siblings.forward, child)
        if type(module).__module__.startswith("torch."):
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if type(parameter) is nn.Parameter and owners[id(parameter)] == 1 and _fits(parameter):
                weight = GemvParameter(parameter.data, parameter.requires_grad)
                weight.pool = pool
                yield module, name, weight


def _fits(parameter: Tensor) -> bool:
    weight = stored_weight(parameter)
    if isinstance(weight, QuantizedWeight):  # multiplied by `F.linear`
        return False
    plain = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.is_contiguous()
    return plain and weight.dim() == 2 and weight.numel() >= MIN_WEIGHTS and weight.shape[1] % COLUMN_MULTIPLE == 0


def _is_small_batch(x: Tensor, weight: Tensor) -> bool:
    if x.dtype != weight.dtype or torch.is_grad_enabled() or not x.is_cpu:
        return False
    return 0 < x.numel() <= _max_gemv_rows() * x.shape[-1]


@functools.cache
def _max_gemv_rows() -> int:
    return _core.linear_rows()


def _products(
    pool: _core.Pool | None, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    outs = [torch.empty(rows.shape[0], weight.shape[0], dtype=x.dtype) for weight in weights]
    (pool or default_pool()).linear(rows, [stored_weight(weight).detach() for weight in weights], outs)
    for out, bias in zip(outs, biases, strict=True):
        if bias is not None:
            out += bias
    return [out.view(*x.shape[:-1], -1) for out in outs]
