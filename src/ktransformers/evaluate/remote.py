"""A model behind an OpenAI-compatible URL.

Answers to chat prompts come from /v1/chat/completions, where the server applies its template. Log-probabilities come
from /v1/completions with `echo`, which returns those of the text it was given. With a tokenizer at hand (`--tokenizer`)
the prompt is sent as tokens, and nothing is left to how a server cuts text; without one, plain text is sent and the
continuation's tokens are found by their offsets, and a chat prompt cannot be scored, because only the server knows its
template. One token more than needed is asked for: not every server takes `max_tokens: 0`.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ktransformers.errors import InputError, KTError
from ktransformers.evaluate.backend import EvalPrompt, Likelihood, PromptTokenizer, Question

MAX_ATTEMPTS, FIRST_RETRY_SECONDS = 4, 1.0  # a busy server answers 429 or 503; each wait is twice the last
RETRIED_STATUS = {408, 429, 500, 502, 503, 504}


class Endpoint:
    """One server: JSON in, JSON out, tried again while it is busy."""

    def __init__(self, url: str, key: str | None = None, timeout: float = 600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key, self._timeout = key, timeout

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(MAX_ATTEMPTS):
            try:
                request = urllib.request.Request(self.url + path, data, headers)
                with urllib.request.urlopen(request, timeout=self._timeout) as reply:
                    return json.loads(reply.read())
            except urllib.error.HTTPError as error:
                if error.code not in RETRIED_STATUS or attempt == MAX_ATTEMPTS - 1:
                    said = error.read().decode(errors="replace")[:300]
                    raise KTError(f"{self.url}{path}: the server answered {error.code}: {said}") from error
            except (OSError, ValueError) as error:
                if attempt == MAX_ATTEMPTS - 1:
                    raise InputError(
                        self.url + path, f"no answer ({error})", "an OpenAI-compatible server", "is it running?"
                    ) from error
            time.sleep(FIRST_RETRY_SECONDS * 2**attempt)
        raise AssertionError("every path above returns or raises")

    def models(self) -> list[str]:
        return [str(entry["id"]) for entry in self.ask("/v1/models")["data"]]


class RemoteBackend:
    def __init__(
        self, endpoint: Endpoint, model: str, tokens: PromptTokenizer | None = None, parallel: int = 8
    ) -> None:
        self._endpoint, self._model, self._tokens, self._parallel = endpoint, model, tokens, parallel

    @property
    def name(self) -> str:
        return f"{self._endpoint.url} {self._model}"

    def generate(self, prompts: Sequence[EvalPrompt], max_new_tokens: int) -> list[str]:
        common = {"model": self._model, "max_tokens": max_new_tokens, "temperature": 0, "seed": 0}

        def answer(prompt: EvalPrompt) -> str:
            if prompt.chat:
                reply = self._endpoint.ask("/v1/chat/completions", {**common, "messages": prompt.messages()})
                return str(reply["choices"][0]["message"]["content"] or "").strip()
            text = prompt.text if prompt.system is None else f"{prompt.system}\n{prompt.text}"
            reply = self._endpoint.ask("/v1/completions", {**common, "prompt": text})
            return str(reply["choices"][0]["text"]).strip()

        with ThreadPoolExecutor(self._parallel) as pool:
            return list(pool.map(answer, prompts))

    def likelihoods(self, questions: Sequence[Question]) -> list[list[Likelihood]]:
        # First one continuation of every prompt, then the others: a server that keeps prompts has them by then.
        places = [(at, nth) for at, one in enumerate(questions) for nth in range(len(one.continuations))]
        places.sort(key=lambda place: place[1])
        with ThreadPoolExecutor(self._parallel) as pool:
            found = pool.map(
                lambda at: self._likelihood(questions[at[0]].prompt, questions[at[0]].continuations[at[1]]), places
            )
            scores = dict(zip(places, found, strict=True))
        return [[scores[at, nth] for nth in range(len(one.continuations))] for at, one in enumerate(questions)]

    def _likelihood(self, prompt: EvalPrompt, continuation: str) -> Likelihood:
        body: dict[str, Any] = {"model": self._model, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        if self._tokens is not None:
            ids, start = self._tokens.split(prompt, continuation)
            found = self._logprobs({**body, "prompt": ids})
            chosen = found["token_logprobs"][start : len(ids)]
        elif prompt.chat:
            raise InputError(
                "tokenizer",
                f"none, and chat prompts to score at {self._endpoint.url}",
                "the directory of the served model's tokenizer",
                "pass --tokenizer DIR, or set `format: plain` in the task",
            )
        else:
            before = prompt.text if prompt.system is None else f"{prompt.system}\n{prompt.text}"
            found = self._logprobs({**body, "prompt": before + continuation})
            whole = len(before) + len(continuation)
            chosen = [
                score
                for place, score in zip(found["text_offset"], found["token_logprobs"], strict=True)
                if len(before) <= place < whole and score is not None
            ]
        if not chosen or any(score is None for score in chosen):
            raise KTError(f"{self._endpoint.url}: no log-probabilities for the prompt; the server must support `echo`")
        return Likelihood(sum(chosen), len(chosen))

    def _logprobs(self, body: dict[str, Any]) -> Any:
        found = self._endpoint.ask("/v1/completions", body)["choices"][0].get("logprobs")
        if not found:
            raise KTError(f"{self._endpoint.url}: an answer without `logprobs`; the server must support `echo`")
        return found
