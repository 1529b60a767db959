"""Routers on a GPU: softmax, the k largest, and their normalisation in one kernel (`router_triton.py`) instead of
eight.

A router is recognised by what it computes, not by its class: a module with a weight `[E, H]`, with or without a bias,
and an attribute `top_k`, whose `forward` returns logits `[T, E]`, scores and ids `[T, k]`. It is called once with
random numbers, and gets a new `forward` if scores are a softmax of the logits, over all experts or over the selected
ones, and ids are those of the largest logits. The kernel runs without gradients and for few rows; otherwise the
module's own `forward` runs. Where two logits are equal the lower index is selected; torch promises no order for these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ktransformers.ground.packages import import_triton_module
from ktransformers.modeling.substitute import Substitution, matches, random_numbers

TRITON = "ktransformers.modeling.router_triton"
MAX_ROWS = 256
PROBE_ROWS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

RouterOutput = tuple[Tensor, Tensor, Tensor]  # logits, scores, ids


def _fits(module: Any) -> bool:
    parameters, top_k = dict(module.named_parameters()), getattr(module, "top_k", None)
    weight = parameters.get("weight")
    if weight is None or set(parameters) - {"weight", "bias"} or list(module.children()):
        return False
    if weight.dim() != 2 or weight.dtype not in DTYPES or isinstance(module.forward, functools.partial):
        return False
    return isinstance(top_k, int) and weight.is_cuda and import_triton_module(TRITON) is not None


def _normalises(module: Any) -> tuple[bool, torch.dtype] | None:
    """Whether the scores are a softmax over the selected experts alone, and their dtype; None: neither this nor one
    over all experts, or the numbers cannot tell."""
    weight = module.weight
    x = _random_rows(weight)
    outputs = module(x)
    if not _is_router_output(outputs, (PROBE_ROWS, *weight.shape[:1]), module.top_k):
        return None
    logits, scores, ids = outputs
    if not matches(F.linear(x, weight, module._parameters.get("bias")), logits):
        return None
    found = []
    for normalise in (False, True):
        fused, fused_ids = select(logits, module.top_k, normalise, scores.dtype)
        if matches(fused, scores) and torch.equal(logits.gather(1, fused_ids), logits.gather(1, ids)):
            found.append((normalise, scores.dtype))
    return found[0] if len(found) == 1 or (module.top_k == len(weight) and found) else None


def _random_rows(weight: Tensor) -> Tensor:
    """Random rows whose logits have a standard deviation of about one. Where one logit is far above the others its
    score is one with and without normalisation, and a router of either kind would match both."""
    x = random_numbers()(PROBE_ROWS, weight.shape[1]).to(weight)
    spread = F.linear(x.float(), weight.float()).std(dim=1, keepdim=True, correction=0)
    return (x / torch.where(spread > 0, spread, 1)).to(weight.dtype)


def _is_router_output(outputs: Any, shape: tuple[int, int], top_k: int) -> bool:
    if not isinstance(outputs, tuple) or len(outputs) != 3 or not all(isinstance(one, Tensor) for one in outputs):
        return False
    logits, scores, ids = outputs
    pair = (shape[0], top_k)
    return bool(logits.shape == shape and scores.shape == pair == ids.shape and ids.dtype == torch.int64)


def select(logits: Tensor, top_k: int, normalise: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scores in `dtype` and ids int64 `[T, k]`."""
    kernels = import_triton_module(TRITON)
    assert kernels is not None
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        selected: tuple[Tensor, Tensor] = kernels.select(logits, top_k, normalise, dtype)
    return selected


def _forward(
    module: Any, stock_forward: Callable[[Tensor], RouterOutput], normalise: bool, dtype: torch.dtype, x: Tensor
) -> RouterOutput:
    weight = module.weight
    rows = x.numel() // weight.shape[1]
    if torch.is_grad_enabled() or not 0 < rows <= MAX_ROWS or x.dtype != weight.dtype or x.device != weight.device:
        return stock_forward(x)
    logits = F.linear(x.reshape(rows, -1), weight, module._parameters.get("bias"))
    scores, ids = select(logits, module.top_k, normalise, dtype)
    return logits, scores, ids


ROUTERS: Substitution[Any, tuple[bool, torch.dtype]] = Substitution(
    "routers",
    lambda model: filter(_fits, model.modules()),
    _normalises,
    lambda module, found, restore: restore.put(
        module, "forward", functools.partial(_forward, module, module.forward, *found)
    ),
)
