"""From a request to what the engine is asked: names resolved, prompts rendered and tokenised, limits checked.

Sampling settings that a request leaves out are those of the model's generation_config.json where it has some, as vLLM
and SGLang do, otherwise OpenAI's. Whatever is wrong with a request is said here, as an ApiError, before it is queued.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ktransformers.errors import InputError, KTError
from ktransformers.serve.engine.engine import ServeEngine
from ktransformers.serve.engine.lora import LoadedAdapter
from ktransformers.serve.engine.sampling import Sampling
from ktransformers.serve.engine.sequence import GenerationRequest
from ktransformers.serve.http.grammar import Grammars
from ktransformers.serve.http.protocol import ChatRequest, CommonRequest, CompletionRequest, Message, ToolChoice
from ktransformers.serve.http.registry import Registry, UnknownModel
from ktransformers.serve.http.tools import OPEN, call_schema

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


class ApiError(KTError):
    """An answer in OpenAI's envelope."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def kind(self) -> str:
        known = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return known.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def to_json(self) -> dict[str, Any]:
        text = str(self).encode("utf-8", "replace").decode()
        return {"error": {"message": text, "type": self.kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class TokenizedPrompt:
    text: str | None  # None: it was given as tokens
    tokens: tuple[int, ...]
    offsets: tuple[int, ...] | None = None  # where each token begins in the text


@dataclass(frozen=True)
class Chat:
    ask: GenerationRequest
    tools: tuple[dict[str, Any], ...]
    bare_call: bool  # the answer is one call in JSON


@dataclass(frozen=True)
class Defaults:
    """generation_config.json's, where it has them."""

    sampling: Sampling
    eos: frozenset[int]

    @classmethod
    def of(cls, config: Any, tokenizer: Any) -> Defaults:
        given = {} if config is None else config.to_diff_dict()
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        values = {name: given[name] for name in names if given.get(name) is not None}
        eos = getattr(config, "eos_token_id", None)
        ends = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
        return cls(Sampling(**values), frozenset(int(end) for end in ends))


class Service:
    def __init__(
        self,
        engine: ServeEngine,
        registry: Registry,
        tokenizer: Any,
        *,
        timeout: float | None = None,
        template: str = "",
        per_token: int = 0,
    ) -> None:
        self.engine, self.registry, self.tokenizer, self.timeout = engine, registry, tokenizer, timeout
        self.vocabulary = int(engine.forward.model.get_input_embeddings().weight.shape[0])
        self.defaults = Defaults.of(getattr(engine.forward.model, "generation_config", None), tokenizer)
        self.grammars = Grammars(tokenizer, self.vocabulary)
        self._template = template or None
        self.per_token = per_token  # bytes of keys and values
        self.approximations: dict[str, int] = {}  # by which answers differ from the model's
        self.placement: Any = None  # of the model's experts, with counts of routed tokens where they are recorded

    @property
    def room(self) -> int:
        return min(self.engine.limits.context, self.engine.limits.tokens)

    def find(self, name: str) -> LoadedAdapter | None:
        try:
            return self.registry.find(name)
        except UnknownModel as error:
            raise ApiError(404, str(error), param="model", code="model_not_found") from error

    def prompts(self, given: str | list[str] | list[int] | list[list[int]]) -> list[TokenizedPrompt]:
        if isinstance(given, str):
            return [self.encode(given)]
        if not given:
            raise ApiError(400, "prompt: given an empty list, expected text or tokens", param="prompt")
        if isinstance(given[0], int):
            return [self._tokens(given)]
        return [self.encode(one) if isinstance(one, str) else self._tokens(one) for one in given]

    def encode(self, text: str, special: bool = True) -> TokenizedPrompt:
        try:
            made = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=self.tokenizer.is_fast)
        except (UnicodeError, TypeError) as error:
            raise ApiError(400, f"prompt: given text that is no Unicode ({error})", param="prompt") from error
        offsets = made.get("offset_mapping")
        if not made["input_ids"]:
            return TokenizedPrompt(text, (self._start(),), (0,))
        return TokenizedPrompt(
            text, tuple(made["input_ids"]), tuple(first for first, _ in offsets) if offsets else None
        )

    def _start(self) -> int:
        """What stands for an empty prompt."""
        for token in (self.tokenizer.bos_token_id, *sorted(self.defaults.eos)):
            if token is not None:
                return int(token)
        raise ApiError(400, "prompt: given nothing, expected at least one token", param="prompt")

    def _tokens(self, given: Any) -> TokenizedPrompt:
        odd = [token for token in given if token >= self.vocabulary]
        if odd:
            raise ApiError(400, f"prompt: given token {odd[0]}, expected less than {self.vocabulary}", param="prompt")
        return TokenizedPrompt(None, tuple(given) or (self._start(),))

    def completion(self, request: CompletionRequest, prompt: TokenizedPrompt) -> GenerationRequest:
        wanted = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        return self._ask(
            request,
            prompt.tokens,
            wanted,
            request.logprobs,
            prompt_logprobs=bool(request.echo and request.logprobs is not None),
        )

    def chat(self, request: ChatRequest) -> Chat:
        tools, schema = self._tools(request)
        prompt = self._render(request, tools)
        wanted = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        if wanted is None:
            wanted = max(1, self.room - len(prompt))
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "top_logprobs: given without logprobs, expected logprobs: true", param="top_logprobs")
        scores = (request.top_logprobs or 0) if request.logprobs else None
        ask = self._ask(request, prompt, wanted, scores, prompt_logprobs=False, schema=schema)
        return Chat(ask, tuple(tools), schema is not None)

    def _ask(
        self,
        request: CommonRequest,
        prompt: Sequence[int],
        max_tokens: int,
        logprobs: int | None,
        *,
        prompt_logprobs: bool,
        schema: Any = None,
    ) -> GenerationRequest:
        if len(prompt) + max_tokens > self.room:
            said = f"the prompt has {len(prompt)} tokens and {max_tokens} are asked for; {self.room} is the limit"
            raise ApiError(400, said, param="max_tokens", code="context_length_exceeded")
        form = request.response_format
        if schema is None and form is not None and form.type != "text":
            schema = {"type": "object"} if form.type == "json_object" else self._schema(request)
        try:
            grammar = None if schema is None else self.grammars.of_schema(schema)
        except InputError as error:
            raise ApiError(400, str(error), param="response_format") from error
        ends = frozenset() if request.ignore_eos else self.defaults.eos
        return GenerationRequest(
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=self._sampling(request),
            adapter=self.find(request.model),
            stops=request.stops(),
            stop_tokens=ends | frozenset(request.stop_token_ids or ()),
            keep_special=not request.skip_special_tokens,
            logprobs=None if logprobs is None else min(logprobs, self.vocabulary),
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            deadline=None if self.timeout is None else time.monotonic() + self.timeout,
        )

    def _schema(self, request: CommonRequest) -> Any:
        form = request.response_format
        if form is None or form.json_schema is None or form.json_schema.schema_ is None:
            raise ApiError(
                400, "response_format: given no schema, expected json_schema.schema", param="response_format"
            )
        return form.json_schema.schema_

    def _sampling(self, request: CommonRequest) -> Sampling:
        usual = self.defaults.sampling
        bias: dict[int, float] = {}
        for word, value in (request.logit_bias or {}).items():
            if not (word.isascii() and word.isdigit() and len(word) < 10 and int(word) < self.vocabulary):
                raise ApiError(400, f"logit_bias: given {word!r}, expected a token's number", param="logit_bias")
            bias[int(word)] = value

        def pick(name: str) -> Any:
            given = getattr(request, name)
            return getattr(usual, name) if given is None else given

        return Sampling(
            temperature=pick("temperature"),
            top_p=pick("top_p"),
            top_k=max(0, pick("top_k")),
            min_p=pick("min_p"),
            repetition_penalty=pick("repetition_penalty"),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=bias,
            seed=request.seed,
        )

    def _tools(self, request: ChatRequest) -> tuple[list[dict[str, Any]], Any]:
        """(what the template is told, schema of the answer where it has to be a call)."""
        choice = request.tool_choice
        if not request.tools:
            if choice not in (None, "none", "auto"):
                raise ApiError(400, "tool_choice: given without tools, expected tools", param="tool_choice")
            return [], None
        if choice == "none":
            return [], None
        template = self._template or self.tokenizer.chat_template
        if "tools" not in str(template):
            raise ApiError(400, "tools: given to a model whose chat template knows none", param="tools")
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        if isinstance(choice, ToolChoice):
            names = [tool["function"]["name"] for tool in tools]
            if choice.function.name not in names:
                raise ApiError(400, f"tool_choice: given {choice.function.name!r}, expected one of {names}")
            return tools, call_schema(tools, choice.function.name)
        return tools, call_schema(tools, None) if choice == "required" else None

    def reads_calls(self, chat: Chat) -> bool:
        return bool(chat.tools) and not chat.bare_call and OPEN in str(self._template or self.tokenizer.chat_template)

    def _render(self, request: ChatRequest, tools: list[dict[str, Any]]) -> tuple[int, ...]:
        if not (self._template or self.tokenizer.chat_template):
            raise ApiError(400, "messages: given to a model without a chat template; use /v1/completions")
        more = request.chat_template_kwargs or {}
        reserved = set(inspect.signature(type(self.tokenizer).apply_chat_template).parameters)
        if reserved & set(more):
            given = sorted(reserved & set(more))[0]
            raise ApiError(400, f"chat_template_kwargs: given {given!r}, expected the template's own variables")
        try:
            text = self.tokenizer.apply_chat_template(
                [_message(message) for message in request.messages],
                tools=tools or None,
                chat_template=self._template,
                add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
                continue_final_message=request.continue_final_message,
                tokenize=False,
                **more,
            )
        except Exception as error:  # templates raise what they like
            said = f"messages: the model's chat template refuses them ({type(error).__name__}: {error})"
            raise ApiError(400, said, param="messages") from error
        return self.encode(text, special=False).tokens


def _message(message: Message) -> dict[str, Any]:
    """As templates want it: text in one piece, arguments of earlier calls as objects."""
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        odd = [part.type for part in message.content if part.text is None]
        if odd:
            raise ApiError(400, f"messages: given a part of type {odd[0]!r}, expected text", param="messages")
        plain["content"] = "".join(part.text or "" for part in message.content)
    plain.setdefault("content", "")
    if plain["role"] == "developer":  # OpenAI's newer word, which templates do not know
        plain["role"] = "system"
    for call in plain.get("tool_calls", []):
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                call["function"]["arguments"] = json.loads(arguments)
            except ValueError:
                continue
    return plain
