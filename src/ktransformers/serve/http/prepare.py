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
import sys
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ktransformers.serve.doors.conversation import ChatRequest, Conversation, Generation, Reasoning, Tool, Turn
from ktransformers.serve.doors.registry import DOOR_OF_NAME
from ktransformers.serve.doors.template_messages import calls_as_text, candidates, system_texts, template_tool
from ktransformers.serve.formats import AnswerFormat, recognise
from ktransformers.serve.http.error import MAX_PARAM_CHARACTERS, ApiError, bounded
from ktransformers.serve.http.grammar_source import GrammarSource
from ktransformers.serve.http.limits import (
    MAX_SCHEMA_CHARACTERS,
    MAX_SCORES,
    RequestLimits,
    check_count,
    check_schema,
    too_many_tokens,
)
from ktransformers.serve.http.piece_tokenizer import PieceTokenizer
from ktransformers.serve.http.protocol import CompletionRequest, DetokenizeRequest, TokenizeRequest, parse_body
from ktransformers.serve.http.sampled_answers import (
    PromptEnd,
    Recall,
    dropped_reasoning,
    find_splices,
    recall_nothing,
    restore_reasoning,
    turn_keys,
)

COUNT = "count:"  # before a door's name: only the prompt's tokens are counted, also those beyond the context
# A prompt that is too long is counted up to so many times the limit: clients shorten it by what they are told.
COUNTED_LIMITS = 4
THOUGHT = "They say hello, so I say hello."  # of a conversation that shows what a template does with thinking
MAX_IGNORED_FIELDS = 32  # of one request that are named
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


@dataclass(frozen=True)
class PrepareSettings:
    """What preparation depends on besides the tokenizer."""

    vocabulary: int  # rows of the embedding
    max_sequence_tokens: int
    eos: tuple[int, ...] = ()
    template: str = ""  # in place of the tokenizer's
    model_type: str = ""  # by which the format of answers is recognised, with the template
    tool_call_parser: str | None = None  # names a format of tool calls instead
    reasoning_parser: str | None = None  # names a format of reasoning instead
    response_template: dict[str, Any] | None = None  # of the tokenizer, where no format is recognised
    strict_fields: bool = False  # unknown fields of a request are refused
    limits: RequestLimits = RequestLimits()  # noqa: RUF009 (frozen)

    def answer_format(self, template: str) -> AnswerFormat:
        """How answers are written that continue a prompt of this chat template."""
        parsers = (self.tool_call_parser, self.reasoning_parser)
        return recognise(self.model_type, template, *parsers, response_template=self.response_template)


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
class ThinkingBlock:
    """Where thinking begins and ends, in tokens; for answers whose thinking is bounded or followed by a grammar."""

    open: tuple[int, ...]
    close: tuple[int, ...]
    begun: bool  # the prompt has opened it
    budget: int | None = None  # tokens
    in_grammar: bool = False  # the answer's grammar has the block in it


@dataclass(frozen=True)
class PreparedChat:
    """What parsing and emitting the answer to a conversation takes."""

    prefix: str  # what the prompt already has of the answer
    tools: tuple[Tool, ...] = ()
    parallel_calls: bool = True
    thinking: ThinkingBlock | None = None
    return_token_ids: bool = False
    echo: dict[str, Any] = field(default_factory=dict)  # of the door's own
    prompt_end: PromptEnd | None = None  # None: the answer is not remembered


@dataclass(frozen=True)
class PreparedRequest:
    """A valid request in the words of the engine; `serve/http/service.py` adds the adapter and the defaults."""

    model: str | None  # None: the base
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
    grammar: GrammarSource | None = None  # that the answer has to follow
    ignored: tuple[str, ...] = ()  # names of fields without effect
    chat: PreparedChat | None = None  # None: no conversation


