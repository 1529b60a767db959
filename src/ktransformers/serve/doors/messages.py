"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`, as Claude Code and the `anthropic` client
speak it.

What a client sends again in its next request becomes the same prompt again: cache markers do not reach the template,
the line with a hash at the head of Claude Code's system prompt is removed, and thinking comes back in plain text. A
tool that is loaded on demand is offered once a tool's result refers to it, and its definition stands in that result.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError, from_json

from ktransformers.serve.doors import answer_events
from ktransformers.serve.doors.answer_events import AnswerEvent, Finish, Usage
from ktransformers.serve.doors.conversation import Call, ChatRequest, Conversation, Generation, Reasoning, Tool, Turn
from ktransformers.serve.doors.door import AnswerHead, Door
from ktransformers.serve.doors.fields import Fields, Name, Temperature, TopP
from ktransformers.serve.http.error import ApiError, bounded
from ktransformers.serve.http.json_slices import sse_event
from ktransformers.serve.http.protocol import ModelName, parse_body

BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
CALL_ID_PREFIX = "toolu_"  # of the ids that clients see; what follows is the id of the answer's event
TOO_LONG = "prompt is too long"  # the words after which Claude Code compacts a conversation
# Blocks that only a provider makes and reads: encrypted thinking, calls of its own tools and their results.
SKIPPED_BLOCKS = re.compile(r"redacted_thinking|server_tool_use|mcp_tool_(use|result)|compaction|\w+_tool_result")
# (role of a message, type of a block) -> what it becomes; any other block is text.
OWN_BLOCKS = {
    ("assistant", "thinking"): "thinking",
    ("assistant", "tool_use"): "call",
    ("user", "tool_result"): "result",
}
ERROR_TYPES = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}

# Type of a block -> the fields that it must have.
BLOCK_FIELDS = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "tool_reference": ("tool_name",),
    "search_result": ("title", "source", "content"),
}

Part = TypeVar("Part", bound=Fields)
Count = Annotated[int, Field(ge=1, le=2**31)]
StopSequence = Annotated[str, Field(min_length=1, max_length=1024)]


def _as_blocks(content: Any) -> Any:
    if not isinstance(content, str | list):
        raise PydanticCustomError("content", "text or a list of blocks")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Blocks = Annotated[list["ContentBlock"], Field(fail_fast=True), BeforeValidator(_as_blocks)]


class ContentBlock(Fields):
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: Name = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: Blocks | None = None
    is_error: bool | None = None
    tool_name: Name = ""
    title: str = ""
    source: str = ""

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, document: Any) -> Any:
        kind = document.get("type") if isinstance(document, dict) else None
        if not isinstance(kind, str) or kind in BLOCK_FIELDS:
            return document
        if SKIPPED_BLOCKS.fullmatch(kind):
            return {"type": kind}
        raise PydanticCustomError("block", "a block of text or tools: this server takes no images and no documents")

    @model_validator(mode="after")
    def _check_fields(self) -> ContentBlock:
        return _require(self, BLOCK_FIELDS.get(self.type, ()))


class Message(Fields):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class ClientTool(Fields):
    type: str | None = None
    name: Name = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None

    @property
    def by_provider(self) -> bool:
        return self.type not in (None, "custom") and self.input_schema is None

    @model_validator(mode="after")
    def _check_fields(self) -> ClientTool:
        return self if self.by_provider else _require(self, ("name", "input_schema"))


def _require(part: Part, names: Sequence[str]) -> Part:
    for name in names:
        if name not in part.model_fields_set:
            raise PydanticCustomError("field", "the field {name} too", {"name": name})
    return part


class ToolChoiceOptions(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Fields):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: Any = None  # without effect: thinking is always sent, so that it comes back


