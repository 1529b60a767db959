"""From a prepared request to requests of the engine: the name resolved to an adapter, defaults filled in, the grammar
taken from the cache.

Sampling settings that a request omits come from the model's generation_config.json where it has them, as in vLLM and
SGLang, otherwise from OpenAI's defaults. An invalid request raises ApiError here, before it is queued.
"""

from __future__ import annotations

import functools
import re
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ktransformers.ground.errors import InputError
from ktransformers.serve.cache.cache_kinds import bytes_by_kind, describe_tier
from ktransformers.serve.doors.conversation import ChatRequest, Turn
from ktransformers.serve.doors.ollama import DEFAULT_TAG
from ktransformers.serve.formats import AnswerFormat
from ktransformers.serve.http.choice_parser import ChoiceParser
from ktransformers.serve.http.error import ApiError
from ktransformers.serve.http.grammar import SchemaMatcher, ThinkingLimit
from ktransformers.serve.http.grammar_source import GrammarCompiler
from ktransformers.serve.http.limits import RequestLimits
from ktransformers.serve.http.prepare import ModelTemplate, PreparedRequest, PrepareSettings, RequestPreparer
from ktransformers.serve.http.prepare_pool import PreparePool
from ktransformers.serve.http.protocol import CompletionRequest
from ktransformers.serve.http.registry import Registry, UnknownModel
from ktransformers.serve.http.sampled_answers import SampledAnswer, SampledAnswers, turn_keys
from ktransformers.serve.sampling.sampling import Sampling
from ktransformers.serve.scheduler.engine import ServeEngine
from ktransformers.serve.scheduler.lora import LoadedAdapter
from ktransformers.serve.scheduler.sequence import GenerationRequest, Grammar

# Tokens before the end of the last answer that are computed again though nothing was evicted: a recurrent state is kept
# at a border of blocks.
MAX_COMPUTED_AGAIN = 64
VENDOR_MODELS = ("claude-", "gpt-")


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


@dataclass(frozen=True)
class PrepareOptions:
    """Worker processes that prepare requests, and how long one request may take there."""

    workers: int = 2
    seconds: float = 10.0


