"""OpenAI's Chat Completions, with the fields that vLLM, SGLang, DeepSeek, Qwen and OpenRouter add for reasoning.

Reasoning is `reasoning_content` in messages and deltas, which every client reads that shows reasoning at all; in a
request's history `reasoning` is read as well. A request with the old `functions` is answered with `function_call`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

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
from ktransformers.serve.doors.conversation import (
    Call,
    ChatRequest,
    Conversation,
    Reasoning,
    Role,
    Tool,
    ToolChoice,
    Turn,
)
from ktransformers.serve.doors.door import AnswerHead, Door
from ktransformers.serve.doors.fields import Name
from ktransformers.serve.doors.template_messages import read_arguments
from ktransformers.serve.http.error import ApiError
from ktransformers.serve.http.json_slices import SSE_DONE, sse_event
from ktransformers.serve.http.protocol import (
    MAX_TOP_LOGPROBS,
    CommonRequest,
    Identifier,
    MaxTokens,
    OpenModel,
    parse_body,
)

IMAGE_PARTS = {"image", "image_url", "input_image"}
Budget = Annotated[int, Field(ge=-1, le=2**31)]


class ChatPart(OpenModel):
    type: str
    text: str | None = None


class CalledFunction(OpenModel):
    name: str
    arguments: str | dict[str, Any] | None = None


class CalledTool(OpenModel):
    id: str | None = None
    function: CalledFunction


class ChatMessage(OpenModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ChatPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CalledTool] | None = None
    function_call: CalledFunction | None = None  # of a client that sends `functions`
    tool_call_id: str | None = None
    name: str | None = None


class OfferedFunction(OpenModel):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OfferedTool(OpenModel):
    type: Literal["function"]
    function: OfferedFunction


class NamedFunction(OpenModel):
    name: str


class NamedTool(OpenModel):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(OpenModel):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedToolsChoice(OpenModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ThinkingSwitch(OpenModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Budget | None = None


class ReasoningSwitch(OpenModel):
    enabled: bool | None = None
    effort: str | None = None
    max_tokens: Budget | None = None


class ChatBody(CommonRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[OfferedTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[OfferedFunction], Field(fail_fast=True)] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_ids: bool = False  # vLLM's: the rendered prompt as `prompt_token_ids`
    reasoning_effort: str | None = None
    reasoning: ReasoningSwitch | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None
    thinking_budget: Budget | None = None
    # OpenAI's, accepted without effect
    modalities: list[str] | None = None
    verbosity: str | None = None
    prompt_cache_key: Identifier | None = None
    safety_identifier: Identifier | None = None


def parse(body: bytes | bytearray) -> ChatRequest:
    request, ignored = parse_body(body, ChatBody)
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs: given without logprobs, expected logprobs: true", param="top_logprobs")
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    offered = [tool.function for tool in request.tools or ()] or list(request.functions or ())
    choice, chosen = _tool_choice(request)
    conversation = Conversation(
        turns=tuple(_turn(message) for message in request.messages),
        tools=tuple(offered_tool(function) for function in offered),
        tool_choice=choice,
        chosen_tools=chosen,
        parallel_calls=request.parallel_tool_calls is not False and not request.functions,
        reasoning=_reasoning(request),
        template_kwargs=request.chat_template_kwargs or {},
        add_generation_prompt=request.add_generation_prompt,
        continue_final_turn=request.continue_final_message,
    )
    generation = request.generation(max_tokens, logprobs, return_token_ids=request.return_token_ids)
    echo = {"usage_in_stream": request.usage_in_stream, "functions": bool(request.functions and not request.tools)}
    return ChatRequest(conversation, generation, echo | {"logprobs": request.logprobs or False}, ignored)


def offered_tool(function: OfferedFunction) -> Tool:
    return Tool.of(function.name, function.description, function.parameters, function.strict)


def _tool_choice(request: ChatBody) -> tuple[ToolChoice, tuple[str, ...]]:
    choice = request.tool_choice
    if choice is None and request.function_call is not None:
        called = request.function_call
        return (called, ()) if isinstance(called, str) else ("named", (called.name,))
    if isinstance(choice, NamedTool):
        return "named", (choice.function.name,)
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        return allowed.mode, tuple(tool.function.name for tool in allowed.tools)
    return choice or "auto", ()


def _reasoning(request: ChatBody) -> Reasoning:
    """What the request says in any of its ways, those of its own fields before those of template variables."""
    variables = request.chat_template_kwargs or {}
    settings, switch = request.reasoning or ReasoningSwitch(), request.thinking
    by_type = None if not isinstance(switch, ThinkingSwitch) or switch.type == "adaptive" else switch.type == "enabled"
    effort = next(
        (one for one in (request.reasoning_effort, settings.effort, variables.get("reasoning_effort")) if one), None
    )
    budgets = (
        request.thinking_budget,
        switch.budget_tokens if isinstance(switch, ThinkingSwitch) else None,
        settings.max_tokens,
        variables.get("thinking_budget"),
    )
    budget = next((one for one in budgets if isinstance(one, int) and one >= 0), None)
    switches = (
        request.enable_thinking,
        switch if isinstance(switch, bool) else by_type,
        settings.enabled,
        variables.get("enable_thinking"),
        variables.get("thinking"),
        None if effort is None else effort != "none",
        None if budget is None else budget > 0,
    )
    enabled = next((one for one in switches if isinstance(one, bool)), None)
    return Reasoning(enabled, effort if isinstance(effort, str) else None, budget)


def _turn(message: ChatMessage) -> Turn:
    # Developer is OpenAI's newer name of system, which templates do not know.
    roles: dict[str, Role] = {"developer": "system", "function": "tool"}
    calls = [(call.id or "", call.function) for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append(("", message.function_call))
    return Turn(
        role=roles.get(message.role, message.role),  # type: ignore[arg-type]
        text=_text(message.content),
        reasoning=message.reasoning_content or message.reasoning or "",
        calls=tuple(Call(call_id, called.name, read_arguments(called.arguments)) for call_id, called in calls),
        call_id=message.tool_call_id or "",
        name=message.name or "",
        extra={name: value for name, value in (message.model_extra or {}).items() if value is not None},
    )


def _text(content: str | list[ChatPart] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if part.type in IMAGE_PARTS:
            given = f"messages: given an image ({part.type}), expected text: this server takes no images"
            raise ApiError(400, given, param="messages", code="unsupported_content")
        if part.text is None:
            given = f"messages: given a part of type {part.type!r}, expected text"
            raise ApiError(400, given, param="messages", code="unsupported_content")
    return "".join(part.text or "" for part in content)


class ChatChoice:
    """What one choice has said so far, as a message."""

    def __init__(self, with_logprobs: bool) -> None:
        self.text, self.reasoning = "", ""
        self.calls: list[dict[str, Any]] = []
        self.scores: list[dict[str, Any]] | None = [] if with_logprobs else None
        self.unsent_scores: list[dict[str, Any]] = []
        self.finish_reason: str | None = None

    def message(self, old_functions: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text or (None if self.calls else "")}
        message["refusal"] = None
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls and old_functions:
            message["function_call"] = self.calls[0]["function"]
        elif self.calls:
            message["tool_calls"] = self.calls
        return message


class ChatEmitter:
    def __init__(self, head: AnswerHead) -> None:
        self._head, self._created = head, int(time.time())
        self._id = f"chatcmpl-{head.request_id.removeprefix('req_')}"
        self._choices = [ChatChoice(head.echo["logprobs"]) for _ in range(head.choices)]
        self._old_functions = head.echo["functions"]

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._head.model, "choices": choices}

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None = None, **fields: Any) -> str:
        choice, logprobs = self._choices[index], None
        if choice.unsent_scores:
            logprobs = {"content": choice.unsent_scores, "refusal": None}
            choice.unsent_scores = []
        entry = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self._head.echo["usage_in_stream"] else {}
        return sse_event({**self._document("chat.completion.chunk", [entry]), **usage, **fields})

    def _prompt_tokens(self) -> dict[str, Any]:
        tokens = self._head.prompt_token_ids
        return {"prompt_token_ids": list(tokens)} if tokens else {}

    def begin(self) -> Iterable[str]:
        first = {"role": "assistant", "content": ""}
        return [self._chunk(index, first, **self._prompt_tokens()) for index in range(len(self._choices))]

    def ping(self) -> str:
        return ": ping\n\n"

    def event(self, choice: int, event: AnswerEvent) -> Iterable[str]:
        state = self._choices[choice]
        match event:
            case TokenScores(content):
                assert state.scores is not None
                state.scores += content
                state.unsent_scores += content
                return []
            case TextDelta(text):
                state.text += text
                return [self._chunk(choice, {"content": text})]
            case ReasoningDelta(text):
                state.reasoning += text
                return [self._chunk(choice, {"reasoning_content": text})]
            case CallBegin(index, name, call_id):
                function = {"name": name, "arguments": ""}
                state.calls.append({"id": call_id, "type": "function", "function": function})
                return [self._call(choice, index, dict(function), id=call_id, type="function")]
            case CallArguments(index, text):
                state.calls[index]["function"]["arguments"] += text
                return [self._call(choice, index, {"arguments": text})]
            case CallEnd(index, arguments):
                state.calls[index]["function"]["arguments"] = arguments
                return []

    def _call(self, choice: int, index: int, function: dict[str, Any], **fields: str) -> str:
        if self._old_functions:
            return self._chunk(choice, {"function_call": function})
        return self._chunk(choice, {"tool_calls": [{"index": index, **fields, "function": function}]})

    def finish(self, choice: int, finish: Finish) -> Iterable[str]:
        state = self._choices[choice]
        reason = "stop" if finish.reason == "stop_string" else finish.reason
        if reason == "stop" and state.calls:
            reason = "function_call" if self._old_functions else "tool_calls"
        state.finish_reason = reason
        return [self._chunk(choice, {}, reason)]

    def end(self, usage: Usage) -> Iterable[str]:
        if self._head.echo["usage_in_stream"]:
            yield sse_event({**self._document("chat.completion.chunk", []), "usage": usage_document(usage)})
        yield SSE_DONE

    def fail(self, error: ApiError) -> Iterable[str]:
        return [sse_event(error.to_json()), SSE_DONE]

    def document(self, usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": choice.message(self._old_functions),
                "logprobs": None if choice.scores is None else {"content": choice.scores, "refusal": None},
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        document = self._document("chat.completion", choices)
        return {**document, "usage": usage_document(usage), **self._prompt_tokens()}


def usage_document(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


CHAT = Door("chat", "/v1/chat/completions", parse, ChatEmitter, ApiError.to_json, body=ChatBody)
