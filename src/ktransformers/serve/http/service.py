"""From an HTTP request to a request of the engine: names resolved, prompts rendered and tokenised, limits checked.

Sampling settings that a request omits come from the model's generation_config.json where it has them, as in vLLM and
SGLang, otherwise from OpenAI's defaults. An invalid request raises ApiError here, before it is queued.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ktransformers.errors import InputError, KTError
from ktransformers.serve.engine.engine import ServeEngine
from ktransformers.serve.engine.lora import LoadedAdapter
from ktransformers.serve.engine.sampling import Sampling
from ktransformers.serve.engine.sequence import GenerationRequest
from ktransformers.serve.http.grammar import GrammarCompiler
from ktransformers.serve.http.protocol import ChatRequest, CommonRequest, CompletionRequest, Message, ToolChoice
from ktransformers.serve.http.registry import Registry, UnknownModel
from ktransformers.serve.http.tools import CALL_OPEN, call_schema

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


class ApiError(KTError):
    """An error response in OpenAI's envelope."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def kind(self) -> str:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def to_json(self) -> dict[str, Any]:
        text = str(self).encode("utf-8", "replace").decode()
        return {"error": {"message": text, "type": self.kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class TokenizedPrompt:
    text: str | None  # None: the prompt was given as tokens
    tokens: tuple[int, ...]
    offsets: tuple[int, ...] | None = None  # of each token in the text


@dataclass(frozen=True)
class PreparedChat:
    request: GenerationRequest
    tools: tuple[dict[str, Any], ...]
    bare_call: bool  # the response is one tool call in JSON and nothing else


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling settings and end tokens of generation_config.json."""

    sampling: Sampling
    eos: frozenset[int]

    @classmethod
    def of(cls, config: Any, tokenizer: Any) -> GenerationDefaults:
        settings = {} if config is None else config.to_diff_dict()
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        values = {name: settings[name] for name in names if settings.get(name) is not None}
        eos = getattr(config, "eos_token_id", None)
        end_tokens = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
        return cls(Sampling(**values), frozenset(int(token) for token in end_tokens))


class Service:
    def __init__(
        self,
        engine: ServeEngine,
        registry: Registry,
        tokenizer: Any,
        *,
        timeout: float | None = None,
        template: str = "",
        kv_bytes_per_token: int = 0,
    ) -> None:
        self.engine, self.registry, self.tokenizer, self.timeout = engine, registry, tokenizer, timeout
        self.vocabulary = int(engine.forward.model.get_input_embeddings().weight.shape[0])
        self.defaults = GenerationDefaults.of(getattr(engine.forward.model, "generation_config", None), tokenizer)
        self.grammar_compiler = GrammarCompiler(tokenizer, self.vocabulary)
        self._template = template or None
        self.kv_bytes_per_token = kv_bytes_per_token  # of keys and values
        self.approximations: dict[str, int] = {}  # name -> value of settings that change results
        self.placement: Any = None  # ServedPlacement; writes the counts of routed tokens at the end

    @property
    def max_sequence_tokens(self) -> int:
        return min(self.engine.limits.context_length, self.engine.limits.max_total_tokens)

    def find(self, name: str) -> LoadedAdapter | None:
        try:
            return self.registry.find(name)
        except UnknownModel as error:
            raise ApiError(404, str(error), param="model", code="model_not_found") from error

    def template_of(self, adapter: LoadedAdapter | None) -> str | None:
        """The chat template of requests to this adapter, or to the base."""
        if adapter is not None and adapter.template is not None:
            return adapter.template.text
        return self._template or self.tokenizer.chat_template

    def template_origin(self, adapter: LoadedAdapter) -> str:
        """`adapter` if it is rendered otherwise than the base is, else `base`."""
        if adapter.template is None or self._template == adapter.template.text:
            return "base"
        differs = self._template is not None or adapter.template.differs_from(self.tokenizer)
        return "adapter" if differs else "base"

    def tokenize_prompts(self, prompt: str | list[str] | list[int] | list[list[int]]) -> list[TokenizedPrompt]:
        if isinstance(prompt, str):
            return [self.encode(prompt)]
        if not prompt:
            raise ApiError(400, "prompt: given an empty list, expected text or tokens", param="prompt")
        if isinstance(prompt[0], int):
            return [self._token_prompt(prompt)]
        return [self.encode(entry) if isinstance(entry, str) else self._token_prompt(entry) for entry in prompt]

    def encode(self, text: str, special: bool = True) -> TokenizedPrompt:
        try:
            encoding = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=self.tokenizer.is_fast)
        except (UnicodeError, TypeError) as error:
            raise ApiError(400, f"prompt: given text that is no Unicode ({error})", param="prompt") from error
        offsets = encoding.get("offset_mapping")
        if not encoding["input_ids"]:
            return TokenizedPrompt(text, (self._empty_prompt_token(),), (0,))
        return TokenizedPrompt(
            text, tuple(encoding["input_ids"]), tuple(first for first, _ in offsets) if offsets else None
        )

    def _empty_prompt_token(self) -> int:
        """The token that stands for an empty prompt."""
        for token in (self.tokenizer.bos_token_id, *sorted(self.defaults.eos)):
            if token is not None:
                return int(token)
        raise ApiError(400, "prompt: given nothing, expected at least one token", param="prompt")

    def _token_prompt(self, tokens: Any) -> TokenizedPrompt:
        out_of_range = [token for token in tokens if token >= self.vocabulary]
        if out_of_range:
            raise ApiError(
                400, f"prompt: given token {out_of_range[0]}, expected less than {self.vocabulary}", param="prompt"
            )
        return TokenizedPrompt(None, tuple(tokens) or (self._empty_prompt_token(),))

    def completion(self, request: CompletionRequest, prompt: TokenizedPrompt) -> GenerationRequest:
        max_tokens = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        return self._generation_request(
            request,
            prompt.tokens,
            max_tokens,
            request.logprobs,
            prompt_logprobs=bool(request.echo and request.logprobs is not None),
        )

    def chat(self, request: ChatRequest) -> PreparedChat:
        adapter = self.find(request.model)
        tools, schema = self._template_tools(request, adapter)
        prompt = self._render_prompt(request, tools, adapter)
        max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        if max_tokens is None:
            max_tokens = max(1, self.max_sequence_tokens - len(prompt))
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "top_logprobs: given without logprobs, expected logprobs: true", param="top_logprobs")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        generation = self._generation_request(
            request, prompt, max_tokens, logprobs, prompt_logprobs=False, schema=schema
        )
        if adapter is not None and adapter.template is not None and not request.ignore_eos:
            generation = replace(
                generation,
                stop_tokens=generation.stop_tokens | adapter.template.stop_tokens,
                stop_strings=generation.stop_strings + adapter.template.stop_strings,
            )
        return PreparedChat(generation, tuple(tools), schema is not None)

    def _generation_request(
        self,
        request: CommonRequest,
        prompt: Sequence[int],
        max_tokens: int,
        logprobs: int | None,
        *,
        prompt_logprobs: bool,
        schema: Any = None,
    ) -> GenerationRequest:
        if len(prompt) + max_tokens > self.max_sequence_tokens:
            limit = self.max_sequence_tokens
            message = f"the prompt has {len(prompt)} tokens and {max_tokens} are asked for; {limit} is the limit"
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
        response_format = request.response_format
        if schema is None and response_format is not None and response_format.type != "text":
            schema = {"type": "object"} if response_format.type == "json_object" else self._schema(request)
        try:
            grammar = None if schema is None else self.grammar_compiler.compile(schema)
        except InputError as error:
            raise ApiError(400, str(error), param="response_format") from error
        stop_tokens = frozenset() if request.ignore_eos else self.defaults.eos
        return GenerationRequest(
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=self._sampling(request),
            adapter=self.find(request.model),
            stop_strings=request.stop_strings(),
            stop_tokens=stop_tokens | frozenset(request.stop_token_ids or ()),
            keep_special=not request.skip_special_tokens,
            logprobs=None if logprobs is None else min(logprobs, self.vocabulary),
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            deadline=None if self.timeout is None else time.monotonic() + self.timeout,
        )

    def _schema(self, request: CommonRequest) -> Any:
        response_format = request.response_format
        if (
            response_format is None
            or response_format.json_schema is None
            or response_format.json_schema.schema_ is None
        ):
            raise ApiError(
                400, "response_format: given no schema, expected json_schema.schema", param="response_format"
            )
        return response_format.json_schema.schema_

    def _sampling(self, request: CommonRequest) -> Sampling:
        defaults = self.defaults.sampling
        bias: dict[int, float] = {}
        for token, value in (request.logit_bias or {}).items():
            if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < self.vocabulary):
                raise ApiError(400, f"logit_bias: given {token!r}, expected a token's number", param="logit_bias")
            bias[int(token)] = value

        def setting(name: str) -> Any:
            given = getattr(request, name)
            return getattr(defaults, name) if given is None else given

        return Sampling(
            temperature=setting("temperature"),
            top_p=setting("top_p"),
            top_k=max(0, setting("top_k")),
            min_p=setting("min_p"),
            repetition_penalty=setting("repetition_penalty"),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=bias,
            seed=request.seed,
        )

    def _template_tools(self, request: ChatRequest, adapter: LoadedAdapter | None) -> tuple[list[dict[str, Any]], Any]:
        """(tools for the chat template, JSON schema of the response if it has to be a tool call)."""
        choice = request.tool_choice
        if not request.tools:
            if choice not in (None, "none", "auto"):
                raise ApiError(400, "tool_choice: given without tools, expected tools", param="tool_choice")
            return [], None
        if choice == "none":
            return [], None
        if "tools" not in str(self.template_of(adapter)):
            raise ApiError(400, "tools: given to a model whose chat template does not support them", param="tools")
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        if isinstance(choice, ToolChoice):
            names = [tool["function"]["name"] for tool in tools]
            if choice.function.name not in names:
                raise ApiError(400, f"tool_choice: given {choice.function.name!r}, expected one of {names}")
            return tools, call_schema(tools, choice.function.name)
        return tools, call_schema(tools, None) if choice == "required" else None

    def parses_calls(self, chat: PreparedChat) -> bool:
        return bool(chat.tools) and not chat.bare_call and CALL_OPEN in str(self.template_of(chat.request.adapter))

    def _render_prompt(
        self, request: ChatRequest, tools: list[dict[str, Any]], adapter: LoadedAdapter | None
    ) -> tuple[int, ...]:
        own = None if adapter is None else adapter.template
        if not self.template_of(adapter):
            raise ApiError(400, "messages: given to a model without a chat template; use /v1/completions")
        template_kwargs = request.chat_template_kwargs or {}
        reserved = set(inspect.signature(type(self.tokenizer).apply_chat_template).parameters)
        if reserved & set(template_kwargs):
            clash = sorted(reserved & set(template_kwargs))[0]
            raise ApiError(400, f"chat_template_kwargs: given {clash!r}, expected the template's own variables")
        try:
            text = self.tokenizer.apply_chat_template(
                [_template_message(message) for message in request.messages],
                tools=tools or None,
                chat_template=self._template if own is None else own.text,
                add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
                continue_final_message=request.continue_final_message,
                tokenize=False,
                **{**({} if own is None else own.special_tokens), **template_kwargs},
            )
        except Exception as error:  # a template may raise anything
            message = f"messages: the model's chat template refuses them ({type(error).__name__}: {error})"
            raise ApiError(400, message, param="messages") from error
        return self.encode(text, special=False).tokens


def _template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it: one string of text, arguments of tool calls as objects."""
    document = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        unsupported = [part.type for part in message.content if part.text is None]
        if unsupported:
            raise ApiError(400, f"messages: given a part of type {unsupported[0]!r}, expected text", param="messages")
        document["content"] = "".join(part.text or "" for part in message.content)
    document.setdefault("content", "")
    if document["role"] == "developer":  # OpenAI's newer name, which templates do not know
        document["role"] = "system"
    for call in document.get("tool_calls", []):
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                call["function"]["arguments"] = json.loads(arguments)
            except ValueError:
                continue
    return document
