"""The bench of deferred experts and dynamic expert update runs on the CPU at a tiny shape: without deferral results are
exact, with it they are an approximation, and residents that follow the routing are hit more often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TINY = ["--device", "cpu", "--shape", "tiny", "--layers", "2", "--vocabulary", "128", "--prompt", "8", "--steps", "3"]
TINY += ["--seconds", "0.01", "--streams", "2", "--shares", "0.25", "--deferred", "0,2"]
UPDATE = ["--update-layers", "1", "--update-shares", "0.25", "--chunk", "33", "--new", "4", "--requests", "8"]
UPDATE += ["--move-every", "4", "--skew", "3"]


def test_both_parts(run_bench: Callable[..., tuple[list[str], dict[str, Any]]]) -> None:
    table, document = run_bench("deferral", *TINY, *UPDATE)
    none, two = document["cells"]
    assert none["deferred"] == 0 and none["gain"] == 1 and none["logits_error"] == 0 == none["kl"]
    assert two["deferred"] == 2 and two["logits_error"] > 0.001 and two["kl"] > 0 and len(two["layer_errors"]) == 2
    for cell in (none, two):
        assert abs(cell["tokens_per_s"] * cell["step_s"] - 2) < 1e-3  # streams
        assert cell["graph_tokens_per_s"] > 0 and cell["roof_tokens_per_s"] > cell["tokens_per_s"]
    kinds = [(cell["routing"], cell["first"], cell["requests"]) for cell in document["updates"]]
    assert kinds == [("even", 0, 2), ("Zipf 3", 0, 4), ("Zipf 3", 4, 4)]
    moved = document["updates"][-1]
    assert moved["hits"]["dynamic"] > moved["hits"]["static"] and moved["replaced"] > 0
    assert sum("Zipf" in line for line in table) == 2


def test_time_that_an_update_must_win_back(refused: Callable[[str, list[str]], str]) -> None:
    assert "0 among them" in refused("deferral", ["--deferred", "1,2"])
    assert "--update-layers" in refused("deferral", ["--layers", "2", "--update-layers", "3"])
    import deferral

    phase = deferral.Phase()
    for name, prefill, decode in (("static", 10.0, 2.0), ("dynamic", 14.0, 1.5)):
        phase.prefill[name], phase.decode[name], phase.hits[name] = [prefill], [decode], [0.5]
    phase.replaced = [3]
    assert phase.cell()["pays_from"] == 8
    phase.decode["dynamic"] = [2.5]
    assert phase.cell()["pays_from"] is None
