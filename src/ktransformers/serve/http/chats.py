"""/v1/chat/completions: messages in, a message or tool calls out.

A stream emits text as it is generated until a tool call begins; calls are emitted complete, at the end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ktransformers.serve.http.answers import Completed, LogprobFormat, ResponseHeader, ResponseStream, sse_event
from ktransformers.serve.http.prepare import PreparedRequest
from ktransformers.serve.http.service import Service
from ktransformers.serve.http.tools import ToolCall, ToolCallSplitter, parse_bare_call, parse_calls


class ChatCompletion:
    """One chat request in progress."""

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
