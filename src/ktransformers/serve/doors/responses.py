"""OpenAI's Responses API, as Codex, the `openai` client and LangChain speak it.

Nothing is stored: `store` has no effect, and a request that refers to something stored is refused with what to send
instead. What a client sends back of our answers becomes the same turns again; since some clients return nothing else
of a reasoning item, its text is also in `encrypted_content`, readable, where the request includes that.

A namespace's tools are offered to the model as `namespace__tool`. A custom tool, whose input is free text, is offered
as a function with one string parameter; its grammar is shown to the model and is not enforced.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import from_json

from ktransformers.serve.doors.answer_events import (
    AnswerEvent,
    CallArguments,
    CallBegin,
    CallEnd,
    Finish,
    ReasoningDelta,
    TextDelta,
    TokenScores,
    Usage,
)
from ktransformers.serve.doors.conversation import Call, ChatRequest, Conversation, Reasoning, Tool, ToolChoice, Turn
from ktransformers.serve.doors.door import AnswerHead, Door
from ktransformers.serve.doors.fields import Name
from ktransformers.serve.doors.template_messages import read_arguments
from ktransformers.serve.http.error import ApiError, bounded
from ktransformers.serve.http.json_slices import sse_event
from ktransformers.serve.http.protocol import MAX_TOP_LOGPROBS, CommonRequest, Identifier, OpenModel, parse_body

CUSTOM_PARAMETER = "input"  # of the function that stands for a custom tool
REASONING_PREFIX = "kt1:"  # of `encrypted_content` that is ours
# Items that are not for the model: calls of tools that a provider runs, and notes of a client to a provider.
SKIPPED_ITEMS = ("_call", "_call_output", "_search_output", "_tools", "_update", "compaction", "compaction_trigger")


class ContentPart(OpenModel):
    type: str
    text: str | None = None
    refusal: str | None = None


# Text stands for one part, and for one message of the user.
Content = Annotated[
    list[ContentPart],
    BeforeValidator(lambda given: [{"type": "text", "text": given}] if isinstance(given, str) else given),
]


class MessageItem(OpenModel):
    role: Literal["user", "assistant", "system", "developer"] = "user"  # Codex's agents send messages without it
    content: Content


class CalledItem(OpenModel):
    """Of a function, with arguments, or of a custom tool, with its input."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str
    name: Name
    namespace: str | None = None
    arguments: str = ""
    input: str = ""


class CallOutputItem(OpenModel):
    call_id: str
    output: Content


class ReasoningItem(OpenModel):
    summary: list[ContentPart] | None = None
    content: list[ContentPart] | None = None
    encrypted_content: str | None = None


class OtherItem(OpenModel):
    type: str


class FunctionTool(OpenModel):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputFormat(OpenModel):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(OpenModel):
    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: InputFormat | None = None


class OtherTool(OpenModel):
    type: str


ITEM_TAGS = {
    "function_call": "called",
    "custom_tool_call": "called",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
    "reasoning": "reasoning",
    "agent_message": "message",
    "message": "message",
}
TOOL_TAGS = {"function": "function", "custom": "custom", "namespace": "namespace"}


def _tag(document: Any, tags: Mapping[str, str], default: str | None = None) -> str:
    kind = document.get("type", default) if isinstance(document, dict) else getattr(document, "type", None)
    return tags.get(kind, "other") if isinstance(kind, str) else "other"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CalledItem, Tag("called")]
    | Annotated[CallOutputItem, Tag("output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(lambda document: _tag(document, ITEM_TAGS, "message")),
]


class NamespaceTool(OpenModel):
    type: Literal["namespace"]
    name: Name
    description: str = ""
    tools: list[OfferedTool]


OfferedTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(lambda document: _tag(document, TOOL_TAGS)),
]


class ToolReference(OpenModel):
    type: str
    name: Name | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"  # of allowed_tools
    tools: list[ToolReference] | None = None  # of allowed_tools


