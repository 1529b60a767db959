"""Ollama's chat for desktop clients: /api/chat, which streams lines of JSON, and the documents of /api/tags, /api/show
and /api/version. Settings are in `options`, under names of their own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from ktransformers.serve.doors.answer_events import (
    AnswerEvent,
    CallBegin,
    CallEnd,
    Finish,
    ReasoningDelta,
    TextDelta,
    Usage,
)
from ktransformers.serve.doors.chat import OfferedTool, offered_tool
from ktransformers.serve.doors.conversation import Call, ChatRequest, Conversation, Generation, Reasoning, Turn
from ktransformers.serve.doors.door import AnswerHead, Door
from ktransformers.serve.doors.fields import Fields, MinP, Penalty, RepetitionPenalty, Seed, Temperature, TopK, TopP
from ktransformers.serve.doors.template_messages import read_arguments
from ktransformers.serve.http.error import ApiError
from ktransformers.serve.http.protocol import ModelName, OpenModel, StopString, parse_body

DEFAULT_TAG = ":latest"  # which clients add to names
VERSION = "0.20.0"  # of Ollama, whose API this is; clients compare it
# An option -> the setting of `Sampling`.
SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
}


class OllamaOptions(Fields):
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    num_predict: Annotated[int, Field(ge=-2, le=2**31)] | None = None  # negative: no limit
    num_ctx: int | None = None  # the context is the server's
    stop: Annotated[list[StopString], Field(max_length=16)] | None = None


class OllamaFunction(OpenModel):
    name: str
    arguments: dict[str, Any] | str | None = None


class OllamaCall(OpenModel):
    id: str | None = None
    function: OllamaFunction


class OllamaMessage(OpenModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaBody(Fields):
    model: ModelName | None = None
    messages: Annotated[list[OllamaMessage], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[OfferedTool], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    keep_alive: str | int | None = None  # the model stays


class ShowBody(Fields):
    model: ModelName | None = None
    name: ModelName | None = None  # of earlier clients
    verbose: bool | None = None


def parse(body: bytes | bytearray) -> ChatRequest:
    request, ignored = parse_body(body, OllamaBody)
    options = request.options or OllamaOptions()
    limit = options.num_predict
    schema = {"type": "object"} if request.format == "json" else request.format or None
    conversation = Conversation(
        turns=tuple(_turn(message) for message in request.messages),
        tools=tuple(offered_tool(tool.function) for tool in request.tools or ()),
        reasoning=Reasoning(None) if request.think is None else _reasoning(request.think),
    )
    generation = Generation(
        model=request.model or None,
        max_tokens=None if limit is None or limit < 0 else limit,
        stream=request.stream is not False,
        sampling={ours: value for name, ours in SAMPLING.items() if (value := getattr(options, name)) is not None},
        stop_strings=tuple(options.stop or ()),
        schema=schema,
    )
    return ChatRequest(conversation, generation, {}, ignored)


def _reasoning(think: bool | str) -> Reasoning:
    return Reasoning(think) if isinstance(think, bool) else Reasoning(True, think)


def _turn(message: OllamaMessage) -> Turn:
    if message.images:
        given = "messages: given images, expected text: this server takes no images"
        raise ApiError(400, given, param="messages", code="unsupported_content")
    return Turn(
        role=message.role,
        text=message.content or "",
        reasoning=message.thinking or "",
        calls=tuple(
            Call(call.id or "", call.function.name, read_arguments(call.function.arguments))
            for call in message.tool_calls or ()
        ),
        call_id=message.tool_call_id or "",
        name=message.tool_name or "",
    )


class OllamaEmitter:
    def __init__(self, head: AnswerHead) -> None:
        self._head, self._started = head, time.monotonic_ns()
        self._first_token: int | None = None
        self._message: dict[str, Any] = {"role": "assistant", "content": ""}
        self._names: dict[int, str] = {}
        self._finish = "stop"

    def begin(self) -> Iterable[str]:
        return []

    def ping(self) -> str:
        return ""

    def event(self, choice: int, event: AnswerEvent) -> Iterable[str]:
        self._first_token = self._first_token or time.monotonic_ns()
        match event:
            case TextDelta(text):
                self._message["content"] += text
                return [self._line({"role": "assistant", "content": text})]
            case ReasoningDelta(text):
                self._message["thinking"] = self._message.get("thinking", "") + text
                return [self._line({"role": "assistant", "content": "", "thinking": text})]
            case CallBegin(index, name):
                self._names[index] = name
            case CallEnd(index, arguments):
                read = read_arguments(arguments)
                function = {"index": index, "name": self._names[index]}
                call = {"function": {**function, "arguments": read if isinstance(read, dict) else {}}}
                self._message.setdefault("tool_calls", []).append(call)
                return [self._line({"role": "assistant", "content": "", "tool_calls": [call]})]
        return []

    def _document(self, message: dict[str, Any], done: bool) -> dict[str, Any]:
        created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._head.model, "created_at": created, "message": message, "done": done}

    def _line(self, message: dict[str, Any]) -> str:
        return json.dumps(self._document(message, False), ensure_ascii=False) + "\n"

    def finish(self, choice: int, finish: Finish) -> Iterable[str]:
        self._finish = "length" if finish.reason == "length" else "stop"
        return []

    def _last(self, message: dict[str, Any], usage: Usage) -> dict[str, Any]:
        now = time.monotonic_ns()
        first = self._first_token or now
        return {
            **self._document(message, True),
            "done_reason": self._finish,
            "total_duration": now - self._started,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": first - self._started,
            "eval_count": usage.completion,
            "eval_duration": now - first,
        }

    def end(self, usage: Usage) -> Iterable[str]:
        last = self._last({"role": "assistant", "content": ""}, usage)
        return [json.dumps(last, ensure_ascii=False) + "\n"]

    def fail(self, error: ApiError) -> Iterable[str]:
        return [json.dumps(error_document(error), ensure_ascii=False) + "\n"]

    def document(self, usage: Usage) -> dict[str, Any]:
        return self._last(self._message, usage)


def error_document(error: ApiError) -> dict[str, Any]:
    return {"error": str(error)}


def tag(model: dict[str, Any]) -> dict[str, Any]:
    """An entry of /api/tags, of one of /v1/models."""
    modified = datetime.fromtimestamp(model["created"], UTC).isoformat().replace("+00:00", "Z")
    described = {"name": model["id"], "model": model["id"], "modified_at": modified, "size": 0, "digest": ""}
    return {**described, "details": _details(model), "context_length": model["context_length"]}


def show(model: dict[str, Any], template: str) -> dict[str, Any]:
    """The document of /api/show."""
    architecture = {"general.architecture": "ktransformers", "ktransformers.context_length": model["context_length"]}
    return {
        "template": template,
        "details": _details(model),
        "model_info": architecture,
        "capabilities": [name for name in model["capabilities"] if name != "chat"],
    }


def _details(model: dict[str, Any]) -> dict[str, Any]:
    parent = model["parent"] or ""
    return {"parent_model": parent, "format": "", "family": "", "families": [], "parameter_size": ""}


OLLAMA = Door(
    "ollama",
    "/api/chat",
    parse,
    OllamaEmitter,
    error_document,
    body=OllamaBody,
    media_type="application/x-ndjson",
    more_paths=("/api/",),
)
