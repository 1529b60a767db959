"""What the server and a worker process say to each other through two pipes. A frame is two lengths, a JSON document and
a block of bytes; the block is the body of a request, or the tokens and offsets of its prompts as int32. Nothing is
pickled, and the server decodes no more JSON than a prepared request has.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from ktransformers.serve.http.error import ApiError
from ktransformers.serve.http.limits import RequestLimits
from ktransformers.serve.http.prepare import ModelTemplate, PreparedRequest, PrepareSettings, TokenizedPrompt

LENGTHS = struct.Struct("<II")  # of the document and of the block


def frame_head(document: dict[str, Any], block_bytes: int) -> bytes:
    """Everything of a frame that comes before the block."""
    text = json.dumps(document).encode()
    return LENGTHS.pack(len(text), block_bytes) + text


def settings_document(settings: PrepareSettings) -> dict[str, Any]:
    return dataclasses.asdict(settings)


def settings_of(document: dict[str, Any]) -> PrepareSettings:
    fields = dict(document)
    return PrepareSettings(**fields | {"limits": RequestLimits(**fields["limits"]), "eos": tuple(fields["eos"])})


def templates_document(templates: Mapping[str, ModelTemplate]) -> dict[str, Any]:
    return {name: dataclasses.asdict(template) for name, template in templates.items()}


def templates_of(document: dict[str, Any]) -> dict[str, ModelTemplate]:
    return {name: ModelTemplate(**fields) for name, fields in document.items()}


def prepared_frame(request: PreparedRequest) -> tuple[dict[str, Any], bytes]:
    numbers = array("i")
    prompts = []
    for prompt in request.prompts:
        numbers.extend(prompt.tokens)
        numbers.extend(prompt.offsets or ())
        prompts.append({"text": prompt.text, "tokens": len(prompt.tokens), "has_offsets": prompt.offsets is not None})
    document = {name.name: getattr(request, name.name) for name in dataclasses.fields(request)}
    return {"prepared": document | {"prompts": prompts}}, numbers.tobytes()


def prepared_of(document: dict[str, Any], block: bytes) -> PreparedRequest:
    numbers = array("i")
    numbers.frombytes(block)
    prompts, at = [], 0

    def take(count: int) -> tuple[int, ...]:
        nonlocal at
        at += count
        return tuple(numbers[at - count : at])

    for prompt in document["prompts"]:
        tokens = take(prompt["tokens"])
        offsets = take(prompt["tokens"]) if prompt["has_offsets"] else None
        prompts.append(TokenizedPrompt(prompt["text"], tokens, offsets))
    lists: dict[str, Sequence[Any]] = {name: tuple(document[name]) for name in ("stop_strings", "stop_tokens")}
    return PreparedRequest(**document | lists | {"prompts": tuple(prompts)})


def error_frame(error: ApiError, unexpected: str = "") -> tuple[dict[str, Any], bytes]:
    """`unexpected`: the traceback of an exception that is no ApiError."""
    fields = {"status": error.status, "message": str(error), "param": error.param, "code": error.code}
    return {"error": fields, "unexpected": unexpected}, b""


def error_of(document: dict[str, Any]) -> ApiError:
    return ApiError(document["status"], document["message"], param=document["param"], code=document["code"])
