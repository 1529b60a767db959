"""The table of dialects: how an adapter may lie on disk. A new one is a file beside this one and a row here."""

from __future__ import annotations

from ktransformers.adapters.content import Content
from ktransformers.adapters.dialects import gguf, kt, peft, per_expert, sglang
from ktransformers.adapters.dialects.dialect import Dialect
from ktransformers.errors import InputError

# In the order in which they are asked whether a directory is theirs: the narrower claim first.
DIALECTS: tuple[Dialect, ...] = (gguf.DIALECT, kt.DIALECT, per_expert.DIALECT, sglang.DIALECT, peft.DIALECT)


def find_dialect(name: str) -> Dialect:
    for one in DIALECTS:
        if one.name == name:
            return one
    raise InputError("dialect", repr(name), "one of " + ", ".join(sorted(one.name for one in DIALECTS)))


def detect_dialect(content: Content) -> Dialect:
    """The dialect of what lies there, told by its tensors."""
    for one in DIALECTS:
        if one.claims(content):
            return one
    raise InputError(str(content.path), "tensors of no known dialect", ", ".join(one.name for one in DIALECTS))


__all__ = ["DIALECTS", "Dialect", "detect_dialect", "find_dialect"]
