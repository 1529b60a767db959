"""JSON objects of requests, validated by pydantic: fields that are unknown are kept, values that are wrong are refused
with what was given and what was expected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Finite = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
# Settings of sampling, which doors have under names of their own.
Temperature = Annotated[Finite, Field(ge=0, le=2)]
TopP = Annotated[Finite, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=2**31)]
MinP = Annotated[Finite, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[Finite, Field(ge=0.01, le=10)]
Penalty = Annotated[Finite, Field(ge=-2, le=2)]  # for presence and for frequency
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
# By pydantic's type of an error; anything else is told in pydantic's words.
EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "finite_number": "a finite number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "missing": "a value",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "none_required": "null",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "string_type": "text",
    "string_unicode": "Unicode text",
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
