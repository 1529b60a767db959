"""/v1/chat/completions: messages in, a message out, or calls of the tools that were offered.

In a stream, text goes out as it comes until a call begins; a call goes out whole, at the end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ktransformers.serve.http.answers import (
    DONE,
    FINISH,
    Completed,
    LogprobFormat,
    ResponseHeader,
    ResponseStream,
    line,
)
from ktransformers.serve.http.protocol import ChatRequest
from ktransformers.serve.http.service import ApiError, Service
from ktransformers.serve.http.tools import CallsApart, ToolCall, read_bare_call, read_calls


class ChatCompletion:
    """One request under way."""

    def __init__(self, service: Service, request: ChatRequest) -> None:
        self._request, self._words = request, LogprobFormat(service.tokenizer)
        self._chat = service.chat(request)
        self._reads_calls = service.reads_calls(self._chat)
        self.reading = ResponseStream(service.engine, service.tokenizer, [self._chat.ask], request.n or 1)

    def _split(self, text: str) -> tuple[str | None, list[ToolCall]]:
        if self._chat.bare_call:
            calls = read_bare_call(text)
            return (None, calls) if calls else (text, [])
        if not self._reads_calls:
            return text, []
        before, calls = read_calls(text, self._chat.tools)
        return before or None if calls else before, calls

    async def whole(self) -> dict[str, Any]:
        answers = await self.reading.whole()
        head = ResponseHeader("chat.completion", self._request.model)
        choices = [self._choice(place, answer) for place, answer in enumerate(answers)]
        return head(choices, usage=self.reading.usage())

    def _choice(self, place: int, answer: Completed) -> dict[str, Any]:
        content, calls = self._split(answer.text)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = [call.to_json() for call in calls]
        logprobs = self._words.chat(answer.scores) if self._request.logprobs else None
        finish = "tool_calls" if calls else FINISH.get(answer.finish or "", answer.finish)
        return {"index": place, "message": message, "logprobs": logprobs, "finish_reason": finish}

    async def stream(self) -> AsyncIterator[str]:
        head = ResponseHeader("chat.completion.chunk", self._request.model)
        more = {"usage": None} if self._request.usage_in_stream else {}
        apart = [CallsApart() for _ in self.reading.answers]

        def part(place: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> str:
            choice = {"index": place, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            return line(head([choice], **more))

        try:
            for place in range(len(apart)):
                yield part(place, {"role": "assistant", "content": ""})
            async for place, event in self.reading.events():
                text = event.text
                if self._chat.bare_call:
                    text = ""
                elif self._reads_calls:
                    text = apart[place].add(text)
                scores = self._words.chat(event.scores) if self._request.logprobs and event.scores else None
                if text or scores:
                    yield part(place, {"content": text}, scores)
                if event.finish is not None:
                    rest, finish = self._rest(place, apart[place], event.finish)
                    if rest:
                        yield part(place, rest)
                    yield part(place, {}, None, finish)
            if self._request.usage_in_stream:
                yield line(head([], usage=self.reading.usage()))
        except ApiError as error:  # the head was sent with 200; the stream says it
            yield line(error.to_json())
        yield DONE

    def _rest(self, place: int, apart: CallsApart, finish: str) -> tuple[dict[str, Any], str | None]:
        """What was kept for the end, and how it ended."""
        held = self.reading.answers[place].text if self._chat.bare_call else apart.end()
        _, calls = self._split(held) if held else (None, [])
        if calls:
            listed = [{"index": number, **call.to_json()} for number, call in enumerate(calls)]
            return {"tool_calls": listed}, "tool_calls"
        return ({"content": held} if held else {}), FINISH.get(finish, finish)
