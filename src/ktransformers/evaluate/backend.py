"""The interface of an evaluated model: generate answers, and score given continuations.

Both methods take text. A chat prompt is rendered with the model's own template, for an adapter with the one that it
carries. A continuation's tokens are those of the full text after the prompt's, so that the split never changes the
tokenisation; after the template of an adapter they are those of the continuation alone, as in training. Decoding is
greedy only, so that results are deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ktransformers.adapters.adapter_template import AdapterTemplate, with_ends
from ktransformers.ground.errors import InputError


@dataclass(frozen=True)
class EvalPrompt:
    text: str
    system: str | None = None
    chat: bool = True
    history: tuple[tuple[str, str], ...] = ()  # earlier turns: (user, assistant)

    def messages(self) -> list[dict[str, str]]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        roles = ("user", "assistant")
        turns = [{"role": roles[index], "content": turn[index]} for turn in self.history for index in (0, 1)]
        return [*first, *turns, {"role": "user", "content": self.text}]

    def plain_text(self) -> str:
        return "\n".join(message["content"] for message in self.messages())


@dataclass(frozen=True)
class Question:
    """A prompt and the continuations to score."""

    prompt: EvalPrompt
    continuations: tuple[str, ...]


@dataclass(frozen=True)
class Likelihood:
    logprob: float  # natural logarithm, summed over the continuation's tokens
    tokens: int


class Backend(Protocol):
    @property
    def name(self) -> str:
        """What the answers depend on: model and adapter; part of a run's fingerprint."""

    def generate(self, prompts: Sequence[EvalPrompt], max_new_tokens: int) -> list[str]: ...

    def likelihoods(self, questions: Sequence[Question]) -> list[list[Likelihood]]: ...


class PromptTokenizer:
    """A transformers tokenizer as both backends use it."""

    def __init__(self, tokenizer: Any, source: str, template: AdapterTemplate | None = None) -> None:
        self.tokenizer, self._source = tokenizer, source
        self.template = None if template is None else with_ends(template, tokenizer)

    def render(self, prompt: EvalPrompt) -> str:
        if not prompt.chat:
            return prompt.plain_text()
        if self.template is not None:
            return self.template.render(self.tokenizer, prompt.messages())
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(
                self._source,
                "a tokenizer without a chat template",
                "one with a template",
                "set `format: plain` in the task",
            )
        text: str = self.tokenizer.apply_chat_template(prompt.messages(), tokenize=False, add_generation_prompt=True)
        return text

    def encode(self, text: str, chat: bool) -> list[int]:
        """Plain text gets the tokenizer's special tokens; a chat template contains its own."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=not chat)["input_ids"]
        return ids

    def split(self, prompt: EvalPrompt, continuation: str) -> tuple[list[int], int]:
        """(tokens of prompt and continuation, number of prompt tokens); the first token is never scored."""
        prompt_text = self.render(prompt)
        if prompt.chat and self.template is not None:  # as in training, where prompt and answer are tokenised apart
            prompt_ids = self.encode(prompt_text, chat=True)
            return [*prompt_ids, *self.encode(continuation, chat=True)], len(prompt_ids)
        ids = self.encode(prompt_text + continuation, prompt.chat)
        start = len(self.encode(prompt_text, prompt.chat)) if prompt_text else 0
        return ids, max(1, min(start, len(ids) - 1))
