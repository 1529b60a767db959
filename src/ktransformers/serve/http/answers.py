"""Events of the engine as OpenAI responses: complete ones and streams, of chats and of completions.

A request has one or more sequences; their events come through one queue, each with the index of its choice. When the
client disconnects, all sequences of the request are cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ktransformers.serve.http.error import UNAVAILABLE, ApiError
from ktransformers.serve.http.prepare import TokenizedPrompt
from ktransformers.serve.sampling.sampling import Score
from ktransformers.serve.scheduler.engine import QueueFull, ServeEngine, Stopped, Unavailable
from ktransformers.serve.scheduler.sequence import Event, GenerationRequest
from ktransformers.serve.scheduler.sequence import Sequence as EngineSequence


@dataclass
class Completed:
    """What was generated for one choice so far."""

    text: str = ""
    scores: list[Score] = field(default_factory=list)
    prompt_scores: tuple[Score, ...] = ()
    finish: str | None = None
    tokens: int = 0
    cached: int = 0

    def add(self, event: Event) -> None:
        self.text += event.text
        self.scores += event.scores
        self.prompt_scores = event.prompt_scores or self.prompt_scores
        self.finish, self.cached = event.finish, event.cached
        self.tokens = max(self.tokens, event.tokens)


class ResponseStream:
    """Submits the sequences of one request and receives their events on `loop`. It may be made in any thread: a request
    of many long prompts takes a while to copy."""

    def __init__(
        self,
        engine: ServeEngine,
        tokenizer: Any,
        requests: Sequence[GenerationRequest],
        n: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._engine = engine
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.answers = [Completed() for _ in range(len(requests) * n)]
        self._sequences: list[EngineSequence] = []
        for prompt_index, request in enumerate(requests):
            first: EngineSequence | None = None
            for index in range(n):
                sequence = EngineSequence(
                    request, tokenizer, self._event_sink(loop, prompt_index * n + index), index, first
                )
                first = first or sequence
                self._sequences.append(sequence)
        self.prompt_tokens = sum(len(request.prompt) for request in requests)
        try:
            engine.submit(self._sequences)
        except QueueFull as error:
            raise ApiError(429, f"the server is full: {error}", code="queue_full") from error
        except Stopped as error:
            raise ApiError(503, str(error), code="shutting_down") from error
        except Unavailable as error:
            raise ApiError(503, str(error), code=UNAVAILABLE) from error

    def cancel(self) -> None:
        """End what has not ended. Sequences and this object refer to each other, so they are let go of here and not by
        the next full garbage collection."""
        self._engine.cancel(self._sequences)
        self._sequences = []

    def _event_sink(self, loop: asyncio.AbstractEventLoop, choice: int) -> Any:
        def on_event(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop ended before the engine
                loop.call_soon_threadsafe(self._events.put_nowait, (choice, event))

        return on_event

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Events with the index of their choice, until all have ended. Closing the iterator early cancels the rest."""
        unfinished = len(self.answers)
        try:
            while unfinished:
                choice, event = await self._events.get()
                self.answers[choice].add(event)
                if event.finish == "error":
                    raise ApiError(500, f"the answer could not be computed: {event.error}", code="engine_error")
                if event.finish == "out_of_memory":
                    raise ApiError(503, event.error, code="out_of_memory")
                if event.finish == "unavailable":
                    raise ApiError(503, event.error, code=UNAVAILABLE)
                if event.finish == "timeout":
                    raise ApiError(
                        504, "the answer was not complete in the time that the server allows", code="timeout"
                    )
                unfinished -= event.finish is not None
                yield choice, event
        finally:
            self.cancel()

    async def complete(self) -> list[Completed]:
        async for _ in self.events():
            pass
        return self.answers

    def usage(self) -> dict[str, Any]:
        new = sum(answer.tokens for answer in self.answers)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": self.answers[0].cached},
        }


@dataclass(frozen=True)
class ResponseHeader:
    """The fields that all parts of one response share."""

    kind: str  # chat.completion, text_completion, chat.completion.chunk
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def __call__(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        prefix = "cmpl" if self.kind == "text_completion" else "chatcmpl"
        shared = {"id": f"{prefix}-{self.id}", "object": self.kind, "created": self.created, "model": self.model}
        return {**shared, "choices": choices, **fields}


def sse_event(document: dict[str, Any]) -> str:
    return f"data: {encode_json(document)}\n\n"


SSE_DONE = "data: [DONE]\n\n"
JSON_SLICE = 256  # elements of a list that are encoded in one call


def encode_json(value: Any) -> str:
    """The text of `json.dumps`, in slices: one call holds the GIL until it is done, and log-probabilities of a long
    prompt are tens of megabytes."""
    if isinstance(value, dict):
        fields = (f"{_dumps(key)}: {encode_json(entry)}" for key, entry in value.items())
        return "{" + ", ".join(fields) + "}"
    if not isinstance(value, list):
        return _dumps(value)
    if len(value) <= JSON_SLICE:
        return "[" + ", ".join(encode_json(entry) for entry in value) + "]"
    slices = (value[start : start + JSON_SLICE] for start in range(0, len(value), JSON_SLICE))
    return "[" + ", ".join(_dumps(part)[1:-1] for part in slices) + "]"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class LogprobFormat:
    """Log-probabilities in the formats of the two endpoints."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def token(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def chat(self, scores: Sequence[Score]) -> dict[str, Any]:
        return {"content": [self._one(score) for score in scores], "refusal": None}

    def _one(self, score: Score) -> dict[str, Any]:
        top = [self._pair(token, logprob) for token, logprob in score.top]
        return {**self._pair(score.token, score.logprob), "top_logprobs": top}

    def _pair(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}

    def completion(self, scores: Sequence[Score], offsets: Sequence[int]) -> dict[str, Any]:
        tops: list[dict[str, float] | None] = []
        for score in scores:
            if score.logprob is None:
                tops.append(None)
                continue
            top: dict[str, float] = {}
            for token, logprob in (*score.top, (score.token, score.logprob)):
                top.setdefault(self.token(token), logprob)
            tops.append(top)
        return {
            "tokens": [self.token(score.token) for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": tops,
            "text_offset": list(offsets),
        }

    def offsets(self, scores: Sequence[Score], start: int) -> list[int]:
        """Offset of each token in the text, the first at `start`."""
        offsets, offset = [], start
        for score in scores:
            offsets.append(offset)
            offset += len(self.token(score.token))
        return offsets

    def prompt(self, prompt: TokenizedPrompt) -> str:
        return prompt.text if prompt.text is not None else str(self._tokenizer.decode(list(prompt.tokens)))

    def prompt_offsets(self, prompt: TokenizedPrompt, scores: Sequence[Score]) -> list[int]:
        return list(prompt.offsets) if prompt.offsets is not None else self.offsets(scores, 0)
