"""Arguments that models write and schemas that clients send, however odd they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ktransformers.serve.formats.arguments import (
    dump_json,
    gemma_arguments,
    nested_value,
    python_arguments,
    schema_types,
)


def test_references_that_lead_back_are_followed_once() -> None:
    root = {"$defs": {"a": {"type": "string", "anyOf": [{"$ref": "#/$defs/a"}] * 3000}}}
    assert schema_types({"anyOf": [{"$ref": "#/$defs/a"}, {"type": ["null", 3]}]}, root) == {"string", "null"}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"enum": None}, set()),
        ({"enum": [1, "a"]}, {"integer", "string"}),
        ({"type": 5, "const": None}, set()),
        ({"const": None}, {"null"}),
        ({"type": {"a": 1}, "nullable": True}, {"null"}),
        ({"anyOf": 3, "oneOf": {"type": "string"}, "allOf": [3, {"type": "number"}]}, {"number"}),
        ({"$ref": "#/missing"}, set()),
        ([], set()),
    ],
)
def test_odd_keywords_say_nothing(schema: Any, types: set[str]) -> None:
    assert schema_types(schema, {}) == types


def test_properties_that_are_no_object() -> None:
    assert nested_value("]<a>1]</a>", "]", {"properties": ["a"]}, {}) == {"a": 1}


@pytest.mark.parametrize("text", ["a={1, 2}", "a=b'x'", "a=2j", "a={[1]: 2}", "a={(1, 2): 3}", "a=b", "1"])
def test_literals_that_are_no_json(text: str) -> None:
    assert python_arguments(text) is None


def test_literals() -> None:
    assert json.loads(python_arguments("a=1, b=[true, None], c={'d': 'é'}") or "") == {
        "a": 1,
        "b": [True, None],
        "c": {"d": "é"},
    }


def test_digits_that_are_no_number_of_a_string() -> None:
    assert json.loads(gemma_arguments('{a:<|"|>x<|"|>,b:"²",c:"7",d:"' + "9" * 5000 + '"}') or "") == {
        "a": "x",
        "b": "²",
        "c": "7",
        "d": "9" * 5000,
    }


def test_unpaired_surrogates_are_ascii() -> None:
    assert dump_json({"é": "😀"}) == '{"é": "😀"}'
    assert dump_json("é\ud83d") == r'"\u00e9\ud83d"'
