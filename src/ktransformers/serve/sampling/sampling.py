"""Settings of sampling (`draws.py` follows them), and the log-probabilities that are reported.

Reported log-probabilities are those of the model, before any setting, so that they mean the same for every request.
Each sequence has its own generator, so the result of a seed does not depend on the other sequences of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Below 1e-5, softmax in float32 gives the most likely token all of the probability."""
        return self.temperature < 1e-5

    @property
    def is_argmax(self) -> bool:
        """The token is the argmax of the logits as they are."""
        return self.greedy and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """By what this request has said before, or by a bias."""
        return self.has_penalties or bool(self.logit_bias)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class Score:
    """A token, its log-probability (None for the first of a prompt), and the most likely tokens at its position."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()

    def with_top(self, count: int) -> Score:
        return self if len(self.top) == count else Score(self.token, self.logprob, self.top[:count])


def make_generator(sampling: Sampling, index: int) -> torch.Generator:
    """`index`: of the completion within its request; each draws its own numbers."""
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed((sampling.seed + index * 0x9E3779B97F4A7C15) % 2**63)
    return generator


def score_tokens(logits: Tensor, tokens: Sequence[int], top: int) -> list[Score]:
    """Scores of tokens at the rows of `logits` [n, V], each with the `top` most likely tokens."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    if not top:
        return [Score(token, value) for token, value in zip(tokens, chosen, strict=True)]
    values, ids = logprobs.topk(top) if top > 1 else logprobs.max(-1, keepdim=True)  # max reads a row once
    return [
        Score(token, value, tuple(zip(row_ids, row, strict=True)))
        for token, value, row_ids, row in zip(tokens, chosen, ids.tolist(), values.tolist(), strict=True)
    ]
