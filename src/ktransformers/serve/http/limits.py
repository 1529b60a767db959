"""Limits of one HTTP request, checked before anything is computed from it. Each is a flag of `kt serve`; docs/serve.md
lists them with their defaults.

A text is not tokenised to learn that it is too long: `fewest_tokens` bounds its tokens from below by its characters,
and `too_many_tokens` tokenises a long text in pieces and stops as soon as the limit is passed, so the cost is that of
the limit and not that of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ktransformers.serve.http.error import ApiError

PIECE_CHARACTERS = 16384  # of a text whose tokens are counted in pieces
PIECE_SLACK = 16  # tokens that a cut between two pieces may add
MAX_SCHEMA_VALUES = 20_000  # objects, lists and scalars of one schema
MAX_SCHEMA_CHARACTERS = 2**18  # of a schema that is enforced, as JSON
MAX_SCORES = 1_000_000  # log-probabilities of prompts in one answer


@dataclass(frozen=True)
class RequestLimits:
    max_body_bytes: int = 16 * 2**20
    max_prompts: int = 128  # of one /v1/completions
    max_messages: int = 4096  # of one chat
    max_tools: int = 128
    max_schema_properties: int = 1000
    max_schema_depth: int = 64  # nesting of objects and lists


def check_count(name: str, count: int, limit: int, flag: str) -> None:
    if count > limit:
        raise ApiError(400, f"{name}: given {count}, expected at most {limit} (--{flag})", param=name)


def check_schema(name: str, schema: Any, limits: RequestLimits) -> None:
    """Refuse a JSON schema with more properties, values or levels than allowed. The walk stops at the first limit."""
    properties = values = 0
    pending = [(schema, 1)]
    while pending:
        value, depth = pending.pop()
        values += 1
        if depth > limits.max_schema_depth:
            limit = limits.max_schema_depth
            raise ApiError(400, f"{name}: given a schema of more than {limit} levels (--max-schema-depth)", param=name)
        children: list[Any] = []
        if isinstance(value, dict):
            children = list(value.values())
            inner = value.get("properties")
            properties += len(inner) if isinstance(inner, dict) else 0
        elif isinstance(value, list):
            children = value
        if properties > limits.max_schema_properties:
            limit = limits.max_schema_properties
            message = f"{name}: given a schema of more than {limit} properties (--max-schema-properties)"
            raise ApiError(400, message, param=name)
        if values + len(children) > MAX_SCHEMA_VALUES:
            raise ApiError(400, f"{name}: given a schema of more than {MAX_SCHEMA_VALUES} values", param=name)
        pending += [(child, depth + 1) for child in children]


def fewest_tokens(characters: int, longest_token: int) -> int:
    """A lower bound of the tokens of a text: no token stands for more characters than the vocabulary's longest."""
    return -(-characters // max(1, longest_token))


def too_many_tokens(text: str, limit: int, longest_token: int, count: Callable[[str], int]) -> bool:
    """Whether `text` surely has more than `limit` tokens; `count` tokenises one piece."""
    if fewest_tokens(len(text), longest_token) > limit:
        return True
    if len(text) <= max(PIECE_CHARACTERS, limit):
        return False
    counted = 0
    for start in range(0, len(text), PIECE_CHARACTERS):
        counted += count(text[start : start + PIECE_CHARACTERS]) - PIECE_SLACK
        if counted > limit:
            return True
    return False
