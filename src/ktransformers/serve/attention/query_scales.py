"""Queries that a model scales by their position: Llama 4, in layers without rotary embeddings.

The stock module takes a token's index in the row for its position, which it is not in a batch of several sequences
(`modeling/packed_rows.py`). While the model is served its own scaling is switched off for the call, and the attention
function scales by the positions of the spans, with the same formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.modeling.packed_rows import scales_queries
from ktransformers.modeling.substitute import Restore, Substitution, unprobed

SCALED_ATTRIBUTE = "kt_scales_queries"  # of an attention module whose queries are scaled by position


class PositionScaling:
    """The two hooks of one attention module."""

    def __init__(self, module: nn.Module, is_served: Callable[[], bool]) -> None:
        self._module: Any = module
        self._is_served = is_served

    def switch_off(self, module: nn.Module, args: Any) -> None:
        if self._is_served():
            self._module.attn_temperature_tuning = False

    def switch_on(self, module: nn.Module, args: Any, output: Any) -> None:
        self._module.attn_temperature_tuning = True


def use_position_scales(is_served: Callable[[], bool]) -> Substitution[nn.Module, bool]:
    """Makes the attention function scale the queries of such modules while `is_served`."""

    def replace(module: nn.Module, _: bool, restore: Restore) -> None:
        scaling = PositionScaling(module, is_served)
        restore.callback(module.register_forward_pre_hook(scaling.switch_off).remove)
        restore.callback(module.register_forward_hook(scaling.switch_on, always_call=True).remove)
        restore.put(module, SCALED_ATTRIBUTE, True)

    return Substitution("scaled queries", lambda model: filter(scales_queries, model.modules()), unprobed, replace)


def scale_queries(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """`[1, heads, T, d]`, of tokens at `positions` `[T]`."""
    factors: Tensor = torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    scaled: Tensor = (query * factors[:, None]).to(query.dtype)
    return scaled
