"""Metrics with confidence intervals: a metric is a table of counts per item and a function of their sum.

`rows` is `[N, D]`; `fold` maps sums `[R, D]` to values `[R]`, so a bootstrap of R resamples is one matrix product of
multiplicities with the rows. This covers means (D = 2: sum and count) and corpus scores such as BLEU. Two runs are
compared on the same resamples, which removes the variance of item difficulty.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from ktransformers.evaluate.text_metrics import BLEU_ORDERS, CHRF_ORDERS

Array = NDArray[numpy.float64]
Fold = Callable[[Array], Array]
RESAMPLES = 1000


@dataclass(frozen=True)
class Statistic:
    rows: Array
    fold: Fold
    more_is_better: bool = True
    per_cent: bool = True

    def value(self) -> float:
        return float(self.fold(self.rows.sum(0, keepdims=True))[0])

    def take(self, indices: list[int]) -> Statistic:
        return Statistic(self.rows[indices], self.fold, self.more_is_better, self.per_cent)


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float  # 95 % interval
    high: float
    items: int


@dataclass(frozen=True)
class Difference:
    value: float  # second minus first
    low: float
    high: float
    p: float  # two-sided, of the paired bootstrap
    gain: bool  # in the metric's better direction

    @property
    def mark(self) -> str:
        return "**" if self.p < 0.01 else "*" if self.p < 0.05 else ""


def mean(sums: Array) -> Array:
    return 100 * ratio(sums)


def ratio(sums: Array) -> Array:
    """Column 0 over column 1; NaN if nothing was counted."""
    with numpy.errstate(invalid="ignore", divide="ignore"):
        result: Array = sums[:, 0] / sums[:, 1]
    return result


def perplexity(sums: Array) -> Array:
    return numpy.asarray(numpy.exp(numpy.minimum(ratio(sums), 50.0)))


def bleu(order: int) -> Fold:
    """Corpus BLEU up to this order, smoothed as in sacrebleu: an order without matches counts as 1/2, 1/4, ..."""

    def fold(sums: Array) -> Array:
        matches, totals = sums[:, :order], sums[:, BLEU_ORDERS : BLEU_ORDERS + order]
        missing = (matches == 0) & (totals > 0)
        halves = 0.5 ** numpy.cumsum(missing, axis=1)
        with numpy.errstate(invalid="ignore", divide="ignore"):
            precision = numpy.where(missing, halves, matches) / totals
            logs = numpy.log(precision).mean(1)
            lengths, reference_lengths = sums[:, -2], sums[:, -1]
            brevity = numpy.minimum(0.0, 1 - reference_lengths / lengths)
            scores = 100 * numpy.exp(logs + brevity)
        nothing = (totals == 0).any(1) | (matches.sum(1) == 0)
        return numpy.where(nothing, 0.0, scores)

    return fold


def chrf(sums: Array) -> Array:
    """Corpus chrF2: F-score of the mean precision and recall over orders, recall weighted twice."""
    table = sums.reshape(len(sums), CHRF_ORDERS, 3)
    produced, expected, matches = table[..., 0], table[..., 1], table[..., 2]
    used = (produced > 0) & (expected > 0)
    with numpy.errstate(invalid="ignore", divide="ignore"):
        precision = numpy.where(used, matches / produced, 0).sum(1) / used.sum(1)
        recall = numpy.where(used, matches / expected, 0).sum(1) / used.sum(1)
        score = 5 * precision * recall / (4 * precision + recall)
    return numpy.asarray(100 * numpy.nan_to_num(score))


def multiplicities(items: int, seed: int = 0, resamples: int = RESAMPLES) -> Array:
    """`[R, N]`: how often each item occurs in each resample."""
    generator = numpy.random.default_rng(seed)
    return generator.multinomial(items, numpy.full(items, 1 / items), size=resamples).astype(numpy.float64)


def _interval(values: Array) -> tuple[float, float]:
    """Of 95 %; NaN if no resample has a value."""
    if numpy.isnan(values).all():
        return math.nan, math.nan
    low, high = numpy.nanpercentile(values, (2.5, 97.5))
    return float(low), float(high)


def estimate(statistic: Statistic, seed: int = 0) -> Estimate:
    count = len(statistic.rows)
    values = statistic.fold(multiplicities(count, seed) @ statistic.rows)
    return Estimate(statistic.value(), *_interval(values), count)


def difference(first: Statistic, second: Statistic, seed: int = 0) -> Difference:
    """Difference of two runs over the same items in the same order."""
    weights = multiplicities(len(first.rows), seed)
    values = second.fold(weights @ second.rows) - first.fold(weights @ first.rows)
    value = second.value() - first.value()
    # Ties count half to each side; a finite number of resamples never gives p = 0.
    below = ((values < 0).sum() + 0.5 * (values == 0).sum() + 0.5) / (len(values) + 1)
    gain = value > 0 if first.more_is_better else value < 0
    # Lower bound for few items: all of them changing in one direction has at least this probability under the null.
    minimum_p = 2.0 ** (1 - len(first.rows))
    p = min(1.0, max(2 * min(below, 1 - below), minimum_p))
    return Difference(value, *_interval(values), float(p), bool(gain))
