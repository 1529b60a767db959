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
    root = logging.getLogger("ktransformers")
    requested = level()
    if requested is not None and not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("kt: %(message)s"))
        root.addHandler(handler)
        root.setLevel(requested)
        root.propagate = False
    return logging.getLogger(name)
