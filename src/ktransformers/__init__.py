"""Routed experts of Mixture-of-Experts models, computed on the CPU inside PyTorch.

Importing this package imports nothing else: torch, transformers and the native core come with the first attribute that
needs them, so that `kt --help` and tools that only ask for the version stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktransformers.nn import ExpertStore

__version__ = "0.2.0"
__all__ = ["ExpertStore", "__version__"]

_HOME = {"ExpertStore": "ktransformers.nn"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ktransformers' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
