"""What a model must be able to do to be judged: answer prompts, and say how likely given continuations are.

Both sides of the protocol speak text. A chat prompt becomes tokens by the model's own template; a continuation's tokens
are those that the whole text has beyond the prompt's own, so that the split between the two never changes how the text
is cut. Greedy decoding only: a judged number should not depend on dice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ktransformers.errors import InputError


@dataclass(frozen=True)
class EvalPrompt:
    text: str
    system: str | None = None
    chat: bool = True

    def messages(self) -> list[dict[str, str]]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, {"role": "user", "content": self.text}]


@dataclass(frozen=True)
class Question:
    """How likely are these continuations of the prompt?"""

    prompt: EvalPrompt
    continuations: tuple[str, ...]


@dataclass(frozen=True)
class Likelihood:
    logprob: float  # natural, summed over the tokens of the continuation
    tokens: int


class Backend(Protocol):
    @property
    def name(self) -> str:
        """What the answers depend on: model and adapter; part of a run's fingerprint."""

    def generate(self, prompts: Sequence[EvalPrompt], max_new_tokens: int) -> list[str]: ...

    def likelihoods(self, questions: Sequence[Question]) -> list[list[Likelihood]]: ...


class PromptTokenizer:
    """A tokenizer of transformers, as both backends use it."""

    def __init__(self, tokenizer: Any, source: str) -> None:
        self.tokenizer, self._source = tokenizer, source

    def render(self, prompt: EvalPrompt) -> str:
        if not prompt.chat:
            return prompt.text if prompt.system is None else f"{prompt.system}\n{prompt.text}"
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(
                self._source, "a tokenizer without a chat template", "one", "set `format: plain` in the task"
            )
        text: str = self.tokenizer.apply_chat_template(prompt.messages(), tokenize=False, add_generation_prompt=True)
        return text

    def encode(self, text: str, chat: bool) -> list[int]:
        """A template writes its own special tokens; plain text gets those that the tokenizer adds."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=not chat)["input_ids"]
        return ids

    def split(self, prompt: EvalPrompt, continuation: str) -> tuple[list[int], int]:
        """(tokens of prompt and continuation, how many of them are the prompt's); the first token is never scored."""
        before = self.render(prompt)
        ids = self.encode(before + continuation, prompt.chat)
        start = len(self.encode(before, prompt.chat)) if before else 0
        return ids, max(1, min(start, len(ids) - 1))
