"""Splits text into units, for English and Chinese alike, and computes the counts for BLEU, ROUGE and chrF.

Chinese has no spaces: a tokenizer that splits at spaces finds one word per sentence, and one that keeps `[a-z0-9]` only
(as the usual ROUGE does) finds none. So every Han character or kana is a unit. BLEU's units are sacrebleu's: `zh` if a
text has such characters, `13a` otherwise. Counts are per item and additive, so a resample is one matrix product.
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
def _sacrebleu(tokenize: str) -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(tokenize=tokenize, effective_order=True)


def _ngrams(units: Sequence[Hashable], order: int) -> Counter[tuple[Hashable, ...]]:
    return Counter(tuple(units[start : start + order]) for start in range(len(units) - order + 1))


def bleu_counts(answer: str, reference: str) -> list[int]:
    """[matches of order 1-4, n-grams of order 1-4, length of the answer, length of the reference]."""
    score = _sacrebleu("zh" if HAS_CJK.search(answer + reference) else "13a").sentence_score(answer, [reference])
    return [*score.counts, *score.totals, score.sys_len, score.ref_len]


def chrf_counts(answer: str, reference: str) -> list[int]:
    """For character orders 1-6: [n-grams of the answer, of the reference, matches] one after the other."""
    answer_chars, reference_chars = ("".join(text.split()) for text in (answer, reference))
    counts = []
    for order in range(1, CHRF_ORDERS + 1):
        answer_ngrams, reference_ngrams = _ngrams(answer_chars, order), _ngrams(reference_chars, order)
        # As in sacrebleu: an order longer than the reference does not count against the answer.
        produced = sum(answer_ngrams.values()) if reference_ngrams else 0
        counts += [produced, sum(reference_ngrams.values()), sum((answer_ngrams & reference_ngrams).values())]
    return counts


def _f1(matches: int, produced: int, expected: int) -> float:
    return 2 * matches / (produced + expected) if produced + expected else 0.0


def rouge(answer: str, reference: str) -> tuple[float, float, float]:
    """F1 of ROUGE-1, ROUGE-2 and ROUGE-L."""
    answer_units, reference_units = rouge_units(answer), rouge_units(reference)
    scores = []
    for order in (1, 2):
        answer_ngrams, reference_ngrams = _ngrams(answer_units, order), _ngrams(reference_units, order)
        scores.append(
            _f1(
                sum((answer_ngrams & reference_ngrams).values()),
                sum(answer_ngrams.values()),
                sum(reference_ngrams.values()),
            )
        )
    return (
        scores[0],
        scores[1],
        _f1(_longest_common(answer_units, reference_units), len(answer_units), len(reference_units)),
    )


def _longest_common(first: Sequence[str], second: Sequence[str]) -> int:
    row = [0] * (len(second) + 1)
    for unit in first:
        diagonal = 0
        for column, other_unit in enumerate(second, 1):
            above = row[column]
            row[column] = diagonal + 1 if unit == other_unit else max(above, row[column - 1])
            diagonal = above
    return row[-1]


def normalise(text: str) -> str:
    """Text as exact match compares it: case, outer whitespace, runs of spaces and a final full stop are ignored."""
    return re.sub(r"\s+", " ", text).strip().rstrip(".。").strip().casefold()
