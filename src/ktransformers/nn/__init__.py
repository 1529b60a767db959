"""Expert layers as PyTorch sees them: `ExpertStore` holds the packed experts of one layer and computes them;
`load_model` and `attach` put stores into models of transformers, which is imported with the first of these two."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ktransformers.nn.store import ExpertCall, ExpertStore, default_pool

if TYPE_CHECKING:
    from ktransformers.nn.load import load_model
    from ktransformers.nn.quantizer import KTConfig, attach

__all__ = ["ExpertCall", "ExpertStore", "KTConfig", "attach", "default_pool", "load_model"]

_HOME = {
    "load_model": "ktransformers.nn.load",
    "attach": "ktransformers.nn.quantizer",
    "KTConfig": "ktransformers.nn.quantizer",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ktransformers.nn' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
