"""Settings of sampling, the tokens that they give, and the log-probabilities that are reported.

Reported log-probabilities are those of the model, before any setting, so that they mean the same for every request.
Each sequence has its own generator, so the result of a seed does not depend on the other sequences of a batch.

Tokens from logits: penalties, grammar, temperature, top-k, min-p, top-p, in that order.

A row is drawn with one number u in [0, 1): the first token at which the sum of probabilities exceeds u times their sum.
That reads a row a few times, on the device that has it and for many sampled sequences of a step at once; a random
number for each of V tokens, or a sort of V numbers, takes longer than a decode step. top-k and top-p look at the
CANDIDATES most likely tokens; a nucleus that does not end among these is found by sorting that row. What a row gives
depends on its own logits, settings and u, not on the other rows: sums have one order, and of tokens that are equally
likely, which logits in bf16 often are, the one with the smaller id comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ktransformers.ground.errors import KTError


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


CANDIDATES = 256
ROWS_AT_ONCE = 32  # their copies, about 40 bytes a logit, are within what the plan counts for scores (SCORED_ROWS)


def sample_token(
    logits: Tensor,
    sampling: Sampling,
    prompt: Sequence[int],
    new_tokens: Sequence[int],
    rng: torch.Generator,
    allowed: Tensor | None = None,
) -> int:
    """`logits` float32 [V]; `allowed` bool [V]: tokens that a grammar permits."""
    if sampling.is_argmax and allowed is None:
        return int(logits.argmax())
    if sampling.changes_logits or allowed is not None:
        logits = logits.cpu().clone()
    if sampling.has_penalties:
        _apply_penalties(logits, sampling, prompt, new_tokens)
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if allowed is not None:
        logits.masked_fill_(~allowed, -torch.inf)
    if sampling.greedy:
        return int(logits.argmax())
    (drawn,) = draw_tokens([logits], [sampling], [uniform(rng)])
    if drawn is None:
        raise KTError("no token can be drawn: logits are not numbers, or no token is allowed")
    return drawn


def uniform(rng: torch.Generator) -> float:
    """The number that a token is drawn with."""
    return float(torch.rand((), generator=rng, dtype=torch.float64))


def _apply_penalties(logits: Tensor, sampling: Sampling, prompt: Sequence[int], new_tokens: Sequence[int]) -> None:
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *new_tokens}))
        logits_seen, penalty = logits[seen], sampling.repetition_penalty
        logits[seen] = torch.where(logits_seen > 0, logits_seen / penalty, logits_seen * penalty)
    if new_tokens and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(new_tokens)
        tokens, occurrences = torch.tensor(list(counts)), torch.tensor(list(counts.values()), dtype=torch.float32)
        logits[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * occurrences


def draw_tokens(logits: Sequence[Tensor], settings: Sequence[Sampling], uniforms: Sequence[float]) -> list[int | None]:
    """`logits` [V] each, of which settings change nothing; None: the row has no probabilities."""
    tokens: list[int | None] = [None] * len(settings)
    vocabulary = logits[0].shape[0]
    draws = [_draw_of(one, vocabulary) for one in settings]
    for draw in dict.fromkeys(draws):
        rows = [row for row, other in enumerate(draws) if other is draw]
        for first in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[first : first + ROWS_AT_ONCE]
            scaled = torch.stack([logits[row] for row in part]).float()
            scaled /= _column([settings[row].temperature for row in part], scaled).float()
            drawn = draw(scaled, [settings[row] for row in part], _column([uniforms[row] for row in part], scaled))
            for row, token in zip(part, drawn, strict=True):
                tokens[row] = token
    return tokens


def _draw_of(sampling: Sampling, vocabulary: int) -> Callable[[Tensor, Sequence[Sampling], Tensor], list[int | None]]:
    if 0 < sampling.top_k < vocabulary:
        return _draw_from_top_k
    return _draw_from_nucleus if sampling.top_p < 1 else _draw_from_all


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _without_unlikely(weights: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """min-p: tokens that are far less likely than the most likely one are left out."""
    if not any(one.min_p > 0 for one in settings):
        return weights
    least = _column([one.min_p for one in settings], weights).float() * weights.amax(-1, keepdim=True)
    return weights.masked_fill(weights < least, 0)


def _draw_from_all(scaled: Tensor, settings: Sequence[Sampling], uniforms: Tensor) -> list[int | None]:
    places, valid = _choose(_without_unlikely(scaled.softmax(-1), settings), uniforms)
    return _read(places, valid)


def _draw_from_top_k(scaled: Tensor, settings: Sequence[Sampling], uniforms: Tensor) -> list[int | None]:
    limits = [one.top_k for one in settings]
    values = scaled.topk(max(limits)).values
    behind = torch.arange(max(limits), device=scaled.device) >= _column(limits, scaled)
    weights = _without_unlikely(values.masked_fill(behind, -torch.inf).softmax(-1), settings)
    places, valid = _choose(_nucleus(weights, _total(weights), settings), uniforms)
    return _read(_tokens_at(places, values, scaled), valid)


def _draw_from_nucleus(scaled: Tensor, settings: Sequence[Sampling], uniforms: Tensor) -> list[int | None]:
    """With top-p and without top-k."""
    every = _without_unlikely(scaled.softmax(-1), settings)
    weights = every.topk(min(CANDIDATES, scaled.shape[1])).values
    nucleus = _nucleus(weights, _total(every), settings)
    places, valid = _choose(nucleus, uniforms)
    tokens = _read(_tokens_at(places, weights, every), valid)
    if weights.shape[1] == scaled.shape[1]:
        return tokens
    ends = (nucleus[:, -1] == 0).tolist()  # among the candidates
    return [
        token if within or token is None else _draw_from_sorted(*row)
        for token, within, *row in zip(tokens, ends, every, settings, uniforms, strict=True)
    ]


def _read(tokens: Tensor, valid: Tensor) -> list[int | None]:
    return [token if good else None for token, good in torch.cat([tokens, valid], 1).tolist()]


def _draw_from_sorted(every: Tensor, sampling: Sampling, uniform: Tensor) -> int:
    """One row whose nucleus is longer than the candidates."""
    weights = every[None].sort(descending=True).values
    places, _ = _choose(_nucleus(weights, _total(every[None]), [sampling]), uniform[None])
    return int(_tokens_at(places, weights, every[None]))


def _tokens_at(places: Tensor, largest: Tensor, numbers: Tensor) -> Tensor:
    """The tokens that have these places among the largest of `numbers`, which descend; equal ones in order of their
    ids. Those that `topk` names are others for another count or number of rows."""
    number = largest.gather(1, places)
    nth = places - (largest > number).sum(-1, keepdim=True)  # of the equal ones
    return torch.searchsorted((numbers == number).cumsum(-1), nth + 1)


def _total(weights: Tensor) -> Tensor:
    """The sum of each row, in an order that does not depend on the number of rows, as `sum` would."""
    return weights.double().cumsum(-1)[:, -1:].contiguous()


def _nucleus(weights: Tensor, whole: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Descending weights, without those behind the first that together have the share top_p of `whole`."""
    before = weights.double().cumsum(-1) - weights
    excluded = before >= _column([one.top_p for one in settings], weights) * whole
    excluded[:, 0] = False  # one token always remains, however small top_p is
    return weights.masked_fill(excluded, 0)


def _choose(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the first place at which the sum of weights exceeds u times their sum, which never has weight 0; and
    whether there is one."""
    sums = weights.double().cumsum(-1)
    total = sums[:, -1:].contiguous()
    valid = total.isfinite() & (total > 0)
    places = torch.searchsorted(sums, uniforms * total, right=True)
    return places.clamp(max=weights.shape[1] - 1), valid.long()  # beyond the end only where the sum is NaN