class ReasoningSettings(OpenModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


class TextFormat(OpenModel):
    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextSettings(OpenModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(CommonRequest):
    input: Annotated[
        Annotated[list[Item], Field(fail_fast=True)] | None,
        BeforeValidator(lambda given: [{"role": "user", "content": given}] if isinstance(given, str) else given),
    ] = None
    instructions: str | None = None
    tools: Annotated[list[OfferedTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolReference | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSettings | None = None
    text: TextSettings | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    # OpenAI's and Codex's, accepted without effect
    truncation: Literal["auto", "disabled"] | None = None
    prompt_cache_key: Identifier | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: Identifier | None = None
    client_metadata: dict[str, Any] | None = None
    max_tool_calls: int | None = None


def parse(body: bytes | bytearray) -> ChatRequest:
    request, ignored = parse_body(body, ResponsesBody)
    _refuse_stored(request)
    named = _named_tools(request.tools or ())
    offered = {name: _offered(name, tool) for name, (tool, _) in named.items()}
    choice, chosen = _tool_choice(request.tool_choice, offered)
    effort = request.reasoning.effort if request.reasoning else None
    conversation = Conversation(
        turns=_turns(request.instructions, request.input or ()),
        tools=tuple(offered.values()),
        tool_choice=choice,
        chosen_tools=chosen,
        parallel_calls=request.parallel_tool_calls is not False,
        reasoning=Reasoning(enabled=None if effort is None else effort != "none", effort=effort),
    )
    include = request.include or ()
    wants_scores = request.top_logprobs or "message.output_text.logprobs" in include
    generation = request.generation(request.max_output_tokens, (request.top_logprobs or 0) if wants_scores else None)
    echo = {
        "response": _echoed_fields(request),
        "tools": {
            name: {"custom": isinstance(tool, CustomTool), "name": tool.name, "namespace": namespace}
            for name, (tool, namespace) in named.items()
        },
        "encrypted_reasoning": "reasoning.encrypted_content" in include,
    }
    skipped = [f"tools.{tool.type}" for tool in request.tools or () if isinstance(tool, OtherTool)]
    skipped += [f"input.{item.type}" for item in request.input or () if isinstance(item, OtherItem)]
    ignored += tuple(bounded(name, 100) for name in dict.fromkeys(skipped))
    return ChatRequest(conversation, replace(generation, n=1, schema=_schema(request)), echo, ignored)


def _refuse_stored(request: ResponsesBody) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(request, name):
            message = f"{name}: given, but this server stores nothing; send all earlier items in `input`"
            raise ApiError(400, message, param=name, code="previous_response_not_found")
    if request.background:
        message = "background: given true, expected false: this server stores nothing; use `stream`"
        raise ApiError(400, message, param="background", code="unsupported_value")


def _schema(request: ResponsesBody) -> Any:
    wanted = request.text.format if request.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_schema" and wanted.schema_ is None:
        raise ApiError(400, "text.format: given no schema, expected text.format.schema", param="text.format")
    return wanted.schema_ if wanted.type == "json_schema" else {"type": "object"}


def _echoed_fields(request: ResponsesBody) -> dict[str, Any]:
    """The fields of a response that repeat its request."""
    names = {"instructions", "max_output_tokens", "max_tool_calls", "metadata", "prompt_cache_key", "safety_identifier"}
    names |= {"temperature", "top_p", "truncation", "user"}
    text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
    choice, reasoning = request.tool_choice or "auto", request.reasoning or ReasoningSettings()
    return {
        **request.model_dump(include=names),
        "background": False,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": reasoning.model_dump(include={"effort", "summary"}),
        "store": False,
        "text": {"format": {"type": "text"}} | text,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_unset=True),
        "tools": [tool.model_dump() for tool in request.tools or () if not isinstance(tool, OtherTool)],
        "top_logprobs": request.top_logprobs or 0,
    }


def _qualified(name: str, namespace: str | None) -> str:
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def _named_tools(
    tools: Sequence[OfferedTool], namespace: str | None = None
) -> dict[str, tuple[FunctionTool | CustomTool, str | None]]:
    """Name that the model is told -> tool and its namespace."""
    named: dict[str, tuple[FunctionTool | CustomTool, str | None]] = {}
    for tool in tools:
        entries = {}
        match tool:
            case NamespaceTool():
                entries = _named_tools(tool.tools, tool.name)
            case FunctionTool() | CustomTool():
                entries = {_qualified(tool.name, namespace): (tool, namespace)}
        for name in named.keys() & entries:
            message = f"tools: given {bounded(name, 100)!r} twice, expected different names"
            raise ApiError(400, message, param="tools")
        named |= entries
    return named


def _offered(name: str, tool: FunctionTool | CustomTool) -> Tool:
    if isinstance(tool, FunctionTool):
        return Tool.of(name, tool.description, tool.parameters, tool.strict)
    usage = f"Call it with one parameter, `{CUSTOM_PARAMETER}`: the whole input as text."
    if tool.format is not None and tool.format.definition:
        usage += f" The text has to match this {tool.format.syntax or 'grammar'}:\n{tool.format.definition}"
    parameters = {"type": "object", "properties": {CUSTOM_PARAMETER: {"type": "string"}}}
    closed = {"required": [CUSTOM_PARAMETER], "additionalProperties": False}
    return Tool(name, f"{tool.description or ''}\n{usage}".strip(), parameters | closed)


def _tool_choice(choice: str | ToolReference | None, offered: Mapping[str, Tool]) -> tuple[ToolChoice, tuple[str, ...]]:
    match choice:
        case None | "auto":
            return "auto", ()
        case "none":
            return "none", ()
        case ToolReference(type="allowed_tools", mode=mode, tools=tools):
            chosen = tuple(name for tool in tools or () for name in _chosen(tool, offered))
            return ("none", ()) if mode == "auto" and not chosen else (mode, _not_empty(chosen, mode, offered))
        case ToolReference():
            return "named", _not_empty(_chosen(choice, offered), choice.type, offered)
        case _:
            _not_empty(tuple(offered), choice, offered)
            return "required", ()


def _chosen(reference: ToolReference, offered: Mapping[str, Tool]) -> tuple[str, ...]:
    """Names of the offered tools that an entry of tool_choice refers to; none for a tool that a provider runs."""
    if reference.type == "namespace":
        return tuple(name for name in offered if name.startswith(_qualified("", reference.name or "?")))
    if reference.type not in ("function", "custom"):
        return ()
    name = _qualified(reference.name or "", reference.namespace)
    return _not_empty((name,) if name in offered else (), name, offered)


def _not_empty(chosen: tuple[str, ...], given: str, offered: Mapping[str, Tool]) -> tuple[str, ...]:
    if not chosen:
        expected = bounded(f"one of {list(offered)}" if offered else "functions or custom tools in `tools`", 500)
        raise ApiError(400, f"tool_choice: given {bounded(given, 100)!r}, expected {expected}", param="tool_choice")
    return chosen


def _turns(instructions: str | None, items: Sequence[Item]) -> tuple[Turn, ...]:
    """Consecutive items of the assistant are one turn. Without a turn to answer there is an empty one of the user."""
    turns = [Turn("system", instructions)] if instructions else []
    for is_assistant, group in groupby(_item_turns(items), lambda turn: turn.role == "assistant"):
        if is_assistant:
            said = list(group)
            text = "\n".join(turn.text for turn in said if turn.text)
            reasoning = "\n".join(turn.reasoning for turn in said if turn.reasoning)
            turns.append(Turn("assistant", text, reasoning, tuple(call for turn in said for call in turn.calls)))
        else:
            turns.extend(group)
    return tuple(turns) if any(turn.role != "system" for turn in turns) else (*turns, Turn("user"))


def _item_turns(items: Sequence[Item]) -> Iterator[Turn]:
    names: dict[str, str] = {}  # call_id -> name
    for number, item in enumerate(items):
        where = f"input.{number}"
        match item:
            case MessageItem(role=role):
                yield Turn("system" if role == "developer" else role, _text(item.content, where))
            case CalledItem(call_id=call_id):
                names[call_id] = name = _qualified(item.name, item.namespace)
                is_custom = item.type == "custom_tool_call"
                arguments = {CUSTOM_PARAMETER: item.input} if is_custom else read_arguments(item.arguments)
                yield Turn("assistant", calls=(Call(call_id, name, arguments),))
            case CallOutputItem(call_id=call_id):
                yield Turn("tool", _text(item.output, where), call_id=call_id, name=names.get(call_id, ""))
            case ReasoningItem():
                text = _text(item.content or [], where) or _decode_reasoning(item.encrypted_content or "")
                yield Turn("assistant", reasoning=text or _text(item.summary or [], where))
            case OtherItem(type="item_reference"):
                message = f"{where}: given an item_reference, but this server stores nothing; send the item itself"
                raise ApiError(400, message, param=where, code="previous_response_not_found")
            case OtherItem(type=kind) if not (kind.endswith(SKIPPED_ITEMS) or kind.startswith("mcp_")):
                expected = ", ".join(ITEM_TAGS)
                given = f"{where}.type: given {bounded(kind, 100)!r}"
                raise ApiError(400, f"{given}, expected one of {expected}", param=f"{where}.type")


def _text(content: Sequence[ContentPart], where: str) -> str:
    for part in content:
        if part.text is None and part.refusal is None:
            given = f"{where}: given a part of type {bounded(part.type, 100)!r}"
            message = f"{given}, expected text: this server takes no images, files or audio"
            raise ApiError(400, message, param=where, code="unsupported_content")
    return "".join(part.text or part.refusal or "" for part in content)


def _encode_reasoning(text: str) -> str:
    return REASONING_PREFIX + base64.b64encode(text.encode()).decode()


def _decode_reasoning(content: str) -> str:
    """Empty for reasoning that another server has encrypted."""
    try:
        is_ours = content.startswith(REASONING_PREFIX)
        return base64.b64decode(content.removeprefix(REASONING_PREFIX), validate=True).decode() if is_ours else ""
    except ValueError:
        return ""


@dataclass(frozen=True)
class ItemKind:
    """How items of one type are streamed."""

    prefix: str  # of ids
    event: str  # of the events with pieces of the text and with all of it
    field: str  # that has all of the text
    part: dict[str, Any] | None = None  # of the content, empty; None: the item has its text itself


TEXT_PART = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
ITEM_KINDS = {
    "reasoning": ItemKind("rs", "reasoning_text", "text", {"type": "reasoning_text", "text": ""}),
    "message": ItemKind("msg", "output_text", "text", TEXT_PART),
    "function_call": ItemKind("fc", "function_call_arguments", "arguments"),
    "custom_tool_call": ItemKind("ctc", "custom_tool_call_input", "input"),
}


class OutputItem:
    """An item of the answer while it is generated."""

    def __init__(self, kind: str, fields: dict[str, Any]) -> None:
        self.kind = ITEM_KINDS[kind]
        item_id = f"{self.kind.prefix}_{uuid.uuid4().hex}"
        self.document = {"type": kind, "id": item_id, "status": "in_progress", **fields}
        self.text = ""
        self.scores: list[dict[str, Any]] = []  # log-probabilities of the text
        self._arguments = ""  # of a custom tool's call

    def piece_of(self, arguments: str) -> str:
        """What the next piece of a call's arguments adds to the item's text, which for a custom tool is a string in
        them."""
        if self.kind.field != "input":
            return arguments
        self._arguments += arguments
        try:
            known = from_json(self._arguments, allow_partial="trailing-strings")
        except ValueError:  # nothing of it is JSON yet
            return ""
        return self._rest_of(known.get(CUSTOM_PARAMETER) if isinstance(known, dict) else "")

    def end_of(self, arguments: str) -> str:
        """What is missing of the item's text when the call is complete."""
        return self._rest_of(_custom_input(arguments) if self.kind.field == "input" else arguments)

    def _rest_of(self, text: Any) -> str:
        return text[len(self.text) :] if isinstance(text, str) and text.startswith(self.text) else ""


def _custom_input(arguments: str) -> str:
    """The input among a call's arguments, or the only string there; all of them if that is not to be found."""
    document = read_arguments(arguments)
    texts = [value for value in document.values() if isinstance(value, str)] if isinstance(document, dict) else []
    given = document.get(CUSTOM_PARAMETER) if isinstance(document, dict) else None
    return given if isinstance(given, str) else texts[0] if len(texts) == 1 else arguments


class ResponsesEmitter:
    """One item is open at a time. It is closed when the next one begins or the answer ends, since only then it is
    known whether it is complete."""

    def __init__(self, head: AnswerHead) -> None:
        self._head, self._created = head, int(time.time())
        self._id = f"resp_{head.request_id.removeprefix('req_')}"
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._item: OutputItem | None = None
        self._scores: list[dict[str, Any]] = []  # of text that follows
        self._reason = "stop"

    def begin(self) -> list[str]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._response("in_progress")) for kind in kinds]

    def ping(self) -> str:
        """Codex ends a stream without events after five minutes. Comments are no events. The request's long fields are
        not repeated each time."""
        short = {**self._response("in_progress"), "instructions": None, "tools": []}
        return self._event("response.in_progress", response=short)

    def event(self, choice: int, event: AnswerEvent) -> Iterator[str]:
        match event:
            case TokenScores(content):
                self._scores += content
                return
            case TextDelta(text):
                yield from self._region("message", {"role": "assistant", "content": []})
                yield from self._delta(text)
            case ReasoningDelta(text):
                yield from self._region("reasoning", {"summary": [], "content": []})
                yield from self._delta(text)
            case CallBegin(name=name, id=call_id):
                tool = self._head.echo["tools"].get(name, {"custom": False, "name": name, "namespace": None})
                kind, field = ("custom_tool_call", "input") if tool["custom"] else ("function_call", "arguments")
                fields = {"call_id": call_id, "name": tool["name"], field: ""}
                yield from self._close("completed")
                yield from self._open(kind, fields | ({"namespace": tool["namespace"]} if tool["namespace"] else {}))
            case CallArguments(text=text) if self._item:
                yield from self._delta(self._item.piece_of(text))
            case CallEnd(arguments=arguments) if self._item:
                yield from self._delta(self._item.end_of(arguments))
        self._scores = []

    def finish(self, choice: int, finish: Finish) -> list[str]:
        """A call that was cut off is not announced as done: Codex would run it."""
        self._reason = finish.reason
        if finish.reason == "length" and self._item is not None and self._item.kind.part is None:
            document = {**self._item.document, self._item.kind.field: self._item.text, "status": "incomplete"}
            self._output.append(document)
            return []
        return list(self._close("incomplete" if finish.reason == "length" else "completed"))

    def end(self, usage: Usage) -> list[str]:
        document = self.document(usage)
        return [self._event(f"response.{document['status']}", response=document)]

    def fail(self, error: ApiError) -> list[str]:
        """Codex tries again after rate_limit_exceeded and server_error, and ends the turn after the others."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        if error.status < 500 and error.status != 429:
            code = error.code if error.code == "context_length_exceeded" else "invalid_prompt"
        failure = {"code": code, "message": str(error)}
        return [self._event("response.failed", response={**self._response("failed"), "error": failure})]

    def document(self, usage: Usage) -> dict[str, Any]:
        status = "incomplete" if self._reason == "length" else "completed"
        return {
            **self._response(status),
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        head = {"id": self._id, "object": "response", "created_at": self._created, "status": status}
        rest = {"error": None, "incomplete_details": None, "output": list(self._output), "usage": None}
        return {**head, "model": self._head.model, **rest, **self._head.echo["response"]}

    def _region(self, kind: str, fields: dict[str, Any]) -> Iterator[str]:
        """An item of this kind is open afterwards."""
        if self._item is None or self._item.document["type"] != kind:
            yield from self._close("completed")
            yield from self._open(kind, fields)

    def _open(self, kind: str, fields: dict[str, Any]) -> Iterator[str]:
        self._item = item = OutputItem(kind, fields)
        yield self._event("response.output_item.added", output_index=len(self._output), item=item.document)
        if item.kind.part:
            yield self._item_event(item, "content_part.added", part=item.kind.part)

    def _delta(self, text: str) -> Iterator[str]:
        item = self._item
        if item is None or not text:
            return
        item.text += text
        scores = {"logprobs": self._scores} if item.kind.part is TEXT_PART else {}
        item.scores += self._scores
        yield self._item_event(item, f"{item.kind.event}.delta", delta=text, **scores)

    def _close(self, status: str) -> Iterator[str]:
        item, self._item = self._item, None
        if item is None:
            return
        whole: dict[str, Any] = {item.kind.field: item.text}
        scores = {"logprobs": item.scores} if item.kind.part is TEXT_PART else {}
        name = {"name": item.document["name"]} if item.kind.field == "arguments" else {}
        yield self._item_event(item, f"{item.kind.event}.done", **whole, **scores, **name)
        if item.kind.part:
            part = {**item.kind.part, **whole, **scores}
            yield self._item_event(item, "content_part.done", part=part)
            whole = {"content": [part]}
        if item.kind.event == "reasoning_text" and self._head.echo["encrypted_reasoning"]:
            whole["encrypted_content"] = _encode_reasoning(item.text)
        document = {**item.document, **whole, "status": status}
        yield self._event("response.output_item.done", output_index=len(self._output), item=document)
        self._output.append(document)

    def _item_event(self, item: OutputItem, kind: str, **fields: Any) -> str:
        place = {"item_id": item.document["id"], "output_index": len(self._output)}
        index = {"content_index": 0} if item.kind.part else {}
        return self._event(f"response.{kind}", **place, **index, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        document = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return f"event: {kind}\n{sse_event(document)}"


RESPONSES = Door(
    "responses",
    "/v1/responses",
    parse,
    ResponsesEmitter,
    ApiError.to_json,
    body=ResponsesBody,
    statuses={429: 503},  # Codex tries again after 503
    count_path="/v1/responses/input_tokens",
    count_document=lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens},
)
