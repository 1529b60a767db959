"""Operators by rule: which module of a stock model becomes which operator, as `kt_optimize_rule` says.

`load_by_rules` loads a model so; an operator of one's own derives from `BaseInjectedModule`, a linear one from
`KLinearBase` too. Names are imported, with torch, when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktransformers.operators.base_operator import BaseInjectedModule, Match, Outcome
    from ktransformers.operators.linear import KLinearBase, KTransformersLinear
    from ktransformers.operators.load import load_by_rules
    from ktransformers.operators.loader import GGUFLoader, Loader

__all__ = [
    "BaseInjectedModule",
    "GGUFLoader",
    "KLinearBase",
    "KTransformersLinear",
    "Loader",
    "Match",
    "Outcome",
    "load_by_rules",
]

_LAZY_MODULES = {
    "BaseInjectedModule": "ktransformers.operators.base_operator",
    "Match": "ktransformers.operators.base_operator",
    "Outcome": "ktransformers.operators.base_operator",
    "KLinearBase": "ktransformers.operators.linear",
    "KTransformersLinear": "ktransformers.operators.linear",
    "load_by_rules": "ktransformers.operators.load",
    "GGUFLoader": "ktransformers.operators.loader",
    "Loader": "ktransformers.operators.loader",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module 'ktransformers.operators' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY_MODULES[name]), name)
