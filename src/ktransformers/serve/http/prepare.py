"""From the bytes of a request to what the engine needs: JSON parsed and validated, limits checked, the chat template
rendered, prompts tokenised, a schema checked against its limits. What it compiles to is the pool's concern.

All of it is a pure function of the body, the tokenizer and `PrepareSettings`, and any part of it may be slow for a body
that was made to be slow. The server therefore runs it in worker processes (`prepare_pool`, `prepare_worker`), where it
can be ended; `kt run` calls it in its own process. Nothing here imports torch: a worker starts in half the time and a
third of the memory without it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ktransformers.serve.http.error import ApiError
from ktransformers.serve.http.grammar_source import GrammarSource
from ktransformers.serve.http.limits import (
    MAX_SCHEMA_CHARACTERS,
    MAX_SCORES,
    RequestLimits,
    check_count,
    check_schema,
    too_many_tokens,
)
from ktransformers.serve.http.protocol import ChatRequest, CommonRequest, CompletionRequest, Message, ToolChoice
from ktransformers.serve.http.tools import CALL_OPEN, call_schema, parameter_types

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
GIVEN_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
IMAGE_PARTS = {"image", "image_url", "input_image"}

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True)
class PrepareSettings:
    """What preparation depends on besides the tokenizer."""

    vocabulary: int  # rows of the embedding
    max_sequence_tokens: int
    eos: tuple[int, ...] = ()
    template: str = ""  # in place of the tokenizer's
    limits: RequestLimits = RequestLimits()  # noqa: RUF009 (frozen)


@dataclass(frozen=True)
class ModelTemplate:
    """A chat template, and the special tokens that it is rendered with where they are not the tokenizer's."""

    text: str  # Jinja; empty: the tokenizer's, which may have a second one for tools
    special_tokens: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token


@dataclass(frozen=True)
class TokenizedPrompt:
    text: str | None  # None: the prompt was given as tokens, or is not echoed
    tokens: tuple[int, ...]
    offsets: tuple[int, ...] | None = None  # of each token in the text


@dataclass(frozen=True)
class PreparedRequest:
    """A valid request in the words of the engine; `serve/http/service.py` adds the adapter and the defaults."""

    model: str
    prompts: tuple[TokenizedPrompt, ...]
    max_tokens: int
    n: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: int | None = None  # alternatives per token
    echo: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)  # settings that the request gives
    logit_bias: dict[str, float] = field(default_factory=dict)
    stop_strings: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    keep_special: bool = False
    grammar: GrammarSource | None = None  # that the response has to follow
    parses_calls: bool = False
    bare_call: bool = False  # the response is one tool call in JSON and nothing else
    parameter_types: dict[str, dict[str, str]] = field(default_factory=dict)  # function -> parameter -> JSON type
    is_chat: bool = False
    return_token_ids: bool = False


def parse_body(body: bytes | bytearray, kind: type[Body]) -> Body:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ApiError(400, f"{name}: given an unknown field", param=name) from error
        raise ApiError(400, f"{name or 'body'}: {first['msg']}", param=name or None) from error


