"""Events of the engine as the answer to a request: complete or as a stream, of any door and of /v1/completions.

A request has one or more sequences; their events come through one queue, each with the index of its choice. When the
client disconnects, all sequences of the request are cancelled. `DoorAnswer` drives the emitter of a door: the text of
each choice goes through a parser of the family's format, and what comes out goes to the emitter.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ktransformers.serve.doors.answer_events import CallEnd, Finish, TokenScores, Usage
from ktransformers.serve.doors.door import AnswerHead, Door
from ktransformers.serve.http.boundary import api_error
from ktransformers.serve.http.choice_parser import ChoiceParser
from ktransformers.serve.http.error import UNAVAILABLE, ApiError
from ktransformers.serve.http.json_slices import SSE_DONE, encode_json, sse_event
from ktransformers.serve.http.prepare import PreparedRequest, TokenizedPrompt
from ktransformers.serve.http.service import Service
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
        self.unfinished = len(self.answers)
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

    async def next_event(self, idle_seconds: float | None = None) -> tuple[int, Event] | None:
        """The next event with the index of its choice; None if none has come for `idle_seconds`."""
        try:
            async with asyncio.timeout(idle_seconds):
                choice, event = await self._events.get()
        except TimeoutError:
            return None
        self.answers[choice].add(event)
        if event.finish == "error":
            raise ApiError(500, f"the answer could not be computed: {event.error}", code="engine_error")
        if event.finish == "out_of_memory":
            raise ApiError(503, event.error, code="out_of_memory")
        if event.finish == "unavailable":
            raise ApiError(503, event.error, code=UNAVAILABLE)
        if event.finish == "timeout":
            raise ApiError(504, "the answer was not complete in the time that the server allows", code="timeout")
        self.unfinished -= event.finish is not None
        return choice, event

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Events with the index of their choice, until all have ended. Closing the iterator early cancels the rest."""
        try:
            while self.unfinished:
                entry = await self.next_event()
                if entry is not None:
                    yield entry
        finally:
            self.cancel()

    def sampled(self, choice: int) -> list[int]:
        """The tokens of a choice, which may have more than its last event tells of."""
        return self._sequences[choice].new_tokens

    def cancel_choice(self, choice: int) -> None:
        """End one sequence; its last event is still to come."""
        self._engine.cancel(self._sequences[choice : choice + 1])

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


PING_SECONDS = 5.0  # without anything to send, after which a stream is kept alive


class DoorAnswer:
    """One request of a door in progress: events of the engine in, what the door's emitter makes of them out."""

    def __init__(
        self,
        door: Door,
        service: Service,
        prepared: PreparedRequest,
        parsers: Sequence[ChoiceParser],
        responses: ResponseStream,
        request_id: str,
    ) -> None:
        assert prepared.chat is not None
        self.responses, self._prepared, self._request_id = responses, prepared, request_id
        self._logprob_format = LogprobFormat(service.tokenizer)
        self._service, self._parsers = service, parsers
        self._single_call = not prepared.chat.parallel_calls
        self._ended: set[int] = set()  # choices that ended before their sequence did
        prompt = prepared.prompts[0].tokens
        head = AnswerHead(
            model=prepared.model or service.registry.served,
            request_id=request_id,
            choices=prepared.n,
            prompt_tokens=len(prompt),
            cached_tokens=None,
            echo=prepared.chat.echo,
            prompt_token_ids=prompt if prepared.chat.return_token_ids else (),
        )
        self._emitter = door.emitter(head)

    async def stream(self) -> AsyncIterator[str]:
        """Status 200 is sent before the first event, so an error is an event as well."""
        try:
            yield "".join(self._emitter.begin())
            while self.responses.unfinished:
                entry = await self.responses.next_event(PING_SECONDS)
                if text := self._emitter.ping() if entry is None else "".join(self._emit(*entry)):
                    yield text
            yield "".join(self._emitter.end(self._usage()))
        except Exception as error:
            yield "".join(self._emitter.fail(api_error(error, self._request_id)))
        finally:
            self.responses.cancel()

    async def complete(self) -> str:
        async for choice, event in self.responses.events():
            for _ in self._emit(choice, event):
                pass
        return await asyncio.to_thread(lambda: encode_json(self._emitter.document(self._usage())))

    def _emit(self, choice: int, event: Event) -> Iterator[str]:
        if choice in self._ended:
            return
        if event.scores and self._prepared.logprobs is not None:
            content = self._logprob_format.chat(event.scores)["content"]
            yield from self._emitter.event(choice, TokenScores(tuple(content)))
        events = self._parsers[choice].events(event)
        for one in events:
            yield from self._emitter.event(choice, one)
            if self._single_call and isinstance(one, CallEnd):
                self._ended.add(choice)
                if one is events[-1]:  # no other call has begun in these tokens
                    self._remember(choice, event, ended=False)
                self.responses.cancel_choice(choice)
                yield from self._emitter.finish(choice, Finish("stop"))
                return
        if event.finish is not None:
            if event.finish in ("stop", "length") and event.stop_string is None:
                self._remember(choice, event, ended=event.finish == "stop")
            by_string = event.stop_string in self._prepared.stop_strings
            finish = Finish("stop_string", event.stop_string) if by_string else Finish(event.finish)
            yield from self._emitter.finish(choice, finish)

    def _remember(self, choice: int, event: Event, *, ended: bool) -> None:
        """The answer up to this event."""
        said, tokens = self._parsers[choice].turn(), self.responses.sampled(choice)[: event.tokens]
        self._service.remember(self._prepared, said, tokens, ended=ended, cached=event.cached)

    def _usage(self) -> Usage:
        answers = self.responses.answers
        reasoning = sum(parser.reasoning_tokens for parser in self._parsers)
        return Usage(self.responses.prompt_tokens, answers[0].cached, sum(one.tokens for one in answers), reasoning)


class Completion:
    """One request to /v1/completions in progress: text or tokens in, text out, with `echo` and log-probabilities of the
    prompt for scoring."""

    def __init__(
        self,
        service: Service,
        prepared: PreparedRequest,
        parsers: Sequence[ChoiceParser],  # none: the answer is text
        responses: ResponseStream,
        request_id: str,
    ) -> None:
        self._prepared, self.responses, self._request_id = prepared, responses, request_id
        self._logprob_format = LogprobFormat(service.tokenizer)
        self._model = prepared.model or service.registry.served
        self._id, self._created = f"cmpl-{uuid.uuid4().hex}", int(time.time())

    def _head(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        shared = {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}
        return {**shared, "choices": choices, **fields}

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

    async def complete(self) -> str:
        await self.responses.complete()
        return await asyncio.to_thread(lambda: encode_json(self.document()))

    async def stream(self) -> AsyncIterator[str]:
        """Status 200 is sent before the first event, so an error is an event as well."""
        try:
            async for event in self._stream():
                yield event
        except Exception as error:
            yield sse_event(api_error(error, self._request_id).to_json())
        yield SSE_DONE

    async def _stream(self) -> AsyncIterator[str]:
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
