"""The decoder of a model by rule: `transfer_map` says from which layer on hidden states are on another device. The
stock module stays; `place/device_map.py` moves layers and the states between them."""

from __future__ import annotations

from ktransformers.ground.errors import InputError
from ktransformers.operators.base_operator import Match, Outcome, StockOperator


class _DecoderModel(StockOperator):
    keywords = ("transfer_map", "per_layer_prefill_intput_threshold")

    @classmethod
    def check(cls, match: Match) -> Outcome:
        if getattr(match.module, "layers", None) is None:
            given = f"{match.name}, a {type(match.module).__name__}"
            raise InputError(match.where, given, "the decoder, which has `layers`", "match `^model$`")
        if match.arguments.get("per_layer_prefill_intput_threshold"):
            given = str(match.arguments["per_layer_prefill_intput_threshold"])
            expected = "0: a server cuts prompts into chunks instead"
            raise InputError(f"{match.where}: per_layer_prefill_intput_threshold", given, expected)
        return Outcome(keeps_stock=True)


class KDeepseekV2Model(_DecoderModel):
    """DeepSeek-V2, V3, R1 and Kimi-K2."""


class KQwen2MoeModel(_DecoderModel):
    """Qwen2-MoE."""


class KQwen3MoeModel(_DecoderModel):
    """Qwen3-MoE."""
