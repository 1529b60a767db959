"""Optional packages: found missing before any work starts, with the `pip install` line that adds them.

Nothing is imported to find a package. A feature that several packages provide (tensorboard, tensorboardX) lists them as
alternatives; the first is the one to install.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

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
