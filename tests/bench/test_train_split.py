"""The divisions that the bench of split training steps compares; its steps need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_fixed_shares_stream_the_busiest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import numpy as np
    import train_split

    class Rows:
        def expected_counts(self, *_: object) -> object:
            return np.array([5, 0, 9, 1, 0, 7])

    divide = train_split.fixed_shares(0.5, 0.75)
    forward, backward = divide(Rows(), None, 64, "forward"), divide(Rows(), None, 64, "backward")
    assert set(forward.streamed) == {2, 5} and set(backward.streamed) == {0, 2, 5}
    assert sorted(forward.streamed + forward.cpu) == list(range(6))