class OutputFormat(Fields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Any = None  # without effect


class MessagesBody(Fields):
    model: ModelName | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    system: Blocks | None = None
    max_tokens: Count | None = None
    tools: Annotated[list[ClientTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoiceOptions | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    stop_sequences: Annotated[list[StopSequence], Field(max_length=16)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    stream: bool | None = None
    # The following have no effect here.
    betas: Any = None
    cache_control: Any = None
    context_management: Any = None
    metadata: Any = None
    service_tier: Any = None


def parse(body: bytes | bytearray) -> ChatRequest:
    request, unknown = parse_body(body, MessagesBody)
    tools = _Tools(request.tools or [])
    turns = _Turns(tools)
    for message in request.messages:
        turns.add(message)
    system = "\n".join(filter(None, (BILLING_LINE.sub("", text) for text in turns.texts(request.system))))
    first = (Turn("system", system),) if system else ()
    last = turns.finished[-1]
    continues = last.role == "assistant" and bool(last.text) and not last.calls
    thinking, output = request.thinking, request.output_config or OutputConfig()
    conversation = Conversation(
        turns=(*first, *turns.finished),
        tools=tools.offered(),
        **tools.choice(request.tool_choice),
        reasoning=Reasoning(
            # A request that does not ask for thinking expects an answer without.
            enabled=thinking is not None and thinking.type != "disabled",
            effort=output.effort,
            budget=None if thinking is None else thinking.budget_tokens,
        ),
        add_generation_prompt=not continues,
        continue_final_turn=continues,
    )
    output_format = output.format or request.output_format
    generation = Generation(
        model=request.model,
        max_tokens=request.max_tokens,
        stream=bool(request.stream),
        sampling=request.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True),
        stop_strings=tuple(request.stop_sequences or ()),
        schema=None if output_format is None else output_format.schema_,
    )
    ignored = (*unknown, *sorted({*tools.skipped.values(), *turns.skipped}))
    return ChatRequest(conversation, generation, {"max_tokens": request.max_tokens}, ignored)


class _Tools:
    """The tools of a request, without those that a provider runs."""

    def __init__(self, tools: Sequence[ClientTool]) -> None:
        self._known = {tool.name: tool for tool in tools if not tool.by_provider}
        self.skipped = {tool.name: f"tools.{bounded(tool.type or '', 100)}" for tool in tools if tool.by_provider}
        self._referenced: set[str] = set()
        if len(self._known) < sum(not tool.by_provider for tool in tools):
            raise ApiError(400, "tools: given two tools of one name, expected different names", param="tools")

    def offered(self) -> tuple[Tool, ...]:
        """A tool whose loading is deferred is offered when the client has found it. A provider's search does not run
        here: what it would find is offered from the start."""
        searched = any(name.startswith("tools.tool_search") for name in self.skipped.values())
        return tuple(
            Tool.of(name, tool.description, tool.input_schema, tool.strict)
            for name, tool in self._known.items()
            if searched or not tool.defer_loading or name in self._referenced
        )

    def definition(self, name: str) -> str:
        """The text that stands for a reference to a tool."""
        self._referenced.add(name)
        tool = self._known.get(name)
        fields = {"description": tool.description, "parameters": tool.input_schema} if tool else {}
        return f"<function>{json.dumps({'name': name, **fields}, ensure_ascii=False)}</function>"

    def choice(self, choice: ToolChoiceOptions | None) -> dict[str, Any]:
        """Fields of the conversation. A choice that only a skipped tool could meet is none."""
        if choice is None:
            return {}
        fields: dict[str, Any] = {"parallel_calls": not choice.disable_parallel_tool_use}
        if choice.type in ("auto", "none"):
            return fields | {"tool_choice": choice.type}
        names = [tool.name for tool in self.offered() if choice.type == "any" or tool.name == choice.name]
        if names:
            named = {"tool_choice": "named", "chosen_tools": tuple(names)}
            return fields | ({"tool_choice": "required"} if choice.type == "any" else named)
        if choice.name in self.skipped or (choice.type == "any" and self.skipped):
            return fields | {"tool_choice": "auto"}
        given = f"{choice.type} {choice.name or ''}".strip()
        raise ApiError(400, f"tool_choice: given {given}, expected a tool of `tools`", param="tool_choice")


class _Turns:
    """Turns from messages. The results of tools in a message come before its text."""

    def __init__(self, tools: _Tools) -> None:
        self.finished: list[Turn] = []
        self.skipped: set[str] = set()
        self._tools = tools
        self._names: dict[str, str] = {}  # id of a call -> its function

    def add(self, message: Message) -> None:
        parts: dict[str, list[ContentBlock]] = {}
        for block in message.content:
            parts.setdefault(OWN_BLOCKS.get((message.role, block.type), "text"), []).append(block)
        thinking, calls, results = (parts.get(kind, []) for kind in OWN_BLOCKS.values())
        self._names |= {call.id: call.name for call in calls}
        self.finished += [
            Turn(
                "tool",
                "\n".join(self.texts(result.content)),
                call_id=result.tool_use_id.removeprefix(CALL_ID_PREFIX),
                name=self._names.get(result.tool_use_id, ""),
                is_error=bool(result.is_error),
            )
            for result in results
        ]
        if "text" in parts or not results:
            # The text of an answer is in blocks only because calls or thinking lie between them.
            text = ("" if message.role == "assistant" else "\n").join(self.texts(parts.get("text")))
            reasoning = "\n".join(block.thinking for block in thinking)
            made = (Call(call.id.removeprefix(CALL_ID_PREFIX), call.name, call.input) for call in calls)
            self.finished.append(Turn(message.role, text, reasoning, tuple(made)))

    def texts(self, blocks: Iterable[ContentBlock] | None) -> Iterator[str]:
        for block in blocks or ():
            if block.type == "text":
                yield block.text
            elif block.type == "search_result":
                yield "\n".join((block.title, block.source, *self.texts(block.content)))
            elif block.type == "tool_reference":
                yield self._tools.definition(block.tool_name)
            elif block.type in BLOCK_FIELDS:
                message = f"messages: given a block of type {block.type!r} where only text can be, expected text"
                raise ApiError(400, message, param="messages")
            else:
                self.skipped.add(f"messages.{bounded(block.type, 100)}")


class MessagesEmitter:
    """The answer of one request. At most one block is open, the last."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._blocks: list[dict[str, Any]] = []
        self._open = ""  # type of the open block; empty: none is
        self._blank = ""  # white space that no block has yet
        self._finish = Finish("stop")

    def begin(self) -> Iterable[str]:
        usage = Usage(self._head.prompt_tokens, self._head.cached_tokens or 0, 0)
        message = {**self.document(usage), "stop_reason": None}
        yield _event("message_start", message=message)

    def ping(self) -> str:
        return _event("ping")

    def event(self, choice: int, event: AnswerEvent) -> Iterable[str]:
        match event:
            case answer_events.ReasoningDelta(text):
                yield from self._enter("thinking", {"thinking": "", "signature": ""})
                yield self._delta("thinking_delta", thinking=text)
            case answer_events.TextDelta(text) if self._open == "text" or text.strip():
                text = self._blank + text
                yield from self._enter("text", {"text": ""})
                yield self._delta("text_delta", text=text)
            case answer_events.TextDelta(text):
                # Clients do not send back a block of white space, so none is begun with it.
                self._blank += text
            case answer_events.CallBegin(_, name, call_id):
                yield from self._close()
                yield from self._enter("tool_use", {"id": CALL_ID_PREFIX + call_id, "name": name, "input": {}})
            case answer_events.CallArguments(_, text):
                yield self._delta("input_json_delta", partial_json=text)
            case answer_events.CallEnd(_, arguments):
                self._blocks[-1]["input"] = _object(arguments)
                yield from self._close()

    def finish(self, choice: int, finish: Finish) -> Iterable[str]:
        self._finish = finish
        yield from self._close()

    def end(self, usage: Usage) -> Iterable[str]:
        document = self.document(usage)
        delta = {name: document[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=delta, usage=document["usage"])
        yield _event("message_stop")

    def fail(self, error: ApiError) -> Iterable[str]:
        yield _event("error", error=error_document(error)["error"], request_id=self._head.request_id)

    def document(self, usage: Usage) -> dict[str, Any]:
        return {
            "id": f"msg_{self._head.request_id.removeprefix('req_')}",
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": self._blocks,
            "stop_reason": self._stop_reason(usage),
            "stop_sequence": self._finish.stop_string,
            "usage": {
                "input_tokens": usage.prompt - usage.cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.cached,
                "output_tokens": usage.completion,
                "output_tokens_details": {"thinking_tokens": usage.reasoning},
            },
        }

    def _stop_reason(self, usage: Usage) -> str:
        if self._finish.reason == "stop_string":
            return "stop_sequence"
        if self._finish.reason == "length":
            limit = self._head.echo["max_tokens"]
            return "model_context_window_exceeded" if limit is None or usage.completion < limit else "max_tokens"
        return "tool_use" if any(block["type"] == "tool_use" for block in self._blocks) else "end_turn"

    def _enter(self, kind: str, fields: dict[str, Any]) -> Iterator[str]:
        """Open a block of this kind, unless one is open."""
        if self._open != kind:
            yield from self._close()
            self._open, self._blank = kind, ""
            self._blocks.append({"type": kind, **fields})
            yield _event("content_block_start", index=len(self._blocks) - 1, content_block=self._blocks[-1])

    def _delta(self, kind: str, **fields: str) -> str:
        for name, text in fields.items():
            if name in self._blocks[-1]:
                self._blocks[-1][name] += text
        return _event("content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, **fields})

    def _close(self) -> Iterator[str]:
        if self._open == "thinking":
            # A client sends the signature back as it is, and nothing verifies it.
            digest = hashlib.sha256(self._blocks[-1]["thinking"].encode("utf-8", "replace"))
            yield self._delta("signature_delta", signature=digest.hexdigest())
        if self._open:
            self._open = ""
            yield _event("content_block_stop", index=len(self._blocks) - 1)


def _object(arguments: str) -> dict[str, Any]:
    """Of arguments that end in the middle, because the answer did, what is complete."""
    try:
        document = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\n{sse_event({'type': kind, **fields})}"


def error_document(error: ApiError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, error.kind if error.status < 500 else "api_error")
    message = str(error)
    if error.code == "context_length_exceeded" and TOO_LONG not in message:
        message = f"{TOO_LONG}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


MESSAGES = Door(
    "messages",
    "/v1/messages",
    parse,
    MessagesEmitter,
    error_document,
    body=MessagesBody,
    count_path="/v1/messages/count_tokens",
    count_document=lambda tokens: {"input_tokens": tokens},
)
