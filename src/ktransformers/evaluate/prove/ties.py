"""Ties between experts in a program whose routers are out of reach, such as a server elsewhere.

Only its log-probabilities are known. If they leave those of the trainer's graph at some token, a router may have chosen
another of two experts that tie there. So the row is computed again with the other choice of one router, for a token
whose gap between the last chosen score and the next is no larger than what rounding explains. If the numbers agree
further than before, that was the tie, and the next token that differs is explained in the same way. No token is left
out: the outputs are compared with those of the row computed so, under the limits of all others. Outputs that no such
choice reproduces stay different.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters.comparison import (
    COARSE_FLOOR,
    FLOOR_FACTOR,
    LogprobsAndNorms,
    NoiseFloor,
    measure,
    token_limit,
)
from ktransformers.adapters.router_choices import (
    SCORE_GAIN,
    SCORE_ROUNDING,
    ChoiceComparison,
    ChoiceDifference,
    Flips,
    compare_choices,
)

MAX_TIES = 8  # of a row
MAX_CANDIDATES = 8  # tokens and layers with small gaps, for each tie


def can_explain(expected: LogprobsAndNorms, floor: NoiseFloor) -> bool:
    """Whether single ties can be told apart: not in 16 bits, where every row has several, and not without scores."""
    routers = expected.routers
    recorded = routers is not None and all(layer.selections for layer in routers.layers.values())
    return recorded and floor.replayed.max <= COARSE_FLOOR


def explain_by_ties(
    model: Any, rows: Sequence[Sequence[int]], outputs: LogprobsAndNorms, expected: LogprobsAndNorms, floor: NoiseFloor
) -> tuple[LogprobsAndNorms, ChoiceComparison]:
    """`expected` with ties in the model's routers resolved as the outputs require, and these ties."""
    logprobs, ties = list(expected.logprobs), list[ChoiceDifference]()
    for index, row in enumerate(rows):
        if _first_difference(outputs.logprobs[index], logprobs[index], floor) is None:
            continue
        logprobs[index], found = _explain_row(model, row, outputs.logprobs[index], floor)
        ties += [replace(tie, row=index) for tie in found]
    return replace(expected, logprobs=tuple(logprobs)), ChoiceComparison(tuple(ties))


def _explain_row(
    model: Any, row: Sequence[int], served: Tensor, floor: NoiseFloor
) -> tuple[Tensor, list[ChoiceDifference]]:
    current, ties, flips = measure(model, [row]), list[ChoiceDifference](), dict[tuple[str, int], float]()
    while (first := _first_difference(served, current.logprobs[0], floor)) is not None and len(ties) < MAX_TIES:
        for candidate, gap in _small_gaps(current, first, flips, floor):
            trial = measure(model, [row], flips={**flips, candidate: gap})
            reached = _first_difference(served, trial.logprobs[0], floor)
            tie = _choice_at(trial, current, *candidate)
            if tie is not None and (reached is None or reached > first):
                current, flips = trial, {**flips, candidate: gap}
                ties.append(replace(tie, gap=abs(tie.gap)))
                break
        else:
            break
    return current.logprobs[0], ties


def _choice_at(trial: LogprobsAndNorms, current: LogprobsAndNorms, layer: str, token: int) -> ChoiceDifference | None:
    """The other choice of this token; None: it is the same."""
    comparison = compare_choices(trial.routers, current.routers)
    ties = () if comparison is None else comparison.ties
    return next((tie for tie in ties if (tie.layer, tie.token) == (layer, token)), None)


def _first_difference(served: Tensor, computed: Tensor, floor: NoiseFloor) -> int | None:
    """The first token whose prediction differs by more than the limit; NaN does."""
    beyond = (~((served - computed).abs() <= token_limit(floor.replayed))).nonzero()
    return int(beyond[0]) if len(beyond) else None


def _small_gaps(
    current: LogprobsAndNorms, last: int, flips: Flips, floor: NoiseFloor
) -> list[tuple[tuple[str, int], float]]:
    """(layer, token) that may tie, with relative gaps. Another choice mostly shows in the token itself, so the last
    token comes first, and of each the smallest gap."""
    assert current.routers is not None
    tokens, small = torch.arange(last + 1), list[tuple[int, float, str]]()
    for name, layer in current.routers.layers.items():
        inputs = FLOOR_FACTOR * floor.router_inputs.get(name, 0.0)
        limit = 2 * (SCORE_GAIN * inputs + SCORE_ROUNDING * layer.epsilon)  # each of two scores may move as far
        for selection in layer.selections:
            gaps = selection.relative_gaps(tokens)
            small += [(-int(token), float(gaps[token]), name) for token in (gaps <= limit).nonzero()[:, 0]]
    untried = [((name, -token), gap) for token, gap, name in sorted(small) if (name, -token) not in flips]
    # A little more than the gap: it is computed again in another order.
    return [(candidate, gap + SCORE_ROUNDING * torch.finfo(torch.float32).eps) for candidate, gap in untried][
        :MAX_CANDIDATES
    ]
