"""Where the routed experts of a model on a GPU are computed: `attach` puts the placement engine under a loaded model.
It is imported, with torch, when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktransformers.place.placement import Placement, attach

__all__ = ["Placement", "attach"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'ktransformers.place' has no attribute {name!r}")
    return getattr(importlib.import_module("ktransformers.place.placement"), name)
