"""Errors that a caller can act on: what was given, what was expected, what to do.

`kt` prints them without a traceback; any other exception is a bug in ktransformers and keeps its traceback.
"""

from __future__ import annotations


class KTError(Exception):
    """Base class of errors that ktransformers reports."""


class InputError(KTError, ValueError):
    """An argument, option or file that cannot be used."""

    def __init__(self, name: str, given: object, expected: str, remedy: str = "") -> None:
        super().__init__(f"{name}: given {given}, expected {expected}" + (f"; {remedy}" if remedy else ""))


class DamagedFileError(KTError, OSError):
    """A file whose contents are not what was written: truncated, unreadable, or with a wrong checksum."""


def is_panic(error: BaseException) -> bool:
    """A panic in a library in Rust, tokenizers for example, which Python sees as a `BaseException`."""
    return type(error).__name__ == "PanicException"