def common_length(first: str, second: str) -> int:
    """Characters at the beginning that both texts share."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])


class RequestPreparer:
    def __init__(self, tokenizer: Any, settings: PrepareSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._pieces = PieceTokenizer(tokenizer)
        self._longest_token = max((len(token) for token in tokenizer.get_vocab()), default=1)
        self._reserved = set(inspect.signature(type(tokenizer).apply_chat_template).parameters)
        # Text -> id of the tokens that llguidance does not match by their text: inside of a schema the text stands for
        # the token itself, which no JSON can contain.
        self._special = {
            token.content: number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }

    def prepare(
        self,
        kind: str,
        body: bytes | bytearray,
        templates: Mapping[str, ModelTemplate],
        recall: Recall = recall_nothing,
    ) -> PreparedRequest:
        """`kind`: a door's name, that after `COUNT`, completion, tokenize or detokenize; `templates`: chat templates by
        model name, of adapters that have their own; `recall`: what the server remembers of earlier answers."""
        if (name := kind.removeprefix(COUNT)) in DOOR_OF_NAME:
            return self.chat(DOOR_OF_NAME[name].parse(body), templates, recall, counts=name != kind)
        if kind == "completion":
            request, ignored = parse_body(body, CompletionRequest)
            return self.completion(request, self._check_ignored(ignored))
        if kind == "tokenize":
            asked, _ = parse_body(body, TokenizeRequest)
            if asked.messages is not None:
                chat = DOOR_OF_NAME["chat"].parse(body)
                ignored = tuple(name for name in chat.ignored if name not in TokenizeRequest.model_fields)
                prompts = self.chat(replace(chat, ignored=ignored), templates).prompts
            elif asked.prompt is None:
                raise ApiError(400, "prompt: given nothing, expected text, or messages", param="prompt")
            else:
                prompts = (self._encode(asked.prompt, 0, special=asked.add_special_tokens),)
            return PreparedRequest(asked.model or None, prompts, 0, echo=asked.return_token_strs)
        tokens, _ = parse_body(body, DetokenizeRequest)
        prompt = self._token_prompt(tokens.tokens)
        return PreparedRequest(tokens.model or None, (replace(prompt, text=self._tokenizer.decode(tokens.tokens)),), 0)

    def completion(self, request: CompletionRequest, ignored: tuple[str, ...] = ()) -> PreparedRequest:
        generation = request.generation(
            COMPLETION_TOKENS if "max_tokens" not in request.model_fields_set else request.max_tokens, request.logprobs
        )
        echo = bool(request.echo)
        prompts = self._tokenize_prompts(request.prompt, generation.max_tokens or 0, echo)
        if echo and request.logprobs is not None:
            scores = sum(len(prompt.tokens) for prompt in prompts) * (request.logprobs + 1)
            if scores > MAX_SCORES:
                message = f"logprobs: given {scores} of the prompts' tokens, expected at most {MAX_SCORES} in a request"
                raise ApiError(400, message, param="logprobs")
        prepared = self._prepared(generation, prompts, ignored)
        return replace(prepared, echo=echo, usage_in_stream=request.usage_in_stream)

    def chat(
        self,
        request: ChatRequest,
        templates: Mapping[str, ModelTemplate],
        recall: Recall = recall_nothing,
        *,
        counts: bool = False,
    ) -> PreparedRequest:
        """`counts`: nothing but the prompt is wanted, which may be longer than the context."""
        conversation, generation = request.conversation, request.generation
        limits = self._settings.limits
        ignored = self._check_ignored(request.ignored)
        check_count("messages", len(conversation.turns), limits.max_messages, "max-messages")
        check_count("tools", len(conversation.tools), limits.max_tools, "max-tools")
        template = templates.get(generation.model or "") or ModelTemplate(self._settings.template)
        text = template.text or str(self._tokenizer.chat_template or "")
        if not text:
            raise ApiError(400, "messages: given to a model without a chat template; use /v1/completions")
        answer_format = self._settings.answer_format(text)
        self._check_tools(conversation)
        tools = () if conversation.tool_choice == "none" else conversation.tools
        conversation = replace(conversation, tools=tools)
        longest = self._settings.max_sequence_tokens
        prompt, prefix, prompt_end = self._continue(
            generation.model, conversation, template, answer_format, recall, sys.maxsize if counts else longest
        )
        if counts:
            return PreparedRequest(generation.model, (prompt,), 0)
        # A limit that the context does not reach is no error: clients ask for the most that a model may answer.
        left = max(1, self._settings.max_sequence_tokens - len(prompt.tokens))
        max_tokens = left if generation.max_tokens is None else min(generation.max_tokens, left)
        prepared = self._prepared(replace(generation, max_tokens=max_tokens), [prompt], ignored)
        grammar = self._call_grammar(conversation, answer_format, prefix) if tools else None
        # With `auto` the schema is what the client asked for; a call would not follow it.
        if grammar is None or (conversation.tool_choice == "auto" and prepared.grammar is not None):
            grammar = prepared.grammar
        chat = PreparedChat(
            prefix,
            tools,
            conversation.parallel_calls,
            self._thinking_block(conversation.reasoning, answer_format, prefix, grammar),
            generation.return_token_ids,
            request.echo,
            # An answer that went on behind its end would take the place of the turns that follow it.
            None if generation.ignore_eos else prompt_end,
        )
        return replace(prepared, grammar=grammar, chat=chat)

    def _continue(
        self,
        model: str | None,
        conversation: Conversation,
        template: ModelTemplate,
        answer_format: AnswerFormat,
        recall: Recall,
        limit: int,
    ) -> tuple[TokenizedPrompt, str, PromptEnd]:
        """The prompt of fewer than `limit` tokens, with earlier answers as they were sampled; what it has of the
        answer; and where that begins."""
        turns = conversation.turns
        keys = list(turn_keys(model or "", turns))
        said = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
        if conversation.continue_final_turn:
            said = [index for index in said if index != len(turns) - 1]
        known = recall([keys[index] for index in said]) if said else {}
        answers = {index: known[keys[index]] for index in said if keys[index] in known}
        restored = dropped_reasoning(turns, conversation.tools, answers)
        if restored and not self._keeps_thinking(conversation, template, answer_format):
            restored = {}
        while True:
            turns = restore_reasoning(conversation.turns, restored)
            rendered, prefix = self._render(replace(conversation, turns=turns), template, answer_format)
            splices, state, digest = find_splices(rendered, turns, conversation.tools, answers, self._pieces)
            if not (foreign := restored.keys() - {splice.turn for splice in splices}):
                break
            # What follows thinking that is not this conversation's was rendered with it.
            restored = {index: text for index, text in restored.items() if index < min(foreign)}
        asked = max((index for index, turn in enumerate(turns) if turn.role in ("user", "system")), default=-1)
        tokens, at, continued, border = array("i"), 0, 0, 0
        try:
            for splice in splices:
                tokens += self._pieces.encode(rendered[at : splice.start], COUNTED_LIMITS * limit)
                border = border if border or splice.turn < asked else len(tokens)
                tokens += splice.answer.tokens
                at, continued = splice.end, len(tokens)
            tokens += self._pieces.encode(rendered[at:], COUNTED_LIMITS * limit)
        except (UnicodeError, TypeError) as error:
            raise ApiError(400, f"messages: given text that is no Unicode ({error})", param="messages") from error
        if len(tokens) >= limit:
            message = f"prompt is too long: {len(tokens)} tokens > {limit - 1} maximum"
            raise ApiError(400, message, param="messages", code="context_length_exceeded")
        begun = len(self._pieces.encode(prefix, limit))
        border = max(0, (border or len(tokens)) - begun)
        end = PromptEnd(keys[-1], len(rendered), digest, state, continued, begun, border)
        return TokenizedPrompt(None, tuple(tokens) or (self._empty_prompt_token(),)), prefix, end

    def _keeps_thinking(self, conversation: Conversation, template: ModelTemplate, answer_format: AnswerFormat) -> bool:
        """Whether the template renders the thinking of earlier turns, however old they are."""
        turns = (Turn("user", "Hello"), Turn("assistant", "Hello", THOUGHT), Turn("user", "Hello"))
        try:
            probe = replace(conversation, turns=turns, continue_final_turn=False)
            return THOUGHT in self._render(probe, template, answer_format)[0]
        except ApiError:
            return False

    def _check_ignored(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if names and self._settings.strict_fields:
            message = f"{names[0]}: given an unknown field, expected none (--strict-fields)"
            raise ApiError(400, message, param=names[0])
        return tuple(bounded(name, MAX_PARAM_CHARACTERS) for name in names[:MAX_IGNORED_FIELDS])

    def _prepared(
        self, generation: Generation, prompts: list[TokenizedPrompt], ignored: tuple[str, ...]
    ) -> PreparedRequest:
        longest = max(len(prompt.tokens) for prompt in prompts)
        max_tokens = generation.max_tokens
        if max_tokens is None:
            max_tokens = max(1, self._settings.max_sequence_tokens - longest)
        self._check_length(longest, max_tokens)
        vocabulary = self._settings.vocabulary
        for number in generation.logit_bias:
            if not (number.isascii() and number.isdigit() and len(number) < 10 and int(number) < vocabulary):
                raise ApiError(400, f"logit_bias: given {number!r}, expected a token's number", param="logit_bias")
        if generation.stop_tokens and (token := max(generation.stop_tokens)) >= vocabulary:
            message = f"stop_token_ids: given token {token}, expected less than {vocabulary}"
            raise ApiError(400, message, param="stop_token_ids")
        logprobs = generation.logprobs
        return PreparedRequest(
            model=generation.model,
            prompts=tuple(prompts),
            max_tokens=max_tokens,
            n=generation.n,
            stream=generation.stream,
            logprobs=None if logprobs is None else min(logprobs, vocabulary),
            sampling=generation.sampling,
            logit_bias=generation.logit_bias,
            stop_strings=generation.stop_strings,
            stop_tokens=generation.stop_tokens,
            ignore_eos=generation.ignore_eos,
            keep_special=generation.keep_special,
            grammar=None if generation.schema is None else self._schema_grammar(generation.schema),
            ignored=ignored,
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

    def _schema_grammar(self, schema: Any) -> GrammarSource:
        check_schema("response_format", schema, self._settings.limits)
        text = json.dumps(schema, sort_keys=True)
        if len(text) > MAX_SCHEMA_CHARACTERS:
            message = f"response_format: given a schema of {len(text)} characters, expected {MAX_SCHEMA_CHARACTERS}"
            raise ApiError(400, f"{message} at most", param="response_format")
        self._check_text("response_format", json.dumps(schema, ensure_ascii=False))
        return GrammarSource("json_schema", text)

    def _check_text(self, param: str, text: str) -> None:
        for token in self._special:
            if token in text:
                raise ApiError(400, f"{param}: given {token!r}, expected no text of a special token", param=param)

    def _check_tools(self, conversation: Conversation) -> None:
        if not conversation.tools and conversation.tool_choice in ("required", "named"):
            raise ApiError(400, "tool_choice: given without tools, expected tools", param="tool_choice")
        for tool in conversation.tools:
            check_schema("tools", tool.parameters, self._settings.limits)
            self._check_text("tools", tool.name)
        names = [tool.name for tool in conversation.tools]
        for name in conversation.chosen_tools:
            if name not in names:
                raise ApiError(400, f"tool_choice: given {name!r}, expected one of {names}", param="tool_choice")

    def _call_grammar(
        self, conversation: Conversation, answer_format: AnswerFormat, prefix: str
    ) -> GrammarSource | None:
        """What the answer has to follow so that its tool calls are what was asked for; None: nothing."""
        try:
            grammar = answer_format.constraint(
                conversation.tools,
                conversation.tool_choice,
                conversation.chosen_tools,
                conversation.parallel_calls,
                conversation.reasoning,
                prefix,
                self._special,
            )
        except (TypeError, ValueError, AttributeError) as error:
            message = f"tools: given parameters that are no JSON schema ({error}), expected one"
            raise ApiError(400, message, param="tools") from error
        if grammar is None:
            return None
        for tool in conversation.tools:
            self._check_text("tools", json.dumps(tool.parameters, ensure_ascii=False))
        return GrammarSource("lark", grammar)

    def _thinking_block(
        self, reasoning: Reasoning, answer_format: AnswerFormat, prefix: str, grammar: GrammarSource | None
    ) -> ThinkingBlock | None:
        marks = answer_format.thinking
        begun = answer_format.opens_thinking(prefix)
        has_schema = grammar is not None and grammar.kind == "json_schema"
        if marks is None or (reasoning.budget is None and not (begun and has_schema)):
            return None
        opens, closes = (
            self._tokenizer(mark, add_special_tokens=False)["input_ids"] for mark in (marks.open, marks.close)
        )
        in_grammar = grammar is not None and grammar.kind == "lark"
        return ThinkingBlock(tuple(opens), tuple(closes), begun, reasoning.budget, in_grammar)

    def _render(
        self, conversation: Conversation, template: ModelTemplate, answer_format: AnswerFormat
    ) -> tuple[str, str]:
        """The prompt, and what of it is the beginning of the answer."""
        if self._reserved & set(conversation.template_kwargs):
            clash = sorted(self._reserved & set(conversation.template_kwargs))[0]
            raise ApiError(400, f"chat_template_kwargs: given {clash!r}, expected the template's own variables")
        variables = {
            **template.special_tokens,
            **answer_format.template_variables(conversation.reasoning),
            **conversation.template_kwargs,
        }
        tools: list[dict[str, Any]] | None = [template_tool(tool) for tool in conversation.tools] or None
        turns = conversation.turns
        if tools and not answer_format.template_has_tools:
            turns = (Turn("system", answer_format.default_tools_prompt(conversation.tools)), *turns)
            tools = None
        if not answer_format.template_has_calls:
            turns = calls_as_text(turns, answer_format.call_text)

        def render(messages: list[dict[str, Any]], generation_prompt: bool, continue_final: bool = False) -> str:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=template.text or None,
                    add_generation_prompt=generation_prompt,
                    continue_final_message=continue_final,
                    tokenize=False,
                    **variables,
                )
            )

        continues = conversation.continue_final_turn
        refusal: Exception | None = None
        texts = system_texts(turns)
        for messages in candidates(turns):
            try:
                prompt = render(messages, conversation.add_generation_prompt and not continues, continues)
                if not all(text in prompt for text in texts):
                    continue
                before = render(messages[:-1] if continues else messages, False)
            except Exception as error:  # a template may raise anything
                refusal = refusal or error
                continue
            return prompt, prompt[common_length(prompt, before) :]
        reason = "it leaves out a system message" if refusal is None else f"{type(refusal).__name__}: {refusal}"
        message = f"messages: the model's chat template refuses them ({reason})"
        raise ApiError(400, message, param="messages") from refusal
