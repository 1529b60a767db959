"""uv is told what pip would do (`scripts/install_packages.py`); a make shows what took how long."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_settings_of_pip_become_those_of_uv() -> None:
    script = _script("install_packages")
    settings = script.read_pip_settings(
        ":env:.find-links='/a /b'\n"
        ":env:.disable-pip-version-check='1'\n"
        "global.find-links='/c'\n"
        "global.index-url='file:///all'\n"
        "install.index-url='file:///of-install'\n"
        "download.no-index='true'\n"
        "global.extra-index-url='file:///one file:///two'\n"
    )
    assert script.uv_environment(settings) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/a,/b",
        "UV_DEFAULT_INDEX": "file:///of-install",
        "UV_INDEX": "file:///one file:///two",
    }


def test_a_setting_without_a_counterpart_leaves_it_to_pip(capsys: pytest.CaptureFixture[str]) -> None:
    script = _script("install_packages")
    assert script.uv_environment(script.read_pip_settings("install.only-binary=':all:'")) is None
    assert "only-binary" in capsys.readouterr().out


def test_the_demo_needs_pinned_packages_and_fewer() -> None:
    script = _script("install_packages")
    option, file, *needed = script.requirements(demo=True)
    assert (option, Path(file)) == ("-c", ROOT / "constraints.txt")
    names = {canonicalize_name(Requirement(text).name) for text in needed}
    pinned = {canonicalize_name(name) for name in re.findall(r"(?m)^(\w[\w.-]*)==", Path(file).read_text())}
    assert {"torch", "trl", "uvicorn", "matplotlib", "nanobind", "scikit-build-core", "cmake"} <= names <= pinned
    assert not names & {"mypy", "ruff", "pytest", "openai"} and "uv" in pinned


def test_the_clock_shows_the_parts_of_this_make(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = _script("clock")
    parts, run = tmp_path / "build" / "clock.jsonl", tmp_path / "run"
    monkeypatch.setattr(script, "PARTS", parts)
    parts.parent.mkdir()
    parts.write_text(json.dumps({"part": "build", "began": 100.0, "seconds": 400.0}) + "\n")
    started = time.time()
    assert script.main(["time", "packages", "--", sys.executable, "-c", "raise SystemExit(3)"]) == 3
    (run / "stages").mkdir(parents=True)
    for stage, seconds, ended in (
        ("train", 70.0, "2999-01-01T00:00:00+00:00"),
        ("eval", 61.0, "2999-01-01T00:00:00+00:00"),
        ("plan", 5.0, "2001-01-01T00:00:00+00:00"),
    ):
        (run / "stages" / f"{stage}.json").write_text(json.dumps({"stage": stage, "seconds": seconds, "ended": ended}))
    (run / "answers.json").write_text("[]")
    assert script.main(["show", str(started), "--loop", str(run)]) == 0
    rows = [line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["packages", "training", "judging", "first trained answer at", "in all"]
    assert dict(rows)["training"] == "1:10" and dict(rows)["judging"] == "1:01"
