"""The gated delta rule of one new token of many sequences in one kernel, on a GPU (`delta_rule_triton.py`).

transformers computes it by about twenty operators of torch unless `flash-linear-attention` is installed, in a function
that the modules of Qwen3-Next, Qwen3.5 and others look up in the file of their class under one name. That name is given
a function that runs the kernel where it applies: one token, a state in float32, no gradients, a GPU. In every other
case, prompts among them, it calls the stock function. The kernel is compared with the stock function on random numbers
first; where they differ, for another rule under the same name, the stock function stays.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.ground.packages import import_triton_module
from ktransformers.modeling.substitute import RECURRENCE, Substitution, matches, random_numbers

TRITON = "ktransformers.modeling.delta_rule_triton"
FUNCTION = "torch_recurrent_gated_delta_rule"
SIZES = (2, 3, 32, 48)  # rows, heads, key and value of the comparison

DeltaRule = Callable[..., tuple[Tensor, Tensor | None]]


def _files(model: nn.Module) -> Iterator[tuple[ModuleType, torch.device]]:
    """The files of this model's classes that have the function."""
    device = next(model.parameters()).device
    if device.type == "cuda" and import_triton_module(TRITON) is not None:
        for file in {sys.modules[type(module).__module__] for module in model.modules()}:
            if not isinstance(vars(file).get(FUNCTION), NoneType | functools.partial):
                yield file, device


def _probe(target: tuple[ModuleType, torch.device]) -> DeltaRule | None:
    file, device = target
    stock: DeltaRule = vars(file)[FUNCTION]
    return stock if computes_the_same(stock, device) else None


DELTA_RULE = Substitution(
    "delta rules",
    _files,
    _probe,
    lambda target, stock, restore: restore.put(target[0], FUNCTION, functools.partial(_delta_rule, stock)),
)


def computes_the_same(stock: DeltaRule, device: torch.device) -> bool:
    rows, heads, size, columns = SIZES
    numbers = random_numbers()

    def random(*shape: int) -> Tensor:
        return numbers(*shape).to(device)

    words: dict[str, Any] = {"g": -random(rows, 1, heads).abs(), "beta": random(rows, 1, heads).sigmoid()}
    words |= {"initial_state": random(rows, heads, size, columns), "output_final_state": True}
    given = random(rows, 1, heads, size), random(rows, 1, heads, size), random(rows, 1, heads, columns)
    with torch.inference_mode():
        for normed in (False, True):
            expected = stock(*given, **words, use_qk_l2norm_in_kernel=normed)
            measured = _delta_rule(_refuse, *given, **words, use_qk_l2norm_in_kernel=normed)
            for ours, theirs in zip(measured, expected, strict=True):
                if ours is None or not matches(ours, theirs, RECURRENCE):
                    return False
    return True


def _refuse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    raise ValueError("the kernel does not apply")


def _delta_rule(stock: DeltaRule, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """`[N, 1, H, K]` twice, `[N, 1, H, V]` -> `[N, 1, H, V]` and the state."""
    state, packed = kwargs.get("initial_state"), kwargs.get("cu_seqlens")
    g, beta = kwargs.get("g"), kwargs.get("beta")
    applies = len(args) == 3 and isinstance(g, Tensor) and isinstance(beta, Tensor) and packed is None
    if not applies or not isinstance(state, Tensor) or not _fits(args[0], state):
        return stock(*args, **kwargs)
    assert isinstance(g, Tensor) and isinstance(beta, Tensor)
    kernels = import_triton_module(TRITON)
    assert kernels is not None
    query, key, value = (one[:, 0] for one in args)
    normed = bool(kwargs.get("use_qk_l2norm_in_kernel"))
    out, new_state = kernels.delta_step(query, key, value, g[:, 0], beta[:, 0], state, normed=normed)
    return out[:, None], new_state if kwargs.get("output_final_state") else None


def _fits(query: Tensor, state: Tensor) -> bool:
    one_token = query.dim() == 4 and query.shape[1] == 1 and state.shape[:2] == (query.shape[0], query.shape[2])
    return one_token and query.is_cuda and state.dtype == torch.float32 and not torch.is_grad_enabled()
