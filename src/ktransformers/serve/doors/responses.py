"""OpenAI's Responses API: `/v1/responses`, as Codex, the `openai` client and LangChain speak it.

Nothing is stored: `store` is accepted and has no effect, and a request that refers to a stored response, item or prompt
is refused with what to send instead. What a client sends back of our own answers becomes the same turns again; a
reasoning item keeps its text in `encrypted_content` if the request includes that, since Codex returns nothing else.

A namespace's tools are offered to the model as `namespace__tool`. A custom tool, whose input is free text, is offered
as a function with one string parameter; its grammar is shown to the model and is not enforced.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from ktransformers.serve.doors.answer_events import (
    AnswerEvent,
    CallArguments,
    CallBegin,
    CallEnd,
    Finish,
    ReasoningDelta,
    TextDelta,
    Usage,
)
from ktransformers.serve.doors.conversation import Call, ChatRequest, Conversation, Generation, Reasoning, Tool, Turn
from ktransformers.serve.doors.door import AnswerHead, Door
from ktransformers.serve.http.error import ApiError, bounded

CUSTOM_PARAMETER = "input"  # of the function that stands for a custom tool
ENCRYPTED_REASONING = "include reasoning.encrypted_content"
REASONING_PREFIX = "kt1:"  # before reasoning of ours in `encrypted_content`
# Items of tools that a provider runs, and notes of a client to a provider. They are left out of the conversation.
SKIPPED_ITEMS = frozenset(
    """additional_tools code_interpreter_call compaction compaction_trigger computer_call computer_call_output
    configuration_update context_compaction file_search_call image_generation_call local_shell_call
    local_shell_call_output mcp_approval_request mcp_approval_response mcp_call mcp_list_tools shell_call
    shell_call_output tool_search_call tool_search_output web_search_call""".split()
)
ERROR_CODES = {429: "rate_limit_exceeded", 503: "server_is_overloaded"}  # on which clients wait and try again

Finite = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class Fields(BaseModel):
    """A JSON object whose known fields have the right type, and that may have others."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class FunctionTool(Fields):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFormat(Fields):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Fields):
    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: ToolFormat | None = None


class NamespaceTool(Fields):
    type: Literal["namespace"]
    name: Name
    description: str = ""
    tools: list[dict[str, Any]]


class ToolReference(Fields):
    type: str
    name: Name | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"  # of allowed_tools
    tools: list[dict[str, Any]] = []  # of allowed_tools


class ReasoningOptions(Fields):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


class TextFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(Fields):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(Fields):
    model: Annotated[str, Field(max_length=1024)] | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    include: list[str] | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    # The following are accepted and have no effect.
    store: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    client_metadata: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    user: str | None = None


class ContentPart(Fields):
    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | list[ContentPart]


class MessageItem(Fields):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class AgentMessageItem(Fields):
    content: Content


class FunctionCallItem(Fields):
    call_id: str
    name: Name
    namespace: str | None = None
    arguments: str


class CustomCallItem(Fields):
    call_id: str
    name: Name
    namespace: str | None = None
    input: str


class OutputItem(Fields):
    call_id: str
    output: Content


class ReasoningItem(Fields):
    summary: list[ContentPart] = []
    content: list[ContentPart] | None = None
    encrypted_content: str | None = None


Known = TypeVar("Known", bound=BaseModel)


def _validated(kind: type[Known], value: Any, where: str = "") -> Known:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(part for part in (where, *map(str, first["loc"])) if part)
        if first["type"] == "missing":
            raise ApiError(400, f"{name}: given nothing, expected a value", param=name) from error
        expected = first["msg"].removeprefix("Input should be ")
        given = bounded(repr(first["input"]), 100)
        raise ApiError(400, f"{name}: given {given}, expected {expected}", param=name) from error


