"""OpenAI's Responses API, as Codex, the `openai` client and LangChain speak it.

Nothing is stored: `store` has no effect, and a request that refers to something stored is refused with what to send
instead. What a client sends back of our answers becomes the same turns again; since some clients return nothing else
of a reasoning item, its text is also in `encrypted_content`, readable, where the request includes that.

A namespace's tools are offered to the model as `namespace__tool`. A custom tool, whose input is free text, is offered
as a function with one string parameter; its grammar is shown to the model and is not enforced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from ktransformers.serve.doors.conversation import Call, ChatRequest, Conversation, Reasoning, Tool, ToolChoice, Turn
from ktransformers.serve.doors.door import Door
from ktransformers.serve.doors.fields import Name
from ktransformers.serve.doors.responses_emitter import CUSTOM_PARAMETER, ResponsesEmitter, decode_reasoning
from ktransformers.serve.doors.template_messages import read_arguments
from ktransformers.serve.http.error import ApiError, bounded
from ktransformers.serve.http.protocol import MAX_TOP_LOGPROBS, CommonRequest, Identifier, OpenModel, parse_body

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
                text = _text(item.content or [], where) or decode_reasoning(item.encrypted_content or "")
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
