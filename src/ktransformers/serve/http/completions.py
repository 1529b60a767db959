"""/v1/completions: text or tokens in, text out, with `echo` and log-probabilities of the prompt for those who score."""

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
from ktransformers.serve.http.protocol import CompletionRequest
from ktransformers.serve.http.service import ApiError, Service, TokenizedPrompt


class Completion:
    """One request under way."""

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        self._request, self._words = request, LogprobFormat(service.tokenizer)
        self._prompts = service.prompts(request.prompt)
        self._n = request.n or 1
        asks = [service.completion(request, prompt) for prompt in self._prompts]
        self._head = ResponseHeader("text_completion", request.model)
        self.reading = ResponseStream(service.engine, service.tokenizer, asks, self._n)

    def _prompt(self, place: int) -> TokenizedPrompt:
        return self._prompts[place // self._n]

    async def whole(self) -> dict[str, Any]:
        answers = await self.reading.whole()
        choices = [self._choice(place, answer) for place, answer in enumerate(answers)]
        return self._head(choices, usage=self.reading.usage())

    def _choice(self, place: int, answer: Completed) -> dict[str, Any]:
        prompt = self._prompt(place)
        before = self._words.prompt(prompt) if self._request.echo else ""
        logprobs = None
        if self._request.logprobs is not None:
            scores = [*answer.prompt_scores, *answer.scores]
            offsets = self._words.prompt_offsets(prompt, answer.prompt_scores) if answer.prompt_scores else []
            offsets += self._words.offsets(answer.scores, len(before))
            logprobs = self._words.completion(scores, offsets)
        finish = FINISH.get(answer.finish or "", answer.finish)
        return {"index": place, "text": before + answer.text, "logprobs": logprobs, "finish_reason": finish}

    async def stream(self) -> AsyncIterator[str]:
        begun: dict[int, int] = {}  # place -> length of the text so far
        more = {"usage": None} if self._request.usage_in_stream else {}
        try:
            async for place, event in self.reading.events():
                text, scores, offsets = event.text, [*event.scores], []
                if place not in begun and self._request.echo and (event.prompt_scores or event.tokens or event.finish):
                    prompt = self._prompt(place)
                    text = self._words.prompt(prompt) + text
                    scores = [*event.prompt_scores, *scores]
                    if event.prompt_scores:
                        offsets = self._words.prompt_offsets(prompt, event.prompt_scores)
                start = begun.get(place, len(text) - len(event.text))
                begun[place] = begun.get(place, 0) + len(text)
                if not text and not scores and event.finish is None:
                    continue
                logprobs = None
                if self._request.logprobs is not None:
                    offsets += self._words.offsets(event.scores, start)
                    logprobs = self._words.completion(scores, offsets)
                finish = FINISH.get(event.finish or "", event.finish)
                choice = {"index": place, "text": text, "logprobs": logprobs, "finish_reason": finish}
                yield line(self._head([choice], **more))
            if self._request.usage_in_stream:
                yield line(self._head([], usage=self.reading.usage()))
        except ApiError as error:  # the head was sent with 200; the stream says it
            yield line(error.to_json())
        yield DONE