def parse(body: bytes | bytearray) -> ChatRequest:
    try:
        document = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"body: given no JSON ({error}), expected a JSON object") from error
    if not isinstance(document, dict):
        raise ApiError(400, f"body: given {bounded(repr(document), 100)}, expected a JSON object")
    request = _validated(ResponsesRequest, document)
    _refuse_stored(request)
    tools = _Tools()
    for number, tool in enumerate(request.tools or ()):
        tools.add(tool, f"tools.{number}")
    turns = _Turns()
    if request.instructions:
        turns.add(Turn("system", request.instructions))
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input or []
    for number, item in enumerate(items):
        turns.add_item(item, f"input.{number}")
    tool_choice, chosen = _tool_choice(request.tool_choice, tools.offered)
    effort = request.reasoning.effort if request.reasoning else None
    conversation = Conversation(
        turns=turns.finished(),
        tools=tuple(tools.offered.values()),
        tool_choice=tool_choice,
        chosen_tools=chosen,
        parallel_calls=request.parallel_tool_calls is not False,
        reasoning=Reasoning(enabled=None if effort is None else effort != "none", effort=effort),
    )
    generation = Generation(
        model=request.model,
        max_tokens=request.max_output_tokens,
        stream=bool(request.stream),
        sampling=request.model_dump(include={"temperature", "top_p"}, exclude_none=True),
        schema=_schema(request.text),
    )
    echo = {
        "response": _echoed(request, tools.echoed),
        "names": tools.names,
        "encrypted_reasoning": "reasoning.encrypted_content" in (request.include or ()),
    }
    ignored = (*(request.model_extra or ()), *dict.fromkeys((*tools.skipped, *turns.skipped)))
    return ChatRequest(conversation, generation, echo, ignored)


