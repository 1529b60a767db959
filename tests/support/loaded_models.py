"""Sizes of tiny models in released formats, and the stores of a loaded model."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ktransformers.nn import ExpertStore
from tests.support.tiny_models import logits

EXACT = 1e-4  # float32 around the experts on both sides: rounding of sums only
SIZES: dict[str, Any] = {"hidden_size": 192, "moe_intermediate_size": 64, "intermediate_size": 96}
MLA = {"q_lora_rank": 64, "kv_lora_rank": 32, "v_head_dim": 32, "n_routed_experts": 4}


def stores(model: PreTrainedModel) -> list[ExpertStore]:
    return [module.kt.store for module in model.modules() if hasattr(module, "kt")]


def training_logits(model: PreTrainedModel) -> Tensor:
    """Logits as training computes them: quantised experts are rounded to bf16. Inference may multiply their codes."""
    was_training = model.training
    try:
        return logits(model.train())
    finally:
        model.train(was_training)