class RequestPreparer:
    def __init__(self, tokenizer: Any, settings: PrepareSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._longest_token = max((len(token) for token in tokenizer.get_vocab()), default=1)
        self._reserved = set(inspect.signature(type(tokenizer).apply_chat_template).parameters)
        added = tokenizer.added_tokens_decoder.values()
        # llguidance reads the text of these inside a schema as the token itself, which no JSON can contain.
        self._special = [
            token.content
            for token in added
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        ]

    def prepare(self, kind: str, body: bytes | bytearray, templates: Mapping[str, ModelTemplate]) -> PreparedRequest:
        """`kind`: chat or completion; `templates`: chat templates by model name, of adapters that have their own."""
        if kind == "chat":
            return self.chat(parse_body(body, ChatRequest), templates)
        return self.completion(parse_body(body, CompletionRequest))

    def completion(self, request: CompletionRequest) -> PreparedRequest:
        max_tokens = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        echo = bool(request.echo)
        prompts = self._tokenize_prompts(request.prompt, max_tokens, echo)
        if echo and request.logprobs is not None:
            scores = sum(len(prompt.tokens) for prompt in prompts) * (request.logprobs + 1)
            if scores > MAX_SCORES:
                message = f"logprobs: given {scores} of the prompts' tokens, expected at most {MAX_SCORES} in a request"
                raise ApiError(400, message, param="logprobs")
        return self._prepared(request, prompts, max_tokens, request.logprobs, self._schema(request), echo=echo)

    def chat(self, request: ChatRequest, templates: Mapping[str, ModelTemplate]) -> PreparedRequest:
        limits = self._settings.limits
        check_count("messages", len(request.messages), limits.max_messages, "max-messages")
        check_count("tools", len(request.tools or ()), limits.max_tools, "max-tools")
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "top_logprobs: given without logprobs, expected logprobs: true", param="top_logprobs")
        template = templates.get(request.model) or ModelTemplate(self._settings.template)
        text = template.text or str(self._tokenizer.chat_template or "")
        if not text:
            raise ApiError(400, "messages: given to a model without a chat template; use /v1/completions")
        tools, schema = self._template_tools(request, text)
        max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        prompt = self._render_prompt(request, tools, template, max_tokens)
        if max_tokens is None:
            max_tokens = max(1, self._settings.max_sequence_tokens - len(prompt.tokens))
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        bare_call = schema is not None
        return self._prepared(
            request,
            [prompt],
            max_tokens,
            logprobs,
            schema if bare_call else self._schema(request),
            bare_call=bare_call,
            parses_calls=bool(tools) and not bare_call and CALL_OPEN in text,
            is_chat=True,
            return_token_ids=request.return_token_ids,
            parameter_types=parameter_types(tools),
        )

    def _prepared(
        self,
        request: CommonRequest,
        prompts: list[TokenizedPrompt],
        max_tokens: int,
        logprobs: int | None,
        schema: Any,
        *,
        echo: bool = False,
        bare_call: bool = False,
        parses_calls: bool = False,
        parameter_types: dict[str, dict[str, str]] | None = None,
        is_chat: bool = False,
        return_token_ids: bool = False,
    ) -> PreparedRequest:
        for prompt in prompts:
            self._check_length(len(prompt.tokens), max_tokens)
        bias = request.logit_bias or {}
        for token in bias:
            if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < self._settings.vocabulary):
                raise ApiError(400, f"logit_bias: given {token!r}, expected a token's number", param="logit_bias")
        return PreparedRequest(
            model=request.model,
            prompts=tuple(prompts),
            max_tokens=max_tokens,
            n=request.n or 1,
            stream=bool(request.stream),
            usage_in_stream=request.usage_in_stream,
            logprobs=None if logprobs is None else min(logprobs, self._settings.vocabulary),
            echo=echo,
            sampling={name: value for name in GIVEN_SAMPLING if (value := getattr(request, name)) is not None},
            logit_bias=bias,
            stop_strings=request.stop_strings(),
            stop_tokens=tuple(request.stop_token_ids or ()),
            ignore_eos=request.ignore_eos,
            keep_special=not request.skip_special_tokens,
            grammar=None if schema is None else self._schema_grammar(schema),
            parses_calls=parses_calls,
            bare_call=bare_call,
            parameter_types=(parameter_types or {}) if parses_calls else {},
            is_chat=is_chat,
            return_token_ids=return_token_ids,
        )

    def _tokenize_prompts(self, prompt: Any, max_tokens: int, echo: bool) -> list[TokenizedPrompt]:
        if isinstance(prompt, str):
            return [self._encode(prompt, max_tokens, echo=echo)]
        if not prompt:
            raise ApiError(400, "prompt: given an empty list, expected text or tokens", param="prompt")
        if isinstance(prompt[0], int):
            return [self._token_prompt(prompt)]
        check_count("prompt", len(prompt), self._settings.limits.max_prompts, "max-prompts")
        encode: Callable[[Any], TokenizedPrompt] = (
            (lambda text: self._encode(text, max_tokens, echo=echo))
            if isinstance(prompt[0], str)
            else self._token_prompt
        )
        return [encode(entry) for entry in prompt]

    def _encode(self, text: str, max_tokens: int, *, special: bool = True, echo: bool = False) -> TokenizedPrompt:
        limit = self._settings.max_sequence_tokens - max_tokens
        if limit < 0:
            self._check_length(0, max_tokens)
        try:
            if too_many_tokens(text, limit, self._longest_token, self._count_tokens):
                raise self._too_long(f"more than {limit}", max_tokens)
            offsets_wanted = echo and self._tokenizer.is_fast
            encoding = self._tokenizer(text, add_special_tokens=special, return_offsets_mapping=offsets_wanted)
        except (UnicodeError, TypeError) as error:
            raise ApiError(400, f"prompt: given text that is no Unicode ({error})", param="prompt") from error
        shown = text if echo else None
        if not encoding["input_ids"]:
            return TokenizedPrompt(shown, (self._empty_prompt_token(),), (0,))
        offsets = encoding.get("offset_mapping")
        starts = tuple(first for first, _ in offsets) if offsets else None
        return TokenizedPrompt(shown, tuple(encoding["input_ids"]), starts)

    def _count_tokens(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _empty_prompt_token(self) -> int:
        """The token that stands for an empty prompt."""
        for token in (self._tokenizer.bos_token_id, *self._settings.eos):
            if token is not None:
                return int(token)
        raise ApiError(400, "prompt: given nothing, expected at least one token", param="prompt")

    def _token_prompt(self, tokens: list[int]) -> TokenizedPrompt:
        vocabulary = self._settings.vocabulary
        if tokens and max(tokens) >= vocabulary:
            message = f"prompt: given token {max(tokens)}, expected less than {vocabulary}"
            raise ApiError(400, message, param="prompt")
        return TokenizedPrompt(None, tuple(tokens) or (self._empty_prompt_token(),))

    def _check_length(self, tokens: int, max_tokens: int) -> None:
        if tokens + max_tokens > self._settings.max_sequence_tokens:
            raise self._too_long(str(tokens), max_tokens)

    def _too_long(self, tokens: str, max_tokens: int) -> ApiError:
        limit = self._settings.max_sequence_tokens
        message = f"the prompt has {tokens} tokens and {max_tokens} are asked for; {limit} is the limit"
        return ApiError(400, message, param="max_tokens", code="context_length_exceeded")

    def _schema(self, request: CommonRequest) -> Any:
        """The JSON schema that response_format asks for; None: none."""
        response_format = request.response_format
        if response_format is None or response_format.type == "text":
            return None
        if response_format.type == "json_object":
            return {"type": "object"}
        if response_format.json_schema is None or response_format.json_schema.schema_ is None:
            raise ApiError(
                400, "response_format: given no schema, expected json_schema.schema", param="response_format"
            )
        return response_format.json_schema.schema_

    def _schema_grammar(self, schema: Any) -> GrammarSource:
        check_schema("response_format", schema, self._settings.limits)
        text = json.dumps(schema, sort_keys=True)
        if len(text) > MAX_SCHEMA_CHARACTERS:
            message = f"response_format: given a schema of {len(text)} characters, expected {MAX_SCHEMA_CHARACTERS}"
            raise ApiError(400, f"{message} at most", param="response_format")
        plain = json.dumps(schema, ensure_ascii=False)
        for token in self._special:
            if token in plain:
                message = f"response_format or tools: given {token!r} in a schema, expected no text of a special token"
                raise ApiError(400, message, param="response_format")
        return GrammarSource("json_schema", text)

    def _template_tools(self, request: ChatRequest, template: str) -> tuple[list[dict[str, Any]], Any]:
        """(tools for the chat template, JSON schema of the response if it has to be a tool call)."""
        choice = request.tool_choice
        if not request.tools:
            if choice not in (None, "none", "auto"):
                raise ApiError(400, "tool_choice: given without tools, expected tools", param="tool_choice")
            return [], None
        for tool in request.tools:
            check_schema("tools", tool.function.parameters, self._settings.limits)
        if choice == "none":
            return [], None
        if "tools" not in template:
            raise ApiError(400, "tools: given to a model whose chat template does not support them", param="tools")
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        if isinstance(choice, ToolChoice):
            names = [tool["function"]["name"] for tool in tools]
            if choice.function.name not in names:
                raise ApiError(400, f"tool_choice: given {choice.function.name!r}, expected one of {names}")
            return tools, call_schema(tools, choice.function.name)
        return tools, call_schema(tools, None) if choice == "required" else None

    def _render_prompt(
        self, request: ChatRequest, tools: list[dict[str, Any]], template: ModelTemplate, max_tokens: int | None
    ) -> TokenizedPrompt:
        template_kwargs = request.chat_template_kwargs or {}
        if self._reserved & set(template_kwargs):
            clash = sorted(self._reserved & set(template_kwargs))[0]
            raise ApiError(400, f"chat_template_kwargs: given {clash!r}, expected the template's own variables")
        messages = [_template_message(message) for message in request.messages]
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=template.text or None,
                add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
                continue_final_message=request.continue_final_message,
                tokenize=False,
                **template.special_tokens | template_kwargs,
            )
        except Exception as error:  # a template may raise anything
            message = f"messages: the model's chat template refuses them ({type(error).__name__}: {error})"
            raise ApiError(400, message, param="messages") from error
        return self._encode(text, 1 if max_tokens is None else max_tokens, special=False)


def _template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it: one string of text, arguments of tool calls as objects."""
    document = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        for part in message.content:
            if part.type in IMAGE_PARTS:
                given = f"messages: given an image ({part.type}), expected text: this server takes no images"
                raise ApiError(400, given, param="messages", code="unsupported_content")
            if part.text is None:
                given = f"messages: given a part of type {part.type!r}, expected text"
                raise ApiError(400, given, param="messages", code="unsupported_content")
        document["content"] = "".join(part.text or "" for part in message.content)
    document.setdefault("content", "")
    if document["role"] == "developer":  # OpenAI's newer name, which templates do not know
        document["role"] = "system"
    for call in document.get("tool_calls", []):
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                call["function"]["arguments"] = json.loads(arguments)
            except (ValueError, RecursionError):
                continue
    return document
