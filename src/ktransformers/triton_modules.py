"""Modules written in Triton, imported where Triton is installed; each has a fallback in torch for other machines."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType


@functools.cache
def import_triton_module(name: str) -> ModuleType | None:
    """The module of ours with this full name; None where Triton is missing. Any other import error is a defect and is
    raised: it would switch the GPU path off without a word."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        return None
