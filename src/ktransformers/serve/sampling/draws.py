"""Tokens from logits: penalties, grammar, temperature, top-k, min-p, top-p, in that order.

A row is drawn with one number u in [0, 1): the first token at which the sum of probabilities exceeds u times their sum.
That reads a row a few times, on the device that has it and for many sampled sequences of a step at once; a random
number for each of V tokens, or a sort of V numbers, takes longer than a decode step. top-k and top-p look at the
CANDIDATES most likely tokens; a nucleus that does not end among these is found by sorting that row. What a row gives
depends on its own logits, settings and u, not on the other rows: sums have one order, and of tokens that are equally
likely, which logits in bf16 often are, the one with the smaller id comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ktransformers.ground.errors import KTError
from ktransformers.serve.sampling.sampling import Sampling

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
