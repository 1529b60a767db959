"""Attention by rule. The server computes the absorbed form of multi-head latent attention for every model with latents
(`serve/attention/latent.py`), with the attention module of stock transformers; training expands keys and values."""

from __future__ import annotations

from ktransformers.ground.errors import InputError
from ktransformers.operators.base_operator import Match, Outcome, StockOperator

CHUNKS = "absorb_for_prefill: the server takes, for each chunk, absorbed or expanded, whichever has fewer operations"


class KDeepseekV2Attention(StockOperator):
    """Of an attention module with latents (MLA)."""

    keywords = ("absorb_for_prefill",)

    @classmethod
    def check(cls, match: Match) -> Outcome:
        if getattr(match.module, "kv_b_proj", None) is None:
            given = f"{match.name}, a {type(match.module).__name__}"
            raise InputError(match.where, given, "latent attention (MLA), which has kv_b_proj", "leave this rule out")
        return Outcome(keeps_stock=True, general=(CHUNKS,) if "absorb_for_prefill" in match.arguments else ())
