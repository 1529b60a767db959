"""The table of adapter formats, one per on-disk layout. A new format is a module of this package and a row here."""

from __future__ import annotations

from ktransformers.adapters.content import Content
from ktransformers.adapters.formats import gguf, kt, peft, per_expert, sglang
from ktransformers.adapters.formats.adapter_format import AdapterFormat
from ktransformers.ground.errors import InputError

# In the order of detection: the most specific first.
ADAPTER_FORMATS: tuple[AdapterFormat, ...] = (
    gguf.ADAPTER_FORMAT,
    kt.ADAPTER_FORMAT,
    per_expert.ADAPTER_FORMAT,
    sglang.ADAPTER_FORMAT,
    peft.ADAPTER_FORMAT,
)


def find_format(name: str) -> AdapterFormat:
    for form in ADAPTER_FORMATS:
        if form.name == name:
            return form
    raise InputError("format", repr(name), "one of " + ", ".join(sorted(form.name for form in ADAPTER_FORMATS)))


def detect_format(content: Content) -> AdapterFormat:
    """The format of an adapter, decided by its tensor names."""
    for form in ADAPTER_FORMATS:
        if form.matches(content):
            return form
    raise InputError(str(content.path), "tensors of no known format", ", ".join(form.name for form in ADAPTER_FORMATS))


__all__ = ["ADAPTER_FORMATS", "AdapterFormat", "detect_format", "find_format"]