def _refuse_stored(request: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(request, name):
            message = f"{name}: given, but this server stores nothing; send all earlier items in `input`"
            raise ApiError(400, message, param=name, code="previous_response_not_found")
    if request.background:
        message = "background: given true, expected false: nothing is stored here; use `stream`"
        raise ApiError(400, message, param="background", code="unsupported_value")


def _schema(text: TextOptions | None) -> Any:
    if text is None or text.format is None or text.format.type == "text":
        return None
    if text.format.type == "json_object":
        return {"type": "object"}
    if text.format.schema_ is None:
        raise ApiError(400, "text.format: given no schema, expected the field `schema`", param="text.format")
    return text.format.schema_


def _echoed(request: ResponsesRequest, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of a response that repeat its request."""
    given = request.model_dump(
        by_alias=True,
        exclude_none=True,
        include={"instructions", "max_output_tokens", "max_tool_calls", "metadata", "prompt_cache_key", "reasoning"}
        | {"safety_identifier", "temperature", "text", "tool_choice", "top_p", "truncation", "user"},
    )
    text = {"format": {"type": "text"}} | given.pop("text", {})
    defaults = {
        "background": False,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": None,
        "tool_choice": "auto",
        "top_p": None,
        "truncation": "disabled",
    }
    return defaults | given | {"text": text, "tools": tools}


def _qualified(name: str, namespace: str | None) -> str:
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


class _Tools:
    """The tools of a request: those that the model is offered, and how their calls are answered."""

    def __init__(self) -> None:
        self.offered: dict[str, Tool] = {}  # by the name that the model is told
        self.names: dict[str, dict[str, Any]] = {}  # the same name -> type, name and namespace of the client's tool
        self.echoed: list[dict[str, Any]] = []
        self.skipped: list[str] = []

    def add(self, document: dict[str, Any], where: str) -> None:
        if document.get("type") == "namespace":
            space = _validated(NamespaceTool, document, where)
            for number, member in enumerate(space.tools):
                self._add(member, f"{where}.tools.{number}", space.name)
            self.echoed.append({"description": ""} | document)
        elif self._add(document, where, None):
            defaults = {"parameters": None, "strict": False} if document["type"] == "function" else {}
            self.echoed.append(defaults | document)

    def _add(self, document: dict[str, Any], where: str, namespace: str | None) -> bool:
        kind = document.get("type")
        if kind == "function":
            function = _validated(FunctionTool, document, where)
            tool = Tool(function.name, function.description or "", function.parameters or {}, bool(function.strict))
        elif kind == "custom":
            tool = _function_of_custom(_validated(CustomTool, document, where))
        elif isinstance(kind, str):
            self.skipped.append(f"tools.{bounded(kind, 100)}")
            return False
        else:
            raise ApiError(400, f"{where}.type: given {bounded(repr(kind), 100)}, expected a tool's type", param=where)
        name = _qualified(tool.name, namespace)
        if name in self.offered:
            raise ApiError(400, f"{where}.name: given {name!r} twice, expected different names", param="tools")
        self.names[name] = {"type": kind, "name": tool.name, **({"namespace": namespace} if namespace else {})}
        self.offered[name] = Tool(name, tool.description, tool.parameters, tool.strict)
        return True


def _function_of_custom(tool: CustomTool) -> Tool:
    usage = f"Call it with one parameter, `{CUSTOM_PARAMETER}`: the whole input as text."
    if tool.format is not None and tool.format.definition:
        usage += f" The text has to match this {tool.format.syntax or 'grammar'}:\n{tool.format.definition}"
    parameters = {
        "type": "object",
        "properties": {CUSTOM_PARAMETER: {"type": "string"}},
        "required": [CUSTOM_PARAMETER],
        "additionalProperties": False,
    }
    return Tool(tool.name, f"{tool.description or ''}\n{usage}".strip(), parameters)


def _tool_choice(
    choice: str | dict[str, Any] | None, offered: Mapping[str, Tool]
) -> tuple[Literal["auto", "none", "required", "named"], tuple[str, ...]]:
    if choice is None or choice == "auto":
        return "auto", ()
    if choice == "none":
        return "none", ()
    reference = ToolReference(type="allowed_tools", mode="required")
    chosen = tuple(offered)
    if isinstance(choice, dict):
        reference = _validated(ToolReference, choice, "tool_choice")
        chosen = _chosen(reference, offered)
    if not chosen and reference.mode == "required":
        message = f"tool_choice: given {bounded(repr(choice), 100)}, expected tools that the model can call"
        raise ApiError(400, message, param="tool_choice")
    if reference.type != "allowed_tools":
        return "named", chosen
    if isinstance(choice, str):
        return "required", ()
    return (reference.mode, chosen) if chosen else ("none", ())


def _chosen(reference: ToolReference, offered: Mapping[str, Tool]) -> tuple[str, ...]:
    """The names, as the model is told them, of the tools that a tool_choice refers to."""
    if reference.type == "allowed_tools":
        members = (_validated(ToolReference, tool, "tool_choice.tools") for tool in reference.tools)
        return tuple(name for member in members for name in _chosen(member, offered))
    if reference.type == "namespace":
        return tuple(name for name in offered if name.startswith(_qualified("", reference.name)))
    if reference.type not in ("function", "custom"):
        return ()
    name = _qualified(reference.name or "", reference.namespace)
    if name not in offered:
        expected = bounded(f"one of {list(offered)}", 300)
        raise ApiError(400, f"tool_choice: given {name!r}, expected {expected}", param="tool_choice")
    return (name,)


def _text_of(content: str | list[ContentPart], where: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.text is None and part.refusal is None:
            message = (
                f"{where}: given a part of type {bounded(part.type, 100)!r}, expected text: no other input is taken"
            )
            raise ApiError(400, message, param=where, code="unsupported_content")
    return "".join(part.text or part.refusal or "" for part in content)


class _Turns:
    """Turns from input items: consecutive items of the assistant become one turn."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[Call] = []
        self._names: dict[str, str] = {}  # call_id -> name
        self.skipped: list[str] = []

    def add(self, turn: Turn) -> None:
        if self._reasoning or self._texts or self._calls:
            text, reasoning = "\n".join(self._texts), "\n".join(self._reasoning)
            self._turns.append(Turn("assistant", text, reasoning, tuple(self._calls)))
            self._reasoning, self._texts, self._calls = [], [], []
        self._turns.append(turn)

    def finished(self) -> tuple[Turn, ...]:
        """A chat template needs something that it can answer: without any turn of a user there is an empty one."""
        if all(turn.role == "system" for turn in self._turns) and not (self._reasoning or self._texts or self._calls):
            self._turns.append(Turn("user"))
        self.add(Turn("user"))
        return tuple(self._turns[:-1])

    def add_item(self, document: dict[str, Any], where: str) -> None:
        kind = document.get("type", "message")
        add = ITEMS.get(kind) if isinstance(kind, str) else None
        if add is not None:
            add(self, document, where)
        elif kind in SKIPPED_ITEMS:
            self.skipped.append(f"input.{kind}")
        elif kind == "item_reference":
            message = f"{where}: given an item_reference, but this server stores nothing; send the item itself"
            raise ApiError(400, message, param=where, code="previous_response_not_found")
        else:
            expected = ", ".join(ITEMS)
            message = f"{where}.type: given {bounded(repr(kind), 100)}, expected one of {expected}"
            raise ApiError(400, message, param=where)

    def _message(self, document: dict[str, Any], where: str) -> None:
        item = _validated(MessageItem, document, where)
        text = _text_of(item.content, where)
        if item.role == "assistant":
            self._texts.append(text)
        else:
            self.add(Turn("user" if item.role == "user" else "system", text))

    def _agent_message(self, document: dict[str, Any], where: str) -> None:
        self.add(Turn("user", _text_of(_validated(AgentMessageItem, document, where).content, where)))

    def _function_call(self, document: dict[str, Any], where: str) -> None:
        item = _validated(FunctionCallItem, document, where)
        self._call(item.call_id, _qualified(item.name, item.namespace), _object_or_text(item.arguments))

    def _custom_call(self, document: dict[str, Any], where: str) -> None:
        item = _validated(CustomCallItem, document, where)
        self._call(item.call_id, _qualified(item.name, item.namespace), {CUSTOM_PARAMETER: item.input})

    def _call(self, call_id: str, name: str, arguments: dict[str, Any] | str) -> None:
        self._names[call_id] = name
        self._calls.append(Call(call_id, name, arguments))

    def _output(self, document: dict[str, Any], where: str) -> None:
        item = _validated(OutputItem, document, where)
        name = self._names.get(item.call_id, "")
        self.add(Turn("tool", _text_of(item.output, f"{where}.output"), call_id=item.call_id, name=name))

    def _reasoning_item(self, document: dict[str, Any], where: str) -> None:
        item = _validated(ReasoningItem, document, where)
        text = _text_of(item.content or [], where)
        text = text or _decode_reasoning(item.encrypted_content) or _text_of(item.summary, where)
        if text:
            self._reasoning.append(text)


ITEMS: dict[str, Callable[[_Turns, dict[str, Any], str], None]] = {
    "message": _Turns._message,
    "function_call": _Turns._function_call,
    "function_call_output": _Turns._output,
    "custom_tool_call": _Turns._custom_call,
    "custom_tool_call_output": _Turns._output,
    "reasoning": _Turns._reasoning_item,
    "agent_message": _Turns._agent_message,
}


def _object_or_text(arguments: str) -> dict[str, Any] | str:
    try:
        document = from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:
        return arguments
    return document if isinstance(document, dict) else arguments


def _encode_reasoning(text: str) -> str:
    return REASONING_PREFIX + base64.b64encode(text.encode()).decode()


def _decode_reasoning(content: str | None) -> str:
    """Empty for reasoning that another server has encrypted."""
    if not content or not content.startswith(REASONING_PREFIX):
        return ""
    try:
        return base64.b64decode(content.removeprefix(REASONING_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""


@dataclass(frozen=True)
class ItemKind:
    """How items of one type are streamed."""

    id_prefix: str
    events: str  # of the deltas and of the end
    field: str  # of the end, and of an item without parts
    part: dict[str, Any] | None = None  # an empty part of the content; None: the item has no parts


ITEM_KINDS = {
    "reasoning": ItemKind("rs", "reasoning_text", "text", {"type": "reasoning_text", "text": ""}),
    "message": ItemKind(
        "msg", "output_text", "text", {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    ),
    "function_call": ItemKind("fc", "function_call_arguments", "arguments"),
    "custom_tool_call": ItemKind("ctc", "custom_tool_call_input", "input"),
}


class _Item:
    """An item of the output that is being generated."""

    def __init__(self, kind: str, fields: dict[str, Any]) -> None:
        self.kind = ITEM_KINDS[kind]
        item_id = f"{self.kind.id_prefix}_{uuid.uuid4().hex}"
        self.document = {"type": kind, "id": item_id, "status": "in_progress", **fields}
        self.text = ""  # of the content, the arguments or the input
        self.arguments = ""  # of a custom tool's call, as the model generates them

    def add_arguments(self, text: str) -> str:
        """The next piece of a function's arguments; or of a custom tool's input, which is a string in them."""
        if self.document["type"] == "function_call":
            return text
        self.arguments += text
        known = from_json(self.arguments, allow_partial="trailing-strings")
        return self._rest_of(known.get(CUSTOM_PARAMETER, "")) if isinstance(known, dict) else ""

    def last_arguments(self, arguments: str) -> str:
        is_function = self.document["type"] == "function_call"
        return self._rest_of(arguments if is_function else _custom_input(arguments))

    def _rest_of(self, whole: Any) -> str:
        return whole[len(self.text) :] if isinstance(whole, str) and whole.startswith(self.text) else ""


def _custom_input(arguments: str) -> str:
    """The one string in a call's arguments, whatever the model calls it; the arguments as they are if there is none."""
    document = _object_or_text(arguments)
    if not isinstance(document, dict):
        return arguments
    texts = [value for value in document.values() if isinstance(value, str)]
    given = document.get(CUSTOM_PARAMETER)
    return given if isinstance(given, str) else texts[0] if len(texts) == 1 else arguments


class ResponsesEmitter:
    """The answer of one request. One item is open at a time, and is closed when the next one begins or the answer
    ends: only then it is known whether it is complete."""

    def __init__(self, head: AnswerHead) -> None:
        self._head, self._echo = head, head.echo
        self._id = f"resp_{head.request_id.removeprefix('req_')}"
        self._created = int(time.time())
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._item: _Item | None = None
        self._reason = "stop"

    def begin(self) -> list[str]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._response("in_progress")) for kind in kinds]

    def ping(self) -> str:
        """Codex counts events only: comments do not keep it from ending a stream after five minutes."""
        return self._event("response.in_progress", response=self._response("in_progress"))

    def event(self, choice: int, event: AnswerEvent) -> list[str]:
        match event:
            case ReasoningDelta(text=text):
                return [*self._region("reasoning", {"summary": [], "content": []}), *self._delta(text)]
            case TextDelta(text=text):
                return [*self._region("message", {"role": "assistant", "content": []}), *self._delta(text)]
            case CallBegin(name=name, id=call_id):
                called = {"type": "function", "name": name} | self._echo["names"].get(name, {})
                kind = f"{called.pop('type')}_call".replace("custom_", "custom_tool_")
                fields = {"call_id": call_id, **called, ITEM_KINDS[kind].field: ""}
                return [*self._close("completed"), *self._open(kind, fields)]
            case CallArguments(text=text) if self._item:
                return [*self._delta(self._item.add_arguments(text))]
            case CallEnd(arguments=arguments) if self._item:
                return [*self._delta(self._item.last_arguments(arguments))]
        return []

    def finish(self, choice: int, finish: Finish) -> list[str]:
        self._reason = finish.reason
        return [*self._close("incomplete" if finish.reason == "length" else "completed")]

    def end(self, usage: Usage) -> list[str]:
        document = self.document(usage)
        return [self._event(f"response.{document['status']}", response=document)]

    def fail(self, error: ApiError) -> list[str]:
        fallback = "invalid_prompt" if error.status < 500 else "server_error"
        known = error.code if error.code == "context_length_exceeded" else None
        code = known or ERROR_CODES.get(error.status, fallback)
        failure = {"code": code, "message": str(error)}
        return [self._event("response.failed", response={**self._response("failed"), "error": failure})]

    def document(self, usage: Usage) -> dict[str, Any]:
        incomplete = self._reason == "length"
        return {
            **self._response("incomplete" if incomplete else "completed"),
            "completed_at": None if incomplete else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._head.model,
            "output": list(self._output),
            "usage": None,
            **self._echo["response"],
        }

    def _region(self, kind: str, fields: dict[str, Any]) -> Iterator[str]:
        """Before a piece of text: its item is open."""
        if self._item is None or self._item.document["type"] != kind:
            yield from self._close("completed")
            yield from self._open(kind, fields)

    def _open(self, kind: str, fields: dict[str, Any]) -> Iterator[str]:
        self._item = item = _Item(kind, fields)
        yield self._event("response.output_item.added", output_index=len(self._output), item=item.document)
        if item.kind.part:
            yield self._item_event("response.content_part.added", part=item.kind.part)

    def _delta(self, text: str) -> Iterator[str]:
        if self._item is not None and text:
            self._item.text += text
            scores = {"logprobs": []} if self._item.kind.events == "output_text" else {}
            yield self._item_event(f"response.{self._item.kind.events}.delta", delta=text, **scores)

    def _close(self, status: str) -> Iterator[str]:
        if self._item is None:
            return
        item, kind = self._item.document, self._item.kind
        done = {kind.field: self._item.text}
        if kind.part:
            part = kind.part | done
            scores = {"logprobs": []} if kind.events == "output_text" else {}
            yield self._item_event(f"response.{kind.events}.done", **done, **scores)
            yield self._item_event("response.content_part.done", part=part)
            item["content"] = [part]
        else:
            name = {"name": item["name"]} if kind.events == "function_call_arguments" else {}
            yield self._item_event(f"response.{kind.events}.done", **done, **name)
            item |= done
        item["status"] = status
        if item["type"] == "reasoning" and self._echo["encrypted_reasoning"]:
            item["encrypted_content"] = _encode_reasoning(self._item.text)
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._item = None

    def _item_event(self, kind: str, **fields: Any) -> str:
        assert self._item is not None
        index = {"content_index": 0} if self._item.kind.part else {}
        return self._event(kind, item_id=self._item.document["id"], output_index=len(self._output), **index, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        document = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return f"event: {kind}\ndata: {json.dumps(document, ensure_ascii=False)}\n\n"


def _count_document(tokens: int) -> dict[str, Any]:
    return {"object": "response.input_tokens", "input_tokens": tokens}


RESPONSES = Door("responses", "/v1/responses", parse, ResponsesEmitter, ApiError.to_json)
