"""One answer in the making: what is asked, how far it is, and what its reader hears.

`tokens` are the prompt and everything drawn so far; the slot holds keys and values of the first `slot.length` of them.
What is missing is computed, prompt or not, so a sequence that lost its slot simply starts over and ends the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ktransformers.serve.engine.detokenizer import StreamingText
from ktransformers.serve.engine.kv_cache import KVSlot
from ktransformers.serve.engine.lora import LoadedAdapter
from ktransformers.serve.engine.sampling import Sampling, Score, generator


class Grammar(Protocol):
    """What may come next, told token by token."""

    def allowed(self, size: int) -> torch.Tensor:
        """[size] bool."""

    def accept(self, token: int) -> None: ...


@dataclass(frozen=True)
class Event:
    """News of a sequence; the last one has `finish`: stop, length, timeout, cancelled or error."""

    text: str = ""
    scores: tuple[Score, ...] = ()
    prompt_scores: tuple[Score, ...] = ()
    finish: str | None = None
    tokens: int = 0  # drawn so far
    cached: int = 0  # of the prompt, found computed
    error: str = ""


@dataclass(frozen=True)
class GenerationRequest:
    """What a sequence wants."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    adapter: LoadedAdapter | None = None
    stops: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    keep_special: bool = False
    logprobs: int | None = None  # how many of the most likely; None: no scores
    prompt_logprobs: bool = False
    grammar: Callable[[], Grammar] | None = None
    deadline: float | None = None  # time.monotonic()


@dataclass(eq=False)
class Sequence:
    ask: GenerationRequest
    tokenizer: Any
    deliver: Callable[[Event], None]
    index: int = 0  # among the answers to one request
    after: Sequence | None = None  # has the same prompt: wait until it is computed, then copy
    tokens: list[int] = field(default_factory=list)
    slot: KVSlot | None = None
    cached: int = 0
    prompt_told: bool = False  # its scores were delivered
    cancelled: bool = False
    finished: bool = False
    arrived: float = field(default_factory=time.monotonic)
    first_token: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.ask.prompt)
        self.text = StreamingText(self.tokenizer, self.ask.stops, self.ask.keep_special)
        self.draw = generator(self.ask.sampling, self.index)
        self.grammar = self.ask.grammar() if self.ask.grammar else None
        self.prompt_scores: list[Score] = [Score(self.tokens[0], None)] if self.ask.prompt_logprobs else []

    @property
    def new(self) -> list[int]:
        return self.tokens[len(self.ask.prompt) :]

    @property
    def greedy(self) -> bool:
        """The most likely token comes next, whatever came before."""
        return self.grammar is None and self.ask.sampling.plain

    @property
    def computed(self) -> int:
        return 0 if self.slot is None else self.slot.length

    @property
    def prompt_done(self) -> bool:
        return self.computed >= len(self.ask.prompt)

    def end(self, finish: str, text: str = "", scores: tuple[Score, ...] = (), error: str = "") -> None:
        if self.finished:
            return
        self.finished = True
        self.deliver(Event(text, scores, (), finish, len(self.new), self.cached, error))
