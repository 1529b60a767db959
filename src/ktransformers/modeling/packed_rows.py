"""Rows that are packed into one sequence, in every family of transformers: masks between them, and models that take a
token's index in the batch for its position.

transformers makes such a mask from the positions, which begin again with each row, if the model's code passes them to
its mask functions; not all do. A hook takes the positions of the model's call instead, and while the call runs, the
registered mask functions evaluate the model's own rule (causal, a window) within rows only.

A token's index in the batch is not its position, which `position_ids` has. Llama 4 scales the queries of layers without
rotary embeddings by the logarithm of that index, and its chunked layers attend within chunks of it. Texts are too short
for a comparison to show either: both begin to matter after thousands of tokens.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils

MASK_FUNCTIONS = ("eager", "sdpa", "flex_attention")  # that evaluate a rule for pairs of tokens


def _mask_within_rows(stock: Any, rows: Tensor, **kwargs: Any) -> Any:
    if kwargs.get("attention_mask") is not None or not kwargs["q_length"] == kwargs["kv_length"] == rows.shape[1]:
        return stock(**kwargs)
    same_row = masking_utils.packed_sequence_mask_function(rows)
    rule = masking_utils.and_masks(kwargs.pop("mask_function"), same_row)
    return stock(mask_function=rule, **kwargs | {"allow_is_causal_skip": False})


def tell_masks_the_rows(model: PreTrainedModel) -> None:
    """From now on calls of the model with positions of packed rows mask tokens of other rows."""
    registry: Any = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids")
        if not isinstance(positions, Tensor) or positions.dim() != 2:
            return
        rows = masking_utils.find_packed_sequence_indices(positions)
        if rows is None:
            return
        for name in MASK_FUNCTIONS:
            registry[name] = functools.partial(_mask_within_rows, registry[name], rows)

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        for name in MASK_FUNCTIONS:
            registry._local_mapping.pop(name, None)

    model.base_model.register_forward_pre_hook(before, with_kwargs=True)
    model.base_model.register_forward_hook(after, with_kwargs=True, always_call=True)


CHUNKED_LAYER = "chunked_attention"


def uses_row_positions(model: PreTrainedModel) -> str | None:
    """What depends on the row; None: nothing that is known."""
    if any(scales_queries(module) for module in model.modules()):
        return "queries that are scaled by their index in a row"
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    return f"layers of type {CHUNKED_LAYER}" if CHUNKED_LAYER in kinds else None


def scales_queries(module: nn.Module) -> bool:
    """Whether an attention module scales its queries by their index in a row."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)
