"""Parts of the OpenAPI document that FastAPI cannot derive, because bodies are parsed by hand: request schemas and
error responses.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REFERENCE = "#/components/schemas/{model}"
ERROR_STATUSES = {
    400: "the request is invalid",
    401: "the API key is missing or wrong",
    403: "the Host or the Origin is not allowed",
    404: "no such model",
    405: "no such method",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is not application/json",
    429: "the queue is full",
    500: "the answer could not be computed",
    503: "the server is shutting down, or has no memory for this request",
    504: "not complete within the request timeout",
}
ERROR_SCHEMA: dict[str, Any] = {
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


def request_body(kind: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": REFERENCE.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def responses(*media: str) -> dict[int | str, dict[str, Any]]:
    """The responses of a path whose 200 has these media types."""
    by_status: dict[int | str, dict[str, Any]] = {
        200: {"description": "OK", "content": {media_type: {} for media_type in media}}
    }
    error = {"application/json": {"schema": {"$ref": REFERENCE.format(model="Error")}}}
    return by_status | {
        status: {"description": description, "content": error} for status, description in ERROR_STATUSES.items()
    }


def add_schemas(document: dict[str, Any], kinds: list[type[BaseModel]], served: str) -> dict[str, Any]:
    """Add the schemas that FastAPI's document refers to. The name of the base is listed, so that a client can make
    valid requests from the document alone."""
    _, definitions = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REFERENCE)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions.get("$defs", {}))
    schemas["Error"] = ERROR_SCHEMA
    for schema in schemas.values():
        if "model" in schema.get("properties", {}):
            names = [{"const": served, "description": "the base"}, {"type": "string", "description": "or BASE:ADAPTER"}]
            schema["properties"]["model"] = {"title": "Model", "anyOf": names}
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # FastAPI's own, which is a 400 here
    return document
