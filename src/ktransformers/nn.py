"""Expert layers for PyTorch: an `ExpertStore` holds and computes the packed experts of one layer; `load_model` and
`attach` put stores into models of transformers. transformers is imported on first use of these two."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ktransformers.nn.expert_call import ExpertCall
from ktransformers.nn.pool import default_pool
from ktransformers.nn.store import ExpertStore

if TYPE_CHECKING:
    from ktransformers.nn.distributed import average_expert_gradients
    from ktransformers.nn.load import load_model
    from ktransformers.nn.peft_lora import lora_parameters, set_lora_dropout
    from ktransformers.nn.quantizer import KTConfig, attach

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
    "load_model": "ktransformers.nn.load",
    "attach": "ktransformers.nn.quantizer",
    "KTConfig": "ktransformers.nn.quantizer",
    "lora_parameters": "ktransformers.nn.peft_lora",
    "set_lora_dropout": "ktransformers.nn.peft_lora",
    "average_expert_gradients": "ktransformers.nn.distributed",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module 'ktransformers.nn' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY_MODULES[name]), name)
