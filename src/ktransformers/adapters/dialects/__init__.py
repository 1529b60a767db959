"""The table of adapter dialects, one per on-disk layout. A new dialect is a module of this package and a row here."""

from __future__ import annotations

from ktransformers.adapters.content import Content
from ktransformers.adapters.dialects import gguf, kt, peft, per_expert, sglang
from ktransformers.adapters.dialects.dialect import Dialect
from ktransformers.ground.errors import InputError

# In the order of detection: the most specific first.
DIALECTS: tuple[Dialect, ...] = (gguf.DIALECT, kt.DIALECT, per_expert.DIALECT, sglang.DIALECT, peft.DIALECT)


def find_dialect(name: str) -> Dialect:
    for dialect in DIALECTS:
        if dialect.name == name:
            return dialect
    raise InputError("dialect", repr(name), "one of " + ", ".join(sorted(dialect.name for dialect in DIALECTS)))


def detect_dialect(content: Content) -> Dialect:
    """The dialect of an adapter, decided by its tensor names."""
    for dialect in DIALECTS:
        if dialect.matches(content):
            return dialect
    raise InputError(str(content.path), "tensors of no known dialect", ", ".join(dialect.name for dialect in DIALECTS))


__all__ = ["DIALECTS", "Dialect", "detect_dialect", "find_dialect"]
