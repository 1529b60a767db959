"""Rotary embeddings by rule. KTransformers replaces them because it builds models on the meta device, where buffers are
not computed; stock `from_pretrained` computes them when it loads a model, so the stock module stays."""

from __future__ import annotations

from ktransformers.ground.errors import InputError
from ktransformers.operators.base_operator import Match, Outcome, StockOperator


class RotaryEmbedding(StockOperator):
    @classmethod
    def check(cls, match: Match) -> Outcome:
        if not any(name.endswith("inv_freq") for name, _ in match.module.named_buffers(recurse=False)):
            given = f"{match.name}, a {type(match.module).__name__}"
            raise InputError(match.where, given, "a rotary embedding", "match `rotary_emb$`")
        return Outcome(keeps_stock=True)


class RotaryEmbeddingV3(RotaryEmbedding):
    """The stock module."""


class YarnRotaryEmbedding(RotaryEmbedding):
    """Of a model whose positions are scaled by YaRN."""

    @classmethod
    def check(cls, match: Match) -> Outcome:
        outcome = super().check(match)
        kind = getattr(match.module, "rope_type", "default")
        if kind != "yarn":
            expected = "rope_type yarn, as this operator computes"
            raise InputError(match.where, f"{match.name} with rope_type {kind}", expected, "use RotaryEmbedding")
        return outcome


class YarnRotaryEmbeddingV3(YarnRotaryEmbedding):
    """The stock module."""
