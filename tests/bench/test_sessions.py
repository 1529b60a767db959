"""Sessions with tools replayed through a server: turns compute what is new, and what their template takes away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("uvicorn")


@pytest.mark.slow
def test_turns_compute_what_is_new(run_bench: Callable[..., tuple[list[str], dict[str, Any]]]) -> None:
    options = ["--templates", "gptoss", "--recurrent", "qwen3_6", "--drops", "", "--turns", "5", "--task", "3"]
    _, document = run_bench("sessions", *options, "--history", "")
    assert [cell["template"] for cell in document["cells"]] == ["gptoss", "qwen3_6"]
    for cell in document["cells"]:
        assert cell["prefixes"] == {"first_turn": 1, "continued": 3, "template": 1}
        assert cell["taken"] > 0 and cell["most_beyond"] <= 64 and cell["ratio"] <= 1.05
        assert cell["computed_as_text"] > cell["computed"]
