"""What `kt plan` says about recorded training steps, held to the bars of docs/plan.md: time to 25 %, memory to 10 %.

A cell in `MISSED` is known to miss a bar; a model that drifts fails here, whichever way it goes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ktransformers.plan import profile

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
# Document -> (policy, format, tokens) -> the bars that the cell misses. A policy that follows others in one process
# has their host memory and their graphs on the GPU; times of int4 at 512 tokens follow the speed of Python on the host,
# which changed within the runs; the oldest document is of a time when tensors of a step were in fresh memory, whose
# page faults the model does not know. Backward of a model of two layers finds experts on the GPU that forward copied.
HOST, STEP, GPU = {"host_peak_gib"}, {"step_s"}, {"gpu_peak_gib"}
MISSED: dict[str, dict[tuple[str, str, int], set[str]]] = {
    "current/train-e2e.json#policies": {("stream", "bf16", tokens): HOST for tokens in (512, 2048, 8192)},
    "current/train-e2e.json#formats": {},
    "current/train-e2e.json": {
        ("stream", "int4:32", 512): STEP,
        ("stream", "int4:32", 8192): GPU,
        ("auto", "int4:32", 512): STEP,
        ("auto", "int4:32", 2048): GPU,
        ("auto", "int4:32", 8192): GPU,
    },
    "current/train-e2e.json#dsv3": {("auto", "int4:32", 8192): STEP | GPU},
    "current/train-e2e.json#dsv3-fp8": {("auto", "fp8:128x128", 8192): STEP | GPU},
    "current/train-e2e.json#dsv2-lite-peers": {},
    "current/train-e2e.json#qwen3-peers": {},
    "current/train-e2e.json#decided": {("stream", "bf16", 2048): STEP, ("stream", "int4:32", 8192): STEP | GPU},
    "current/train-e2e.json#decided-int4": {("stream", "int4:32", 512): STEP},
    "current/train-e2e.json#no-graphs": {("stream", "int4:32", 512): STEP},
    "history/2026-11-15-train-e2e.json": {("cpu", "bf16", 2048): STEP, ("cpu", "bf16", 8192): STEP},
    "history/2026-11-16-train-e2e-expert-graphs-int4.json": {("stream", "int4:32", 512): STEP},
}


def by_trials(cell: dict[str, Any]) -> bool:
    """Measured when `auto` still tried modes while it trained: no prediction of today's `auto`."""
    return cell.get("policy") == "auto" and not cell.get("modes")


def is_ours(cell: dict[str, Any]) -> bool:
    return cell["variant"] == "kt"


@pytest.fixture
def predicted() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        import predicted

        yield predicted
    finally:
        sys.path.remove(str(ROOT / "bench"))


def test_recorded_steps_are_within_the_bars(predicted: Any) -> None:
    machine, held = profile("amx16-h200"), set()
    for name, known in MISSED.items():
        document = predicted.read_run(RESULTS / name)
        document["cells"] = [cell for cell in document["cells"] if not by_trials(cell)]
        rows = predicted.rows_of(document, machine)
        missed: dict[tuple[str, str, int], set[str]] = {}
        for row in rows:  # of cells that were measured more than once all that was missed
            cell = missed.setdefault((row.policy, row.format, row.tokens), set())
            cell |= {bar for bar, within in row.within.items() if not within}
        assert {cell: bars for cell, bars in missed.items() if bars} == known, name
        assert all(len(row.within) == 3 for row in rows)  # seconds, GPU and host
        held |= {cell for cell, bars in missed.items() if not bars}
    runs = json.loads((RESULTS / "current/train-e2e.json").read_text())["runs"]
    recorded = {f"current/train-e2e.json#{name}": run for name, run in runs.items() if not name.startswith("contexts")}
    for file in RESULTS.glob("history/*train-e2e*.json"):
        recorded[f"history/{file.name}"] = json.loads(file.read_text())
    of_today = {
        name.removesuffix("#main")
        for name, run in recorded.items()
        if any(is_ours(cell) and not by_trials(cell) for cell in run["cells"])
    }
    assert set(MISSED) == of_today, "every document is held to the bars"
    assert len(held) >= 12 and {policy for policy, *_ in held} == {"cpu", "stream", "auto"}


def test_the_script_prints_a_table_and_a_document(
    predicted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = RESULTS / "history/2026-11-15-train-e2e.json"  # with variants that are not ours, and without formats
    assert predicted.main([str(old), "--json", str(tmp_path / "rows.json")]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert json.loads((tmp_path / "rows.json").read_text()) == document
    assert len(document["rows"]) == 3 == len(table) - 2
    for row in document["rows"]:
        assert row["policy"] == "cpu" and row["within"]["host_peak_gib"] and row["within"]["gpu_peak_gib"]


def test_a_format_is_planned_with_what_its_groups_are(predicted: Any) -> None:
    """bf16:12 is not bf16."""
    document = predicted.read_run(RESULTS / "current/train-e2e.json")
    (cell,) = [
        c
        for c in document["cells"]
        if is_ours(c) and (c["format"], c["policy"], c["tokens"]) == ("bf16", "stream", 2048)
    ]
    specs = ("bf16", "bf16:12", "int4:32")
    rows = predicted.rows_of(document | {"cells": [cell | {"format": spec} for spec in specs]}, profile("amx16-h200"))
    plain, packed, coded = (row.predicted["host_peak_gib"] for row in rows)
    assert plain > packed > coded
    assert rows[0].predicted["step_s"] > rows[1].predicted["step_s"] > rows[2].predicted["step_s"]


def test_routes_are_counted_in_the_recipes_model(predicted: Any) -> None:
    one, all_ = predicted.routes("tiny", 1), predicted.routes("tiny", 64)
    assert one == 2 / 8 and one < all_ <= 1  # two experts of eight for a token
