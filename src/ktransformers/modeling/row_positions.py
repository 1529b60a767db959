"""Models that take a token's row in the batch for its position.

Where several sequences lie in one row of tokens (packed training rows, the batches of a server), a token's index in the
row is not its position, which `position_ids` has. Llama 4 scales the queries of layers without rotary embeddings by the
logarithm of that index, and its chunked layers attend within chunks of it. Texts are too short for a comparison to show
either: both begin to matter after thousands of tokens.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

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
