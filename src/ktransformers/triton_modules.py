"""Kernels in Triton, where there is Triton: each of their modules has a twin in torch for everybody else."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType


@functools.cache
def triton_kernels(name: str, folder: str = "place.gpu") -> ModuleType | None:
    """The module of this folder; None without Triton."""
    try:
        return importlib.import_module(f"ktransformers.{folder}.{name}")
    except ImportError:
        return None
