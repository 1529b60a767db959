"""From logits `[V]` to a token: penalties, grammar, temperature, top-k, min-p, top-p, in that order, and what is
reported.

Reported log-probabilities are those of the model itself, before any of this, so that they mean the same for every
request. Each sequence draws from a generator of its own: what a seed gives does not depend on who else is served.
"""

from __future__ import annotations

from collections import Counter
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
        """Below 1e-5 the most likely token has all the probability that float32 can tell apart."""
        return self.temperature < 1e-5

    @property
    def plain(self) -> bool:
        """Greedy, and nothing changes the logits."""
        return self.greedy and not self.penalises and not self.logit_bias

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class Score:
    """A token with its log-probability, None for the first of a prompt, and the most likely ones in its place."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()

    def with_top(self, count: int) -> Score:
        return self if len(self.top) == count else Score(self.token, self.logprob, self.top[:count])


def generator(sampling: Sampling, index: int) -> torch.Generator:
    """`index` tells the answers to one request apart."""
    made = torch.Generator()
    if sampling.seed is None:
        made.seed()
    else:
        made.manual_seed((sampling.seed + index * 0x9E3779B97F4A7C15) % 2**63)
    return made


def choose(
    logits: Tensor,
    sampling: Sampling,
    prompt: Sequence[int],
    new: Sequence[int],
    draw: torch.Generator,
    allowed: Tensor | None = None,
) -> int:
    """`logits` [V] float32; `allowed` [V] is what a grammar permits."""
    if sampling.plain and allowed is None:
        return int(logits.argmax())
    logits = logits.cpu().clone()
    if sampling.penalises:
        _penalise(logits, sampling, prompt, new)
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if allowed is not None:
        logits.masked_fill_(~allowed, -torch.inf)
    if sampling.greedy:
        return int(logits.argmax())
    logits /= sampling.temperature
    order: Tensor | None = None
    if 0 < sampling.top_k < logits.numel():
        logits, order = logits.topk(sampling.top_k)
    shares = logits.softmax(-1)
    if sampling.min_p > 0:
        shares = shares.masked_fill(shares < sampling.min_p * shares.max(), 0)
    if sampling.top_p < 1:
        if order is None:
            shares, order = shares.sort(descending=True)
        before = shares.cumsum(-1) - shares
        beyond = before >= sampling.top_p * shares.sum()
        beyond[0] = False  # one is always left, however small top_p is
        shares = shares.masked_fill(beyond, 0)
    picked = int(torch.multinomial(shares, 1, generator=draw))
    return picked if order is None else int(order[picked])


def _penalise(logits: Tensor, sampling: Sampling, prompt: Sequence[int], new: Sequence[int]) -> None:
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *new}))
        found, penalty = logits[seen], sampling.repetition_penalty
        logits[seen] = torch.where(found > 0, found / penalty, found * penalty)
    if new and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(new)
        where, often = torch.tensor(list(counts)), torch.tensor(list(counts.values()), dtype=torch.float32)
        logits[where] -= sampling.presence_penalty + sampling.frequency_penalty * often


def scores(logits: Tensor, tokens: Sequence[int], top: int) -> list[Score]:
    """Of tokens at rows of `logits` [n, V], each with the `top` most likely."""
    logs = logits.log_softmax(-1)
    chosen = logs.gather(-1, torch.tensor(tokens, device=logs.device)[:, None])[:, 0].tolist()
    if not top:
        return [Score(token, value) for token, value in zip(tokens, chosen, strict=True)]
    values, ids = logs.topk(top) if top > 1 else logs.max(-1, keepdim=True)  # which reads a row once
    return [
        Score(token, value, tuple(zip(row_ids, row, strict=True)))
        for token, value, row_ids, row in zip(tokens, chosen, ids.tolist(), values.tolist(), strict=True)
    ]
