"""Rates from the moments at which tokens came."""

from __future__ import annotations

import pytest

from ktransformers.serve.speed import SpeedCell, decode_rate


def test_rate_counts_tokens_while_all_streams_decode() -> None:
    assert decode_rate([[0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0, 5.0]]) == pytest.approx(6 / 3)


def test_rate_of_streams_that_began_after_others_had_ended() -> None:
    assert decode_rate([[0.0, 1.0], [2.0, 3.0, 4.0]]) == pytest.approx(2 / 2)


def test_cell_counts_the_cache_that_it_takes() -> None:
    assert SpeedCell(prompt=2048, new=128, streams=8).tokens == 8 * (2048 + 128 + 64)
