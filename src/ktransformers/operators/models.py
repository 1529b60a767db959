"""The decoder of a model by rule: `transfer_map` says from which layer on hidden states are on another device. The
stock module stays; `place/device_map.py` moves layers and the states between them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedConfig

from ktransformers.ground.errors import InputError
from ktransformers.operators.base_operator import Match, Outcome, StockOperator
from ktransformers.operators.loader import Loader


class _DecoderModel(StockOperator):
    def __init__(
        self,
        key: str,
        gguf_loader: Loader,
        config: PreTrainedConfig,
        orig_module: nn.Module | None = None,
        generate_device: str = "cuda",
        prefill_device: str | None = None,
        transfer_map: Mapping[int, str] | None = None,
        per_layer_prefill_intput_threshold: int = 0,
    ) -> None:
        super().__init__(key, gguf_loader, config, orig_module, generate_device, prefill_device)

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
