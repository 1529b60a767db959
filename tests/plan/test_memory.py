"""The memory model against reality: `kt train` on random models, anonymous memory at its peak, 10 % at most."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.measured_training import CASES, measure
from tests.support.plan_tables import rows

DOCS = Path(__file__).resolve().parents[2] / "docs" / "plan.md"
QUICK = "grouped"


@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_predicted_memory_is_measured_memory(name: str) -> None:
    found = measure(name)["host memory"]
    assert found["measured"] == pytest.approx(found["predicted"], rel=0.10)


def test_table_of_shipped_models_in_the_docs_is_the_planners() -> None:
    text = DOCS.read_text()
    for row in rows():
        assert row in text
