"""Cases of parametrised tests of which `make test` runs a few and `make test-slow` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def others_slow(cases: Iterable[str], fast: Iterable[str]) -> list[Any]:
    """For `pytest.mark.parametrize`: the cases, those that are not among `fast` marked slow."""
    names, kept = list(cases), set(fast)
    assert kept <= set(names), f"{sorted(kept - set(names))} are no cases"
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]
