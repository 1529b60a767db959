"""One logger, `ktransformers`, silent unless KT_LOG or the application says otherwise.

With KT_LOG set, records go to stderr in the form of the native core's own lines ("kt: ..."), so the two read as one.
"""

from __future__ import annotations

import logging

from ktransformers import env
from ktransformers.errors import InputError

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def level() -> int | None:
    """The level that the environment asks for, None when it asks for nothing."""
    word = env.text("KT_LOG").lower()
    if word:
        if word not in LEVELS:
            raise InputError("KT_LOG", repr(word), "one of " + ", ".join(LEVELS))
        return LEVELS[word]
    return logging.DEBUG if env.text("KT_KERNEL_DEBUG") == "1" else None


def logger(name: str) -> logging.Logger:
    """The logger of a module; call it with `__name__`."""
    root = logging.getLogger("ktransformers")
    asked = level()
    if asked is not None and not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("kt: %(message)s"))
        root.addHandler(handler)
        root.setLevel(asked)
        root.propagate = False
    return logging.getLogger(name)
