"""/v1/completions: text or tokens in, text out, with `echo` and log-probabilities of the prompt for scoring."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ktransformers.serve.http.answers import (
    SSE_DONE,
    Completed,
    LogprobFormat,
    ResponseHeader,
    ResponseStream,
    sse_event,
)
from ktransformers.serve.http.protocol import CompletionRequest
from ktransformers.serve.http.service import ApiError, Service, TokenizedPrompt


class Completion:
    """One completion request in progress."""

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        self._request, self._logprob_format = request, LogprobFormat(service.tokenizer)
        self._prompts = service.tokenize_prompts(request.prompt)
        self._n = request.n or 1
        requests = [service.completion(request, prompt) for prompt in self._prompts]
        self._head = ResponseHeader("text_completion", request.model)
        self.responses = ResponseStream(service.engine, service.tokenizer, requests, self._n)

    def _prompt(self, choice: int) -> TokenizedPrompt:
        return self._prompts[choice // self._n]

    async def complete(self) -> dict[str, Any]:
        answers = await self.responses.complete()
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return self._head(choices, usage=self.responses.usage())

    def _choice(self, index: int, answer: Completed) -> dict[str, Any]:
        prompt = self._prompt(index)
        echoed = self._logprob_format.prompt(prompt) if self._request.echo else ""
        logprobs = None
        if self._request.logprobs is not None:
            scores = [*answer.prompt_scores, *answer.scores]
            offsets = self._logprob_format.prompt_offsets(prompt, answer.prompt_scores) if answer.prompt_scores else []
            offsets += self._logprob_format.offsets(answer.scores, len(echoed))
            logprobs = self._logprob_format.completion(scores, offsets)
        return {"index": index, "text": echoed + answer.text, "logprobs": logprobs, "finish_reason": answer.finish}

    async def stream(self) -> AsyncIterator[str]:
        text_lengths: dict[int, int] = {}  # index of a choice -> length of its text so far
        usage_field = {"usage": None} if self._request.usage_in_stream else {}
        try:
            async for choice_index, event in self.responses.events():
                text, scores, offsets = event.text, [*event.scores], []
                has_content = event.prompt_scores or event.tokens or event.finish
                if choice_index not in text_lengths and self._request.echo and has_content:
                    prompt = self._prompt(choice_index)
                    text = self._logprob_format.prompt(prompt) + text
                    scores = [*event.prompt_scores, *scores]
                    if event.prompt_scores:
                        offsets = self._logprob_format.prompt_offsets(prompt, event.prompt_scores)
                start = text_lengths.get(choice_index, len(text) - len(event.text))
                text_lengths[choice_index] = text_lengths.get(choice_index, 0) + len(text)
                if not text and not scores and event.finish is None:
                    continue
                logprobs = None
                if self._request.logprobs is not None:
                    offsets += self._logprob_format.offsets(event.scores, start)
                    logprobs = self._logprob_format.completion(scores, offsets)
                choice = {"index": choice_index, "text": text, "logprobs": logprobs, "finish_reason": event.finish}
                yield sse_event(self._head([choice], **usage_field))
            if self._request.usage_in_stream:
                yield sse_event(self._head([], usage=self.responses.usage()))
        except ApiError as error:  # status 200 was sent already: the error is an event of the stream
            yield sse_event(error.to_json())
        yield SSE_DONE
