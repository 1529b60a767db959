"""Expert layers for PyTorch: an `ExpertStore` holds and computes the packed experts of one layer; `load_model` and
`attach` put stores into models of transformers. transformers is imported on first use of these two."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ktransformers.experts.store import ExpertCall, ExpertStore
from ktransformers.ground.pool import default_pool

if TYPE_CHECKING:
    from ktransformers.experts.peft_lora import lora_parameters, set_lora_dropout
    from ktransformers.modeling.load import load_model
    from ktransformers.modeling.quantizer import KTConfig, attach
    from ktransformers.parallel.distributed import average_expert_gradients

__all__ = [
    "ExpertCall",
    "ExpertStore",
    "KTConfig",
    "attach",
    "average_expert_gradients",
    "default_pool",
    "load_model",
    "lora_parameters",
    "set_lora_dropout",
]

_LAZY_MODULES = {
    "load_model": "ktransformers.modeling.load",
    "attach": "ktransformers.modeling.quantizer",
    "KTConfig": "ktransformers.modeling.quantizer",
    "lora_parameters": "ktransformers.experts.peft_lora",
    "set_lora_dropout": "ktransformers.experts.peft_lora",
    "average_expert_gradients": "ktransformers.parallel.distributed",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module 'ktransformers.nn' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY_MODULES[name]), name)
