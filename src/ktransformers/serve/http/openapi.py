"""The OpenAPI document's parts that FastAPI cannot know, because bodies are read by hand: what a request looks like,
and which answers there are besides 200.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REFERENCE = "#/components/schemas/{model}"
ERRORS = {
    400: "the request is wrong",
    401: "the key is missing or wrong",
    404: "no such model",
    405: "no such method",
    413: "the body is too large",
    429: "the queue is full",
    500: "the answer could not be computed",
    503: "the server is ending",
    504: "not complete in the time that is allowed",
}
ENVELOPE: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def body(kind: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": REFERENCE.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answers(*media: str) -> dict[int | str, dict[str, Any]]:
    """Of a path whose good answers have these types."""
    found: dict[int | str, dict[str, Any]] = {200: {"description": "OK", "content": {one: {} for one in media}}}
    error = {"application/json": {"schema": {"$ref": REFERENCE.format(model="Error")}}}
    return found | {status: {"description": words, "content": error} for status, words in ERRORS.items()}


def complete(document: dict[str, Any], kinds: list[type[BaseModel]], served: str) -> dict[str, Any]:
    """FastAPI's document with the schemas that it refers to. The base's name is spelled out, because whoever makes
    requests from the document alone could not know it."""
    _, made = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REFERENCE)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(made.get("$defs", {}))
    schemas["Error"] = ENVELOPE
    for schema in schemas.values():
        if "model" in schema.get("properties", {}):
            names = [{"const": served, "description": "the base"}, {"type": "string", "description": "or BASE:ADAPTER"}]
            schema["properties"]["model"] = {"title": "Model", "anyOf": names}
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # FastAPI's own, which is a 400 here
    return document
