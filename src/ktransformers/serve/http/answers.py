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
from ktransformers.serve.http.prepare import PreparedRequest, TokenizedPrompt
from ktransformers.serve.http.service import Service
from ktransformers.serve.http.tools import ToolCall, ToolCallSplitter, parse_bare_call, parse_calls
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


class ChatCompletion:
    """One request to /v1/chat/completions in progress: messages in, a message or tool calls out. A stream emits text as
    it is generated until a tool call begins; calls are emitted complete, at the end."""

    def __init__(self, service: Service, prepared: PreparedRequest, responses: ResponseStream) -> None:
        self._prepared, self.responses = prepared, responses
        self._logprob_format = LogprobFormat(service.tokenizer)

    def _split(self, text: str) -> tuple[str | None, list[ToolCall]]:
        if self._prepared.bare_call:
            calls = parse_bare_call(text)
            return (None, calls) if calls else (text, [])
        if not self._prepared.parses_calls:
            return text, []
        before, calls = parse_calls(text, self._prepared.parameter_types)
        return before or None if calls else before, calls

    def document(self) -> dict[str, Any]:
        """The whole response, when all choices have ended."""
        head = ResponseHeader("chat.completion", self._prepared.model)
        choices = [self._choice(index, answer) for index, answer in enumerate(self.responses.answers)]
        return head(choices, usage=self.responses.usage(), **self._prompt_tokens())

    def _prompt_tokens(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._prepared.prompts[0].tokens)} if self._prepared.return_token_ids else {}

    def _choice(self, index: int, answer: Completed) -> dict[str, Any]:
        content, calls = self._split(answer.text)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = [call.to_json() for call in calls]
        logprobs = None if self._prepared.logprobs is None else self._logprob_format.chat(answer.scores)
        finish = "tool_calls" if calls else answer.finish
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    async def stream(self) -> AsyncIterator[str]:
        head = ResponseHeader("chat.completion.chunk", self._prepared.model)
        usage_field = {"usage": None} if self._prepared.usage_in_stream else {}
        splitters = [ToolCallSplitter() for _ in self.responses.answers]

        def event_of(
            index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None, **fields: Any
        ) -> str:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            return sse_event(head([choice], **usage_field, **fields))

        for choice in range(len(splitters)):
            yield event_of(choice, {"role": "assistant", "content": ""}, **self._prompt_tokens())
        async for choice, event in self.responses.events():
            text = event.text
            if self._prepared.bare_call:
                text = ""
            elif self._prepared.parses_calls:
                text = splitters[choice].add(text)
            wants_scores = self._prepared.logprobs is not None and event.scores
            scores = self._logprob_format.chat(event.scores) if wants_scores else None
            if text or scores:
                yield event_of(choice, {"content": text}, scores)
            if event.finish is not None:
                rest, finish = self._final_delta(choice, splitters[choice], event.finish)
                if rest:
                    yield event_of(choice, rest)
                yield event_of(choice, {}, None, finish)
        if self._prepared.usage_in_stream:
            yield sse_event(head([], usage=self.responses.usage()))

    def _final_delta(self, choice: int, splitter: ToolCallSplitter, finish: str) -> tuple[dict[str, Any], str | None]:
        """The delta with what was held back, tool calls or text, and the finish reason."""
        held_text = self.responses.answers[choice].text if self._prepared.bare_call else splitter.end()
        _, calls = self._split(held_text) if held_text else (None, [])
        if calls:
            numbered = [{"index": number, **call.to_json()} for number, call in enumerate(calls)]
            return {"tool_calls": numbered}, "tool_calls"
        return ({"content": held_text} if held_text else {}), finish


class Completion:
    """One request to /v1/completions in progress: text or tokens in, text out, with `echo` and log-probabilities of the
    prompt for scoring."""

    def __init__(self, service: Service, prepared: PreparedRequest, responses: ResponseStream) -> None:
        self._prepared, self.responses = prepared, responses
        self._logprob_format = LogprobFormat(service.tokenizer)
        self._head = ResponseHeader("text_completion", prepared.model)

    def _prompt(self, choice: int) -> TokenizedPrompt:
        return self._prepared.prompts[choice // self._prepared.n]

    def document(self) -> dict[str, Any]:
        """The whole response, when all choices have ended."""
        choices = [self._choice(index, answer) for index, answer in enumerate(self.responses.answers)]
        return self._head(choices, usage=self.responses.usage())

    def _choice(self, index: int, answer: Completed) -> dict[str, Any]:
        prompt = self._prompt(index)
        echoed = self._logprob_format.prompt(prompt) if self._prepared.echo else ""
        logprobs = None
        if self._prepared.logprobs is not None:
            scores = [*answer.prompt_scores, *answer.scores]
            offsets = self._logprob_format.prompt_offsets(prompt, answer.prompt_scores) if answer.prompt_scores else []
            offsets += self._logprob_format.offsets(answer.scores, len(echoed))
            logprobs = self._logprob_format.completion(scores, offsets)
        return {"index": index, "text": echoed + answer.text, "logprobs": logprobs, "finish_reason": answer.finish}

    async def stream(self) -> AsyncIterator[str]:
        text_lengths: dict[int, int] = {}  # index of a choice -> length of its text so far
        async for choice_index, event in self.responses.events():
            if event.prompt_scores:  # of thousands of tokens: not on the event loop
                part = await asyncio.to_thread(self._part, choice_index, event, text_lengths)
            else:
                part = self._part(choice_index, event, text_lengths)
            if part:
                yield part
        if self._prepared.usage_in_stream:
            yield sse_event(self._head([], usage=self.responses.usage()))

    def _part(self, choice_index: int, event: Event, text_lengths: dict[int, int]) -> str:
        """An event of the engine as an event of the stream; empty: it has nothing to tell."""
        text, scores, offsets = event.text, [*event.scores], []
        has_content = event.prompt_scores or event.tokens or event.finish
        if choice_index not in text_lengths and self._prepared.echo and has_content:
            prompt = self._prompt(choice_index)
            text = self._logprob_format.prompt(prompt) + text
            scores = [*event.prompt_scores, *scores]
            if event.prompt_scores:
                offsets = self._logprob_format.prompt_offsets(prompt, event.prompt_scores)
        start = text_lengths.get(choice_index, len(text) - len(event.text))
        text_lengths[choice_index] = text_lengths.get(choice_index, 0) + len(text)
        if not text and not scores and event.finish is None:
            return ""
        logprobs = None
        if self._prepared.logprobs is not None:
            offsets += self._logprob_format.offsets(event.scores, start)
            logprobs = self._logprob_format.completion(scores, offsets)
        choice = {"index": choice_index, "text": text, "logprobs": logprobs, "finish_reason": event.finish}
        usage_field = {"usage": None} if self._prepared.usage_in_stream else {}
        return sse_event(self._head([choice], **usage_field))
