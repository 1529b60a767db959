"""Charts under `docs/images` show the numbers of `bench/results/current`; drawing one again gives the same file."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def charts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("charts", ROOT / "scripts" / "charts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["charts"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_files_show_what_the_documents_hold(charts: ModuleType) -> None:
    assert charts.main(["--check"]) == 0, "run scripts/charts.py"


def test_other_numbers_are_noticed(charts: ModuleType, tmp_path: Path) -> None:
    for file in charts.RESULTS.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    document = json.loads((tmp_path / "serve-graphs.json").read_text())
    document["runs"]["main"]["cells"][0]["graph_tokens_per_s"] *= 1.01
    (tmp_path / "serve-graphs.json").write_text(json.dumps(document))
    assert charts.stale(charts.read(tmp_path), charts.IMAGES) == ["decoding"]
    assert charts.stale(charts.read(), tmp_path) == ["training", "decoding", "kernels"]  # there are no files


def test_a_drawing_holds_its_numbers_as_text_and_is_the_same_twice(charts: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = charts.read()
    for folder in ("one", "two"):
        charts.draw(made, tmp_path / folder, None)
    assert charts.stale(made, tmp_path / "one") == []
    for chart in made:
        text = (tmp_path / "one" / f"{chart.name}.svg").read_text()
        assert text == (tmp_path / "two" / f"{chart.name}.svg").read_text()
        assert "dc:date" not in text and len(text) < 60_000
        words = "\n".join(ElementTree.fromstring(text).itertext())
        bars = [panel for panel in chart.panels if not panel.lines]
        for panel in chart.panels:
            assert panel.title in words and all(series.label in words for series in panel.series)
        for panel in bars:
            shown = [f"{value:.{panel.digits}f}" for series in panel.series for value in series.values]
            assert all(number in words for number in shown)
