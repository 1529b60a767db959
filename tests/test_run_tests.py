"""`scripts/run_tests.py` runs every test file once, and reports a folder that fails."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_tests", ROOT / "scripts" / "run_tests.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_tests", module)
    spec.loader.exec_module(module)
    return module


def test_every_test_file_is_in_one_group(script: ModuleType) -> None:
    groups, alone = script.make_groups()
    counted = Counter(file for group in (*groups, alone) for file in group.files())
    assert set(counted) == set((ROOT / "tests").rglob("test_*.py")) and set(counted.values()) == {1}
    assert all(path.exists() for group in (*groups, alone) for path in (*group.paths, *group.ignored))


def test_no_two_test_files_are_one_module_to_pytest() -> None:
    """It names a file by the folders above it that are packages, and refuses a second one of that name."""

    def module(file: Path) -> tuple[str, ...]:
        folders = list(takewhile(lambda folder: (folder / "__init__.py").is_file(), file.parents))
        return (*(folder.name for folder in reversed(folders)), file.name)

    counted = Counter(map(module, (ROOT / "tests").rglob("test_*.py")))
    assert len(counted) > 300 and not [name for name, count in counted.items() if count > 1]


def test_failures_are_shown_and_counted(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, body in (("one", "assert True"), ("two", "assert 2 == 3"), ("three", "assert True")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(f"def test_it() -> None:\n    {body}\n")
    groups = [script.Group((tmp_path / name,)) for name in ("one", "two")]
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which takes seconds
    monkeypatch.setattr(script, "make_groups", lambda: (groups, script.Group((tmp_path / "three",))))
    assert script.main(["--jobs", "2"]) == 1
    shown = capsys.readouterr().out
    assert "assert 2 == 3" in shown and "two: exit code 1" in shown and "one: 1 passed in" in shown
    assert "2 passed, 1 failed in" in shown and shown.strip().endswith("1 folders failed")
