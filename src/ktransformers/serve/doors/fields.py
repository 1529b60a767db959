"""JSON objects of requests, validated by pydantic: fields that are unknown are kept, values that are wrong are refused
with what was given and what was expected.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from ktransformers.serve.http.error import MAX_PARAM_CHARACTERS, ApiError, bounded

Finite = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
# By pydantic's type of an error; anything else is told in pydantic's words.
EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "finite_number": "a finite number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_type": "an integer",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "missing": "a value",
    "model_type": "an object",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "string_type": "text",
    "too_long": "at most {max_length} entries",
    "too_short": "at least {min_length} entries",
}


class Fields(BaseModel):
    """An object whose known fields have the right type, and that may have others."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    def unknown_fields(self, prefix: str = "") -> Iterator[str]:
        """The names of fields that are not declared, also those of objects inside, but not of lists."""
        yield from (f"{prefix}{name}" for name in self.model_extra or ())
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Fields):
                yield from value.unknown_fields(f"{prefix}{name}.")


Kind = TypeVar("Kind", bound=BaseModel)


def validated(kind: type[Kind], value: Any, where: str = "") -> Kind:
    """`where`: the path of `value` in the request."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = bounded(".".join(part for part in (where, *map(str, first["loc"])) if part), MAX_PARAM_CHARACTERS)
        expected = EXPECTED.get(first["type"], first["msg"]).format_map(first.get("ctx", {}))
        given = "nothing" if first["type"] == "missing" else reprlib.repr(first["input"])
        raise ApiError(400, f"{name}: given {given}, expected {expected}", param=name) from error


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    try:
        document = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"body: given no JSON ({error}), expected a JSON object") from error
    if not isinstance(document, dict):
        raise ApiError(400, f"body: given {reprlib.repr(document)}, expected a JSON object")
    return document
