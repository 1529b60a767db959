"""A model without its numbers, from config.json alone: on the meta device, for names, classes and shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from ktransformers.experts.scaled_input_experts import adapt_experts
from ktransformers.modeling import load
from ktransformers.modeling.pretrained import naming_config


def model_from_config(directory: Path) -> PreTrainedModel:
    """With tensors of the default device; the class is the one that `load_model` loads."""
    config = load.load_config(directory)  # raises for models that cannot be opened
    auto: Any = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    with naming_config(directory):
        model: PreTrainedModel = auto.from_config(config)
    return model


def meta_model(directory: Path) -> PreTrainedModel:
    with torch.device("meta"):
        model = model_from_config(directory)
    adapt_experts(model)
    return model
