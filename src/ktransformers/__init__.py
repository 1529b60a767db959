"""Routed experts of Mixture-of-Experts models on CPU and GPU, inside PyTorch.

Importing this package imports nothing else: torch, transformers and the native core are loaded with the first attribute
that needs them, so that `kt --help` and tools that only read the version stay fast.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktransformers.experts.store import ExpertStore

__version__ = "0.2.0"
__all__ = ["ExpertStore", "__version__", "has_sft_support"]

_MODULE_OF = {"ExpertStore": "ktransformers.nn"}


def has_sft_support() -> bool:
    """Whether `kt_kernel.sft` is installed with this package; programs of kt-kernel ask it before they train."""
    return importlib.util.find_spec("kt_kernel.sft") is not None


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ktransformers' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
