"""The kinds of cache that a model's layers keep, each with its bytes per token, as `/v1/models` reports them.

They are read from the parts of a computed slot and from the attention modules: latents and windows are attributes that
`latent.py` and `windows.py` have set.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from ktransformers.serve.attention.latent import LATENT_ATTRIBUTE
from ktransformers.serve.attention.windows import WINDOW_ATTRIBUTE
from ktransformers.serve.cache.cache_blocks import BlockLayout, PartPlace
from ktransformers.serve.cache.kv_cache import BLOCK_TOKENS
from ktransformers.serve.cache.tier_counts import TierState

KEYS_AND_VALUES, WINDOW, LATENT, INDEX_KEYS = "keys_and_values", "sliding_window", "latent", "index_keys"


def bytes_by_kind(model: nn.Module, layout: BlockLayout) -> dict[str, int]:
    """Bytes of a token in all layers of each kind."""
    attention: dict[int, nn.Module] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and hasattr(module, WINDOW_ATTRIBUTE):
            attention[layer] = module
    kinds: Counter[str] = Counter()
    for place in layout.places:
        kinds[_kind(place, attention.get(place.layer))] += place.bytes // BLOCK_TOKENS
    return dict(kinds)


def _kind(place: PartPlace, module: nn.Module | None) -> str:
    if place.part == "index_keys":
        return INDEX_KEYS
    if hasattr(module, LATENT_ATTRIBUTE):
        return LATENT
    return WINDOW if getattr(module, WINDOW_ATTRIBUTE, None) else KEYS_AND_VALUES


def describe_tier(state: TierState) -> dict[str, Any]:
    document: dict[str, Any] = {"bytes": state.bytes, "limit_bytes": state.limit_bytes, "blocks": state.blocks}
    return document | ({"read_only": state.note} if state.note else {})
