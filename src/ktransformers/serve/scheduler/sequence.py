"""One completion being generated: the request, its progress, and the events that its client receives.

`tokens` are the prompt and all sampled tokens; the slot holds keys and values of the first `slot.length` of them. The
engine computes whatever is missing, prompt or not, so a preempted sequence starts over and gives the same result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ktransformers.serve.cache.kv_cache import KVSlot, Owner
from ktransformers.serve.sampling.detokenizer import StreamingText
from ktransformers.serve.sampling.sampling import Sampling, Score, make_generator
from ktransformers.serve.scheduler.lora import LoadedAdapter

if TYPE_CHECKING:
    from ktransformers.serve.cache.cache_tiers import PrefixFetch


class Grammar(Protocol):
    """Constrains the next token, given the tokens accepted so far."""

    def allowed(self, size: int) -> torch.Tensor:
        """bool [size]: tokens that may come next."""

    def accept(self, token: int) -> None: ...


@dataclass(frozen=True)
class Event:
    """Progress of a sequence; the last event has `finish`: stop, length, timeout, cancelled, unavailable,
    out_of_memory or error."""

    text: str = ""
    scores: tuple[Score, ...] = ()
    prompt_scores: tuple[Score, ...] = ()
    finish: str | None = None
    tokens: int = 0  # sampled so far
    cached: int = 0  # prompt tokens found in the KV cache
    error: str = ""
    stop_string: str | None = None  # that ended the text


@dataclass(frozen=True)
class GenerationRequest:
    """Everything that determines a completion."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    adapter: LoadedAdapter | None = None
    stop_strings: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    keep_special: bool = False
    logprobs: int | None = None  # alternatives to report per token; None: no scores
    prompt_logprobs: bool = False
    grammar: Callable[[], Grammar] | None = None
    deadline: float | None = None  # time.monotonic()
    generation_prompt: int = 0  # tokens at the end of a chat's prompt that begin the answer
    border: int = 0  # prompt tokens before which the next prompt of the conversation does not diverge; 0: not known
    request_id: str = ""  # of the HTTP request, for the log


@dataclass(eq=False)
class Sequence:
    request: GenerationRequest
    tokenizer: Any
    deliver: Callable[[Event], None]
    index: int = 0  # among the completions of one request
    shares_prompt_with: Sequence | None = None  # has the same prompt: wait until it is computed, then copy its slot
    tokens: list[int] = field(default_factory=list)
    slot: KVSlot | None = None
    cached: int = 0
    prompt_scores_sent: bool = False  # prompt_scores were delivered
    cancelled: bool = False
    finished: bool = False
    arrived: float = field(default_factory=time.monotonic)
    fetch: PrefixFetch | None = None  # blocks of its prompt that are being read, while it is queued
    admitted: float = 0.0
    scheduled: int = 0  # step that last computed a part of its prompt
    preempted: bool = False  # it was, and is computed again
    first_token: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.text = StreamingText(self.tokenizer, self.request.stop_strings, self.request.keep_special)
        self.rng = make_generator(self.request.sampling, self.index)
        self.grammar = self.request.grammar() if self.request.grammar else None
        self.prompt_scores: list[Score] = [Score(self.tokens[0], None)] if self.request.prompt_logprobs else []

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def new_count(self) -> int:
        """Of new tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def owner(self) -> Owner:
        """Of its KV slot."""
        return None if self.request.adapter is None else self.request.adapter.owner

    @property
    def is_drawn(self) -> bool:
        """The next token is random, by the logits as they are."""
        sampling = self.request.sampling
        random = not sampling.greedy and not sampling.changes_logits and self.grammar is None
        return random and self.request.max_tokens > 0

    @property
    def greedy(self) -> bool:
        """The next token is the argmax of the logits, without penalties or a grammar."""
        return self.grammar is None and self.request.sampling.is_argmax

    @property
    def computed(self) -> int:
        return 0 if self.slot is None else self.slot.length

    @property
    def uncomputed(self) -> int:
        """Known tokens without keys and values."""
        return len(self.tokens) - self.computed

    @property
    def prompt_computed(self) -> bool:
        return self.computed >= len(self.request.prompt)

    def end(self, finish: str, text: str = "", scores: tuple[Score, ...] = (), error: str = "") -> None:
        if self.finished:
            return
        self.finished = True
        stopped = self.text.stopped
        self.deliver(Event(text, scores, (), finish, self.new_count, self.cached, error, stopped))
