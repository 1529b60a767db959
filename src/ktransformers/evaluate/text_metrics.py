"""Text into units that can be counted, for English and Chinese alike, and the counts that BLEU, ROUGE and chrF need.

Chinese has no spaces: a tokenizer that splits at them sees one word per sentence, and one that keeps `[a-z0-9]` alone
(as the usual ROUGE does) sees none. Here every Han character or kana is a unit of its own. BLEU's units are
sacrebleu's: `zh` where a text has such characters, `13a` elsewhere. Counts are per item and add up, so that a resample
is one product.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
HAS_CJK = re.compile(f"[{CJK}]")
UNIT = re.compile(rf"[{CJK}]|[^\W_{CJK}]+(?:'[^\W_{CJK}]+)*")
BLEU_ORDERS, CHRF_ORDERS = 4, 6


def rouge_units(text: str) -> list[str]:
    return UNIT.findall(text.lower())


@cache
def _bleu_tokenizer(name: str) -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(tokenize=name).tokenizer


def bleu_units(text: str, chinese: bool) -> list[str]:
    units: list[str] = _bleu_tokenizer("zh" if chinese else "13a")(text).split()
    return units


def _ngrams(units: Sequence[Hashable], order: int) -> Counter[tuple[Hashable, ...]]:
    return Counter(tuple(units[place : place + order]) for place in range(len(units) - order + 1))


def bleu_counts(answer: str, reference: str) -> list[int]:
    """[matches of order 1-4, n-grams of order 1-4, length of the answer, length of the reference]."""
    chinese = bool(HAS_CJK.search(answer + reference))
    ours, theirs = bleu_units(answer, chinese), bleu_units(reference, chinese)
    matches, totals = [], []
    for order in range(1, BLEU_ORDERS + 1):
        grams = _ngrams(ours, order)
        matches.append(sum((grams & _ngrams(theirs, order)).values()))
        totals.append(sum(grams.values()))
    return [*matches, *totals, len(ours), len(theirs)]


def chrf_counts(answer: str, reference: str) -> list[int]:
    """For character orders 1-6: [n-grams of the answer, of the reference, matches] one after the other."""
    ours, theirs = ("".join(text.split()) for text in (answer, reference))
    counts = []
    for order in range(1, CHRF_ORDERS + 1):
        mine, other = _ngrams(ours, order), _ngrams(theirs, order)
        # As sacrebleu: an order that the reference is too short for does not count against the answer.
        produced = sum(mine.values()) if other else 0
        counts += [produced, sum(other.values()), sum((mine & other).values())]
    return counts


def _f1(matches: int, produced: int, wanted: int) -> float:
    return 2 * matches / (produced + wanted) if produced + wanted else 0.0


def rouge(answer: str, reference: str) -> tuple[float, float, float]:
    """F1 of ROUGE-1, ROUGE-2 and ROUGE-L."""
    ours, theirs = rouge_units(answer), rouge_units(reference)
    scores = []
    for order in (1, 2):
        mine, other = _ngrams(ours, order), _ngrams(theirs, order)
        scores.append(_f1(sum((mine & other).values()), sum(mine.values()), sum(other.values())))
    return scores[0], scores[1], _f1(_longest_common(ours, theirs), len(ours), len(theirs))


def _longest_common(first: Sequence[str], second: Sequence[str]) -> int:
    row = [0] * (len(second) + 1)
    for unit in first:
        before = 0
        for place, other in enumerate(second, 1):
            above = row[place]
            row[place] = before + 1 if unit == other else max(above, row[place - 1])
            before = above
    return row[-1]


def normalise(text: str) -> str:
    """What exact match compares: case, edges, runs of spaces and a full stop at the end do not count."""
    return re.sub(r"\s+", " ", text).strip().rstrip(".。").strip().casefold()
