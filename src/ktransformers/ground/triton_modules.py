"""Modules written in Triton, imported where Triton is installed; each has a fallback in torch for other machines.

Triton builds the launchers of its kernels with a C compiler when they are first used, so a machine without one is
refused before a model is loaded.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
from types import ModuleType

from ktransformers.ground.errors import InputError
from ktransformers.ground.packages import is_installed

INSTALL_COMPILER = "sudo apt install gcc python3-dev, or set CC"


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


def c_compiler() -> str | None:
    """The compiler that Triton calls, searched as Triton does: CC, gcc, clang."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def require_compiler(device: str, other_device: str) -> None:
    """Raises InputError if Triton's kernels would fail on this device. `other_device`: the option that avoids them."""
    if not device.startswith("cuda") or not is_installed("triton") or c_compiler() is not None:
        return
    given = f"{device}, without a C compiler for Triton's kernels"
    raise InputError("device", given, "gcc or clang in PATH", f"{INSTALL_COMPILER}; or {other_device}")
