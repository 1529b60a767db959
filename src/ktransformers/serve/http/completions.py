"""/v1/completions: text or tokens in, text out, with `echo` and log-probabilities of the prompt for scoring."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ktransformers.serve.http.answers import Completed, LogprobFormat, ResponseHeader, ResponseStream, sse_event
from ktransformers.serve.http.prepare import PreparedRequest, TokenizedPrompt
from ktransformers.serve.http.service import Service
from ktransformers.serve.scheduler.sequence import Event


class Completion:
    """One completion request in progress."""

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
