"""Recorded result documents: one per bench, listed in `bench/results/README.md`; every run that a page cites exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
LOG = ROOT / "docs" / "log.md"
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
READERS = [*PAGES, *sorted((ROOT / "tests").rglob("*.py")), ROOT / "src" / "ktransformers" / "plan" / "machine.py"]
CITED = re.compile(r"\b(?:current|history)/[a-z0-9-]+\.json(?:#[a-z0-9-]+)?")
DATED = re.compile(r"\d{4}-\d\d-\d\d-[a-z0-9-]+\.json")
# What the command of a document that no file of bench/ printed runs.
COMMANDS = {"demo": "make demo|kt loop examples/demo.yaml", "soak": "make soak", "gpu-training": "pytest -m gpu"}


def runs_of(bench: str) -> dict[str, dict[str, Any]]:
    document = json.loads((RESULTS / "current" / f"{bench}.json").read_text())
    assert list(document) == ["bench", "runs"] and document["bench"] == bench
    return dict(document["runs"])


BENCHES = sorted(file.stem for file in (RESULTS / "current").glob("*.json"))
HISTORY = sorted(file.name for file in (RESULTS / "history").glob("*.json"))


def citations(*files: Path) -> set[str]:
    return {cited.removesuffix("#main") for file in files for cited in CITED.findall(file.read_text())}


def documents() -> set[str]:
    """Everything that may be cited."""
    runs = {f"current/{bench}.json#{run}".removesuffix("#main") for bench in BENCHES for run in runs_of(bench)}
    return runs | {f"history/{name}" for name in HISTORY}


@pytest.mark.parametrize("bench", BENCHES)
def test_a_document_holds_the_runs_of_one_bench(bench: str) -> None:
    """By the commands of its runs; so a second document of a bench has no name that it could take."""
    script = f"bench/{bench.replace('-', '_')}(?:\\.py|/run\\.py)"
    runs = runs_of(bench)
    assert "main" in runs
    for name, run in runs.items():
        assert re.search(COMMANDS.get(bench, script), run["command"]), name
        assert run["what"] and run["where"], name


def test_every_document_is_listed() -> None:
    files = {f"current/{bench}.json" for bench in BENCHES} | {f"history/{name}" for name in HISTORY}
    assert citations(RESULTS / "README.md") - {"current/serve-graphs.json#48-layers"} == files
    assert files == {
        str(file.relative_to(RESULTS)) for file in RESULTS.rglob("*.json") if file.parent.name != "machines"
    }


def test_documents_of_history_are_dated_and_read() -> None:
    assert all(DATED.fullmatch(name) for name in HISTORY)
    text = "".join(file.read_text() for file in READERS if file != LOG)
    assert [name for name in HISTORY if name not in text] == []


def test_every_run_is_read() -> None:
    current = {name for name in documents() if name.startswith("current/")}
    assert current - citations(*READERS) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_citation_exists(page: Path) -> None:
    """The log may name documents of earlier trees."""
    missing = citations(page) - documents()
    assert {name for name in missing if page != LOG or not name.startswith("history/")} == set()
    assert not re.search(r"bench/results/(?!current/|history/|README\.md)[\w-]+\.json", page.read_text())


def test_a_bench_writes_a_run_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import timing

    file = tmp_path / "moe.json"
    recorded = RESULTS / "current" / "moe.json"
    file.write_bytes(recorded.read_bytes())
    before = json.loads(file.read_text())
    assert timing.recorded_text(before) == recorded.read_text()
    timing.save({"bench": "moe", "cells": [{"tokens": 1}]}, Path(f"{file}#avx"))
    after = json.loads(file.read_text())
    words = {key: before["runs"]["avx"][key] for key in ("what", "command", "where")}
    assert after["runs"] == before["runs"] | {"avx": words | {"cells": [{"tokens": 1}]}}
    assert timing.read_run(file) == before["runs"]["main"] and timing.read_run(Path(f"{file}#avx"))["cells"]
