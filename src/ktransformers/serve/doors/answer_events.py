"""What an answer is made of, in order, whatever the model family and whatever the API.

The parser of the family's format (`serve/formats/`) turns generated text into these events, and the emitter of a door
turns them into its own. Regions do not overlap: a thinking block or a call that begins has ended before the next event
of another region. A text region ends where another begins, or with the answer.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool call begins. Its name is complete."""

    index: int  # among the calls of this answer
    name: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(frozen=True)
class CallArguments:
    """The next piece of the call's arguments; all pieces together are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    index: int
    arguments: str  # all of them, JSON


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of the tokens behind the events that follow, or behind none. Only requests with
    `Generation.logprobs` get them; parsers do not make them."""

    content: tuple[dict[str, Any], ...]  # as `logprobs.content` of a chat completion has them


AnswerEvent = ReasoningDelta | TextDelta | CallBegin | CallArguments | CallEnd | TokenScores


class AnswerParser(Protocol):
    """Of one answer. `feed` takes text as it is detokenized, with the text of special tokens."""

    def feed(self, text: str) -> list[AnswerEvent]: ...

    def end(self) -> list[AnswerEvent]:
        """The answer has ended: what was held back, and the end of a call that is still open."""


@dataclass(frozen=True)
class Usage:
    prompt: int  # tokens, the cached ones included
    cached: int  # of the prompt, found in the KV cache
    completion: int  # sampled tokens, those of the reasoning included
    reasoning: int = 0  # sampled tokens of the reasoning


@dataclass(frozen=True)
class Finish:
    """Why an answer ended: `stop` (its end token, or all calls are made), `length`, `stop_string`."""

    reason: str
    stop_string: str | None = None
