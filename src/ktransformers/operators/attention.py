"""Attention by rule. The server computes the absorbed form of multi-head latent attention for every model with latents
(`serve/attention/latent.py`), with the attention module of stock transformers; training expands keys and values."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig

from ktransformers.ground.errors import InputError
from ktransformers.operators.base_operator import Match, Outcome, StockOperator
from ktransformers.operators.loader import Loader

CHUNKS = "absorb_for_prefill: the server takes, for each chunk, absorbed or expanded, whichever has fewer operations"


class KDeepseekV2Attention(StockOperator):
    """Of an attention module with latents (MLA)."""

    def __init__(
        self,
        key: str,
        gguf_loader: Loader,
        config: PreTrainedConfig,
        orig_module: nn.Module | None = None,
        generate_device: str = "cuda",
        prefill_device: str | None = None,
        absorb_for_prefill: bool = False,
    ) -> None:
        super().__init__(key, gguf_loader, config, orig_module, generate_device, prefill_device)

    @classmethod
    def check(cls, match: Match) -> Outcome:
        if getattr(match.module, "kv_b_proj", None) is None:
            given = f"{match.name}, a {type(match.module).__name__}"
            raise InputError(match.where, given, "latent attention (MLA), which has kv_b_proj", "leave this rule out")
        return Outcome(keeps_stock=True, general=(CHUNKS,) if "absorb_for_prefill" in match.arguments else ())
