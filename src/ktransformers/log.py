"""The logger `ktransformers`, silent unless KT_LOG or the application configures it.

With KT_LOG set, records go to stderr in the format of the native core ("kt: ...").
"""

from __future__ import annotations

import logging

from ktransformers import env
from ktransformers.errors import InputError

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def level() -> int | None:
    """The level that the environment requests, None if none."""
    name = env.text("KT_LOG").lower()
    if name:
        if name not in LEVELS:
            raise InputError("KT_LOG", repr(name), "one of " + ", ".join(LEVELS))
        return LEVELS[name]
    return logging.DEBUG if env.text("KT_KERNEL_DEBUG") == "1" else None


def logger(name: str) -> logging.Logger:
    """The logger of a module; call with `__name__`."""
    requested = level()
    if requested is not None and not logging.getLogger("ktransformers").handlers:
        show(requested)
    return logging.getLogger(name)


def show(lowest: int) -> None:
    """Write records from this level up to stderr, and still those that the environment asks for."""
    root = logging.getLogger("ktransformers")
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("kt: %(message)s"))
        root.addHandler(handler)
        root.propagate = False
    requested = level()
    root.setLevel(lowest if requested is None else min(lowest, requested))