@dataclass(frozen=True)
class DoorOptions:
    """How requests are read, and the formats of answers where flags name them."""

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    strict_fields: bool = False  # unknown fields are refused
    strict_model_names: bool = False  # names of other vendors' models are refused


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
        request_limits: RequestLimits | None = None,
        prepare: PrepareOptions | None = None,
        doors: DoorOptions | None = None,
    ) -> None:
        self.engine, self.registry, self.tokenizer, self.timeout = engine, registry, tokenizer, timeout
        self.request_limits = request_limits or RequestLimits()
        self.prepare_options = prepare or PrepareOptions()
        self.door_options = doors or DoorOptions()
        self.vocabulary = int(engine.forward.model.get_input_embeddings().weight.shape[0])
        self.defaults = GenerationDefaults.of(getattr(engine.forward.model, "generation_config", None), tokenizer)
        self.grammar_compiler = GrammarCompiler(tokenizer, self.vocabulary)
        self.sampled_answers = SampledAnswers()
        self.prefixes: Counter[str] = Counter()  # prompts of conversations by what became of the turn before
        self._template = template
        self.kv_bytes_per_token = kv_bytes_per_token  # of keys and values
        self.attention_backend = ""  # of new tokens: core, triton or torch
        self.approximations: dict[str, int | str] = {}  # name -> value of settings that change results
        self.nodes: Any = None  # NodePool of expert nodes, if there are any
        self.placement: Any = None  # ServedPlacement; writes the counts of routed tokens at the end

    def describe_cache(self) -> dict[str, Any]:
        """The KV cache for /v1/models: bytes of a token, by kind of layer, of a sequence's states, and tiers below the
        slots."""
        layout, tiers = self.engine.forward.block_layout, self.engine.tiers
        cache: dict[str, Any] = {"bytes_per_token": self.kv_bytes_per_token}
        if self.engine.forward.fp8_cache:
            cache["dtype"] = "fp8_e4m3"
        if self.engine.forward.bytes_per_sequence:
            cache["bytes_per_sequence"] = self.engine.forward.bytes_per_sequence
        if layout is not None:
            cache["kinds"] = bytes_by_kind(self.engine.forward.model, layout)
        if tiers is not None:
            cache["tiers"] = {state.name: describe_tier(state) for state in tiers.states}
        return cache

    @property
    def max_sequence_tokens(self) -> int:
        return min(self.engine.limits.context_length, self.engine.limits.max_total_tokens)

    @property
    def prepare_settings(self) -> PrepareSettings:
        eos = tuple(sorted(self.defaults.eos))
        options = self.door_options
        return PrepareSettings(
            vocabulary=self.vocabulary,
            max_sequence_tokens=self.max_sequence_tokens,
            eos=eos,
            template=self._template,
            model_type=str(self.engine.forward.model.config.model_type),
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
            response_template=getattr(self.tokenizer, "response_template", None),
            strict_fields=options.strict_fields,
            limits=self.request_limits,
        )

    def answer_format(self, adapter: LoadedAdapter | None) -> AnswerFormat:
        return self.prepare_settings.answer_format(self.template_of(adapter) or "")

    @functools.cached_property
    def _special_text(self) -> re.Pattern[str] | None:
        special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None

    def choice_parser(self, prepared: PreparedRequest, adapter: LoadedAdapter | None) -> ChoiceParser:
        """A parser of one answer to a conversation, which `adapter` gives."""
        assert prepared.chat is not None
        answer_format = self.answer_format(adapter)
        parser = answer_format.parser(prepared.chat.prefix, prepared.chat.tools)
        return ChoiceParser(parser, None if prepared.keep_special else self._special_text)

    def make_pool(self) -> PreparePool:
        options = self.prepare_options
        return PreparePool(
            self.tokenizer,
            self.prepare_settings,
            self.grammar_compiler,
            workers=options.workers,
            seconds=options.seconds,
            recall=self.sampled_answers.find,
        )

    @functools.cached_property
    def _added_tokens(self) -> dict[int, str]:
        return {number: token.content for number, token in self.tokenizer.added_tokens_decoder.items()}

    def remember(
        self, prepared: PreparedRequest, said: Turn, tokens: Sequence[int], *, ended: bool, cached: int
    ) -> None:
        """The answer to a conversation is complete. `tokens`: sampled ones, the last of which is its end if it `ended`;
        `cached`: of the prompt. With `ignore_eos` the marks of more turns may be among them: that is no answer."""
        start = None if prepared.chat is None else prepared.chat.prompt_end
        if start is None or not tokens or prepared.ignore_eos:
            return
        lost = start.continuation == "continued" and cached < start.continued_tokens - MAX_COMPUTED_AGAIN
        self.prefixes["evicted" if lost else start.continuation] += 1
        sampled, end = (tokens[:-1], self._added_tokens.get(tokens[-1], "")) if ended else (tokens, "")
        (key,) = turn_keys(start.key, [said])
        arguments = tuple(str(call.arguments) for call in said.calls)
        answer = SampledAnswer(start.characters, start.digest, array("i", sampled), end, said.reasoning, arguments)
        self.sampled_answers.add(key, answer)

    @functools.cached_property
    def preparer(self) -> RequestPreparer:
        """Prepares requests in this process."""
        return RequestPreparer(self.tokenizer, self.prepare_settings)

    def templates(self) -> Mapping[str, ModelTemplate]:
        """Chat templates by model name, of adapters that have their own."""
        templates: dict[str, ModelTemplate] = {}
        for name, entry in self.registry.loaded.items():
            own = entry.adapter.template
            if own is not None:
                template = ModelTemplate(own.text, dict(own.special_tokens))
                names = (name, f"{self.registry.served}:{name}")
                templates |= {known + tag: template for known in names for tag in ("", DEFAULT_TAG)}
        return templates

    def template_of(self, adapter: LoadedAdapter | None) -> str | None:
        """The chat template of requests to this adapter, or to the base."""
        if adapter is not None and adapter.template is not None:
            return adapter.template.text
        return self._template or self.tokenizer.chat_template

    def template_origin(self, adapter: LoadedAdapter) -> str:
        """`adapter` if it is rendered otherwise than the base is, else `base`."""
        if adapter.template is None or self._template == adapter.template.text:
            return "base"
        differs = self._template != "" or adapter.template.differs_from(self.tokenizer)
        return "adapter" if differs else "base"

    def chat(self, request: ChatRequest) -> tuple[GenerationRequest, ChoiceParser]:
        """Prepared in this process, with the parser of the answer."""
        prepared = self.preparer.chat(request, self.templates())
        (generation,) = self.generation_requests(prepared)
        return generation, self.choice_parser(prepared, generation.adapter)

    def completion(self, request: CompletionRequest) -> GenerationRequest:
        """Of its first prompt, prepared in this process."""
        return self.generation_requests(self.preparer.completion(request))[0]

    def find(self, name: str | None) -> LoadedAdapter | None:
        """The adapter that a request names; None: the base. Clients that know one vendor's models ask for these
        whatever is served, so such names are the base's too. An unknown name may have Ollama's default tag."""
        name = name or self.registry.served
        try:
            return self.registry.find(name)
        except UnknownModel as error:
            if name.endswith(DEFAULT_TAG):
                return self.find(name.removesuffix(DEFAULT_TAG))
            if name.startswith(VENDOR_MODELS) and not self.door_options.strict_model_names:
                return self.registry.find(self.registry.served)
            raise ApiError(404, str(error), param="model", code="model_not_found") from error

    def generation_requests(self, prepared: PreparedRequest, request_id: str = "") -> list[GenerationRequest]:
        """One for each prompt."""
        adapter = self.find(prepared.model)
        grammar: Callable[[], Grammar] | None = None
        chat = prepared.chat
        start = None if chat is None else chat.prompt_end
        if prepared.grammar is not None:
            try:
                compiled = self.grammar_compiler.compile(prepared.grammar)
            except InputError as error:
                raise ApiError(400, str(error), param="response_format") from error
            grammar = functools.partial(SchemaMatcher, compiled)
        own = adapter.template if adapter is not None and chat is not None and not prepared.ignore_eos else None
        eos = frozenset[int]() if prepared.ignore_eos else self.defaults.eos
        stop_tokens = eos | frozenset(prepared.stop_tokens) | (frozenset() if own is None else own.stop_tokens)
        if chat is not None and chat.thinking is not None:
            grammar = functools.partial(ThinkingLimit, chat.thinking, grammar, stop_tokens)
        first = GenerationRequest(
            prompt=(),
            max_tokens=prepared.max_tokens,
            sampling=self._sampling(prepared),
            adapter=adapter,
            stop_strings=prepared.stop_strings + (() if own is None else own.stop_strings),
            stop_tokens=stop_tokens,
            keep_special=prepared.keep_special or chat is not None,  # formats are written in special tokens
            logprobs=prepared.logprobs,
            prompt_logprobs=prepared.echo and prepared.logprobs is not None,
            grammar=grammar,
            generation_prompt=0 if start is None else start.generation_prompt,
            border=0 if start is None else start.border,
            request_id=request_id,
            deadline=None if self.timeout is None else time.monotonic() + self.timeout,
        )
        return [replace(first, prompt=prompt.tokens) for prompt in prepared.prompts]

    def _sampling(self, prepared: PreparedRequest) -> Sampling:
        sampling = replace(self.defaults.sampling, **prepared.sampling)
        bias = {int(token): value for token, value in prepared.logit_bias.items()}
        return replace(sampling, top_k=max(0, sampling.top_k), logit_bias=bias)
