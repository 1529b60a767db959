"""A thinking block that is bounded, and what follows it."""

from __future__ import annotations

import torch

from ktransformers.serve.http.grammar import ThinkingLimit
from ktransformers.serve.http.prepare import ThinkingBlock
from tests.support.scripted import Script

OPEN, CLOSE, EXTRA, END, SIZE = 1, 2, 3, 4, 8


def allowed(limit: ThinkingLimit) -> list[int]:
    return [int(token) for token in torch.nonzero(limit.allowed(SIZE))]


def test_closing_tokens_are_forced_when_the_budget_is_used() -> None:
    limit = ThinkingLimit(ThinkingBlock((OPEN,), (CLOSE, EXTRA), False, 2), None, frozenset({END}))
    for token in (7, 7, 7, OPEN, 5, 6):
        assert len(allowed(limit)) == SIZE
        limit.accept(token)
    for token in (CLOSE, EXTRA):
        assert allowed(limit) == [token]
        limit.accept(token)
    assert len(allowed(limit)) == SIZE


def test_a_budget_of_nothing_closes_an_opened_block_at_once() -> None:
    limit = ThinkingLimit(ThinkingBlock((OPEN,), (CLOSE,), True, 0), None, frozenset())
    assert allowed(limit) == [CLOSE]


def test_a_grammar_begins_behind_the_block_that_the_prompt_opened() -> None:
    limit = ThinkingLimit(ThinkingBlock((OPEN,), (CLOSE,), True, None), lambda: Script([5, 6]), frozenset({END}))
    assert END not in allowed(limit) and len(allowed(limit)) == SIZE - 1
    for token in (7, 7, CLOSE):
        limit.accept(token)
    assert allowed(limit) == [5]
    limit.accept(5)
    assert allowed(limit) == [6]
