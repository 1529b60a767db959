"""BLEU and chrF are sacrebleu's to the last digit, ROUGE is what it is by hand, Chinese counts."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from ktransformers.evaluate import text_metrics
from ktransformers.evaluate.statistic import Statistic, bleu, chrf, difference, estimate, mean

ENGLISH = (
    ["The cat sat on the mat.", "It's 3.5 degrees, isn't it?", "a", ""],
    ["The cat is on the mat today.", "It is 3.5 degrees here.", "b c d e", "something"],
)
CHINESE = (
    ["主人，尾巴摇了摇喵~", "我会一直在这里等你回来的。", "今天 GPU 很快"],
    ["主人，耳朵抖了抖喵！", "我会在这里等你回来。", "今天的 GPU 不快"],
)


@pytest.mark.parametrize(("pairs", "cut"), [(ENGLISH, "13a"), (CHINESE, "zh")])
def test_bleu_and_chrf_equal_sacrebleu(pairs: tuple[list[str], list[str]], cut: str) -> None:
    answers, references = pairs
    rows = numpy.array([text_metrics.bleu_counts(a, r) for a, r in zip(answers, references, strict=True)], dtype=float)
    for order in range(1, 5):
        theirs = BLEU(tokenize=cut, max_ngram_order=order).corpus_score(answers, [references]).score
        assert Statistic(rows, bleu(order)).value() == pytest.approx(theirs, abs=1e-9)
    rows = numpy.array([text_metrics.chrf_counts(a, r) for a, r in zip(answers, references, strict=True)], dtype=float)
    assert Statistic(rows, chrf).value() == pytest.approx(CHRF().corpus_score(answers, [references]).score, abs=1e-9)


text = st.text(alphabet=st.sampled_from("ab c,.'1喵主人"), max_size=30)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(text, text), min_size=1, max_size=4))
def test_chrf_is_bounded_for_any_text(pairs: list[tuple[str, str]]) -> None:
    rows = numpy.array([text_metrics.chrf_counts(a, r) for a, r in pairs], dtype=float)
    answers, references = ([pair[side] for pair in pairs] for side in (0, 1))
    theirs = CHRF().corpus_score(answers, [references]).score
    assert Statistic(rows, chrf).value() == pytest.approx(theirs, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(text, text)
def test_rouge_is_bounded_for_any_text(answer: str, reference: str) -> None:
    scores = text_metrics.rouge(answer, reference)
    assert all(0 <= score <= 1 for score in scores)
    assert scores == pytest.approx(text_metrics.rouge(reference, answer))
    if text_metrics.rouge_units(answer):
        assert text_metrics.rouge(answer, answer)[::2] == (1.0, 1.0)


def test_rouge_matches_known_values() -> None:
    one, two, longest = text_metrics.rouge("the cat sat on the mat", "the cat was on a mat")
    assert one == pytest.approx(2 * 4 / 12)  # the, cat, on, mat
    assert two == pytest.approx(2 * 1 / 10)  # the cat
    assert longest == pytest.approx(2 * 4 / 12)


def test_rouge_counts_chinese_characters() -> None:
    assert text_metrics.rouge_units("主人，GPU-2很快喵~ it's") == ["主", "人", "gpu", "2", "很", "快", "喵", "it's"]
    one, two, longest = text_metrics.rouge("我等你回来", "我会等你")
    assert one == longest == pytest.approx(2 * 3 / 9)
    assert two == pytest.approx(2 * 1 / 7)


def test_normalise_ignores_case_and_punctuation() -> None:
    assert text_metrics.normalise("  The\n Answer. ") == text_metrics.normalise("the answer")
    assert text_metrics.normalise("是。") == "是"


def table(values: list[float]) -> Statistic:
    return Statistic(numpy.array([[value, 1.0] for value in values]), mean)


def test_estimate_is_deterministic_and_covers_the_mean() -> None:
    generator = numpy.random.default_rng(3)
    found = estimate(table([float(value) for value in generator.random(400) < 0.3]))
    assert found == estimate(table([float(v) for v in numpy.random.default_rng(3).random(400) < 0.3]))
    half = 1.96 * 100 * (0.3 * 0.7 / 400) ** 0.5
    assert found.low < found.value < found.high
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.15)


def test_paired_difference_is_significant() -> None:
    generator = numpy.random.default_rng(4)
    hard = generator.random(200)  # items differ a lot; the second run is a little better on most of them
    first, second = table(list(hard)), table(list(hard + 0.02 + 0.02 * generator.standard_normal(200)))
    found = difference(first, second)
    assert found.mark == "**" and found.gain and found.low > 0
    same = difference(first, first)
    assert (same.value, same.mark, same.gain) == (0.0, "", False)
    assert same.p == pytest.approx(1.0)
    less = Statistic(second.rows, mean, more_is_better=False)
    assert not difference(Statistic(first.rows, mean, more_is_better=False), less).gain


@pytest.mark.parametrize(("items", "mark"), [(2, ""), (5, ""), (6, "*"), (8, "**")])
def test_few_items_are_not_significant(items: int, mark: str) -> None:
    assert difference(table([0.0] * items), table([1.0] * items)).mark == mark


def test_false_positive_rate_is_bounded() -> None:
    generator = numpy.random.default_rng(5)
    marked = sum(
        bool(difference(table(list(generator.random(60))), table(list(generator.random(60)))).mark) for _ in range(100)
    )
    assert marked <= 12  # five are expected
