"""Optional packages: found missing before any work starts, with the `pip install` line that adds them.

Nothing is imported to find a package. A feature that several packages provide (tensorboard, tensorboardX) lists them as
alternatives; the first is the one to install. Modules of ours that are written in Triton are imported where it is
installed, with torch in their place elsewhere. Triton builds its launchers with a C compiler when they are first used,
so a machine without one is refused before a model is loaded.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
from collections.abc import Iterable
from types import ModuleType

from ktransformers.ground.errors import InputError

# Extra of ktransformers -> modules that it installs and its commands import.
EXTRAS: dict[str, tuple[str, ...]] = {
    "train": ("trl", "datasets", "accelerate"),
    "serve": ("fastapi", "uvicorn"),
    "eval": ("sacrebleu",),
}


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # the parent of a dotted name is missing, or a module without a spec
        return False


def require_extra(command: str, extra: str) -> None:
    """Raises InputError if a package of this extra is missing."""
    missing = [module for module in EXTRAS[extra] if not is_installed(module)]
    if missing:
        packages = "the package" if len(missing) == 1 else "the packages"
        raise InputError(
            command, f"without {packages} {', '.join(missing)}", "it installed", f"pip install 'ktransformers[{extra}]'"
        )


def require_package(key: str, value: object, modules: Iterable[str], install: str = "") -> None:
    """Raises InputError unless one of the modules is installed. `install`: the argument of pip, if it is not the name
    of the first module."""
    names = list(modules)
    if not any(map(is_installed, names)):
        given = f"{value}, without the package {names[0]}"
        raise InputError(key, given, "it installed", f"pip install {install or names[0]}")


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
