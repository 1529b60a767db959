"""Errors that a caller can act on: what was given, what was expected, what to do.

`kt` prints them without a traceback; any other exception is a bug in ktransformers and keeps its traceback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import ValidationError


class KTError(Exception):
    """Base class of errors that ktransformers reports."""


class InputError(KTError, ValueError):
    """An argument, option or file that cannot be used."""

    def __init__(self, name: str, given: object, expected: str, remedy: str = "") -> None:
        super().__init__(f"{name}: given {given}, expected {expected}" + (f"; {remedy}" if remedy else ""))


class MissingArgumentError(InputError):
    """A command line that lacks an argument."""

    def __init__(self, name: str, expected: str, remedy: str = "") -> None:
        super().__init__(name, "nothing", expected, remedy)


class DamagedFileError(KTError, OSError):
    """A file whose contents are not what was written: truncated, unreadable, or with a wrong checksum."""


# Errors of pydantic -> the limit in our words; the limit's name is that in the context of the error.
LIMITS = {
    "greater_than_equal": "{ge} or more",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
}


def first_problem(error: ValidationError) -> tuple[tuple[str, ...], str, str]:
    """Path, given value and expectation of the first error of pydantic. An InputError of a validator is raised."""
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    if isinstance(cause := context.get("error"), InputError):
        raise cause from None
    given = "nothing" if first["type"] == "missing" else repr(first.get("input"))
    message = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if first["type"] in LIMITS:
        numbers = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in context.items()}
        message = LIMITS[first["type"]].format(**numbers)
    return tuple(str(part)[:80] for part in first["loc"]), given, message


def is_panic(error: BaseException) -> bool:
    """A panic in a library in Rust, tokenizers for example, which Python sees as a `BaseException`."""
    return type(error).__name__ == "PanicException"


def nearest(word: object, known: Iterable[str], otherwise: str) -> str:
    """What an error expects in the place of a word that is not among the known ones: the nearest of them, if any."""
    import difflib

    near = difflib.get_close_matches(str(word), list(known), n=1)
    return f"`{near[0]}`, perhaps" if near else otherwise
