"""JSON of answers, and server-sent events of it, encoded in slices: one call of `json.dumps` holds the GIL until it is
done, and log-probabilities of a long prompt are tens of megabytes.
"""

from __future__ import annotations

from typing import Any

from ktransformers.serve.formats.arguments import dump_json

SSE_DONE = "data: [DONE]\n\n"
JSON_SLICE = 256  # elements of a list that are encoded in one call


def sse_event(document: dict[str, Any]) -> str:
    return f"data: {encode_json(document)}\n\n"


def encode_json(value: Any) -> str:
    """The text of `json.dumps`."""
    if isinstance(value, dict):
        fields = (f"{dump_json(key)}: {encode_json(entry)}" for key, entry in value.items())
        return "{" + ", ".join(fields) + "}"
    if not isinstance(value, list):
        return dump_json(value)
    if len(value) <= JSON_SLICE:
        return "[" + ", ".join(encode_json(entry) for entry in value) + "]"
    slices = (value[start : start + JSON_SLICE] for start in range(0, len(value), JSON_SLICE))
    return "[" + ", ".join(dump_json(part)[1:-1] for part in slices) + "]"
