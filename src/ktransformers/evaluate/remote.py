"""A model behind an OpenAI-compatible URL.

Answers to chat prompts come from /v1/chat/completions, where the server applies its template. Log-probabilities come
from /v1/completions with `echo`, which returns those of the given text. With a tokenizer (`--tokenizer`) the prompt is
sent as token ids, after the first one was compared with the tokens that the server itself makes of the messages
(`return_token_ids`, where it has that): an adapter may be served with a template of its own. Without a tokenizer, plain
text is sent and the continuation's tokens are identified by their offsets, and chat prompts cannot be scored, because
only the server knows its template. One extra token is requested, because not every server accepts `max_tokens: 0`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ktransformers.evaluate.backend import EvalPrompt, Likelihood, PromptTokenizer, Question
from ktransformers.ground.client import Client
from ktransformers.ground.errors import InputError, KTError

MAX_ATTEMPTS, TIMEOUT_SECONDS = 4, 600.0


def connect(url: str, key: str | None = None) -> Client:
    """A client that repeats requests while the server is busy."""
    return Client(url, key, attempts=MAX_ATTEMPTS, timeout=TIMEOUT_SECONDS)


def model_roots(endpoint: Client) -> dict[str, str]:
    """Served names with the directory that each comes from, "" where the server does not say."""
    return {str(entry["id"]): str(entry.get("root") or "") for entry in endpoint.request("/v1/models")["data"]}


class RemoteBackend:
    def __init__(self, endpoint: Client, model: str, tokens: PromptTokenizer | None = None, parallel: int = 8) -> None:
        self._endpoint, self._model, self._tokens, self._parallel = endpoint, model, tokens, parallel
        self._prompts_compared = False

    @property
    def name(self) -> str:
        return f"{self._endpoint.url} {self._model}"

    def generate(self, prompts: Sequence[EvalPrompt], max_new_tokens: int) -> list[str]:
        common = {"model": self._model, "max_tokens": max_new_tokens, "temperature": 0, "seed": 0}

        def answer(prompt: EvalPrompt) -> str:
            if prompt.chat:
                reply = self._endpoint.request("/v1/chat/completions", {**common, "messages": prompt.messages()})
                return str(reply["choices"][0]["message"]["content"] or "").strip()
            reply = self._endpoint.request("/v1/completions", {**common, "prompt": prompt.plain_text()})
            return str(reply["choices"][0]["text"]).strip()

        with ThreadPoolExecutor(self._parallel) as pool:
            return list(pool.map(answer, prompts))

    def likelihoods(self, questions: Sequence[Question]) -> list[list[Likelihood]]:
        # One continuation of every prompt first, so that a server with a prefix cache has the prompts for the others.
        chat = next((question.prompt for question in questions if question.prompt.chat), None)
        if self._tokens is not None and chat is not None and not self._prompts_compared:
            self._compare_prompt(self._tokens, chat)
            self._prompts_compared = True
        numbers = [(index, text) for index, one in enumerate(questions) for text in range(len(one.continuations))]
        numbers.sort(key=lambda pair: pair[1])

        def score(pair: tuple[int, int]) -> Likelihood:
            question = questions[pair[0]]
            return self._likelihood(question.prompt, question.continuations[pair[1]])

        with ThreadPoolExecutor(self._parallel) as pool:
            scores = dict(zip(numbers, pool.map(score, numbers), strict=True))
        return [[scores[index, text] for text in range(len(one.continuations))] for index, one in enumerate(questions)]

    def _compare_prompt(self, tokens: PromptTokenizer, prompt: EvalPrompt) -> None:
        """Raises InputError if the server renders the messages otherwise than the tokenizer that was given."""
        body = {"model": self._model, "messages": prompt.messages(), "max_tokens": 1, "temperature": 0}
        reply = self._endpoint.request("/v1/chat/completions", {**body, "return_token_ids": True})
        served, ours = reply.get("prompt_token_ids"), tokens.encode(tokens.render(prompt), chat=True)
        if served is not None and list(served) != ours:
            raise InputError(
                "tokenizer",
                f"one that renders a prompt as {len(ours)} tokens, where {self._model} is served {len(served)} others",
                "the tokenizer and template that the server uses",
                "pass --tokenizer with the directory of the adapter, and evaluate it alone",
            )

    def _likelihood(self, prompt: EvalPrompt, continuation: str) -> Likelihood:
        body: dict[str, Any] = {"model": self._model, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        if self._tokens is not None:
            ids, start = self._tokens.split(prompt, continuation)
            reply = self._logprobs({**body, "prompt": ids})
            chosen = reply["token_logprobs"][start : len(ids)]
        elif prompt.chat:
            raise InputError(
                "tokenizer",
                f"none, and chat prompts to score at {self._endpoint.url}",
                "the directory of the served model's tokenizer",
                "pass --tokenizer DIR, or set `format: plain` in the task",
            )
        else:
            prompt_text = prompt.plain_text()
            reply = self._logprobs({**body, "prompt": prompt_text + continuation})
            end = len(prompt_text) + len(continuation)
            chosen = [
                score
                for offset, score in zip(reply["text_offset"], reply["token_logprobs"], strict=True)
                if len(prompt_text) <= offset < end and score is not None
            ]
        if not chosen or any(score is None for score in chosen):
            raise KTError(f"{self._endpoint.url}: no log-probabilities for the prompt; the server must support `echo`")
        return Likelihood(sum(chosen), len(chosen))

    def _logprobs(self, body: dict[str, Any]) -> Any:
        logprobs = self._endpoint.request("/v1/completions", body)["choices"][0].get("logprobs")
        if not logprobs:
            raise KTError(f"{self._endpoint.url}: an answer without `logprobs`; the server must support `echo`")
        return logprobs
