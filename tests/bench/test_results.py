"""Recorded result documents: each is JSON, is listed in `bench/results/README.md`, and exists where a page cites it."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
CITED = re.compile(r"\b(?:current|history)/[a-z0-9-]+\.json")
DATED = re.compile(r"\d{4}-\d\d-\d\d-[a-z0-9-]+\.json")


def documents() -> set[str]:
    return {str(file.relative_to(RESULTS)) for file in RESULTS.rglob("*.json")}


def test_every_document_is_listed_and_parses() -> None:
    assert set(CITED.findall((RESULTS / "README.md").read_text())) == documents()
    for name in documents():
        assert isinstance(json.loads((RESULTS / name).read_text()), dict), name


def test_documents_of_history_are_dated() -> None:
    folders = {Path(name).parent.name for name in documents()}
    assert folders == {"current", "history"}
    assert all(DATED.fullmatch(file.name) for file in (RESULTS / "history").iterdir())


def test_every_citation_exists() -> None:
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        text = page.read_text()
        assert set(CITED.findall(text)) <= documents(), page.name
        assert not re.search(r"bench/results/(?!current/|history/|README\.md)[\w-]+\.json", text), page.name
