"""Trainings that the page shows: found below the server's folders, named by clients, read while they are written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ktransformers.serve.http import training
from ktransformers.serve.http.training import TrainingRuns, find_trainings
from tests.support.serving import EngineHarness, make_service, run_app


def write_run(folder: Path, steps: int, changed: float, adapter: bool = False) -> Path:
    folder.mkdir(parents=True)
    lines = [{"current_steps": step, "total_steps": 9, "loss": 1.0} for step in range(1, steps + 1)]
    log = folder / "trainer_log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"current_st')
    os.utime(log, (changed, changed))
    if adapter:
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def test_runs_are_found_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    old = write_run(tmp_path / "saves" / "old", 9, 100.0, adapter=True)
    new = write_run(tmp_path / "saves" / "deep" / "new", 4, 200.0)
    write_run(tmp_path / "saves" / "old" / "checkpoint-4", 4, 300.0)
    write_run(tmp_path / ".hidden" / "run", 4, 300.0)
    write_run(tmp_path / "a" / "b" / "c" / "d" / "too-deep", 4, 300.0)
    empty = tmp_path / "watched"
    empty.mkdir()
    runs = TrainingRuns(empty, roots=lambda: [tmp_path, tmp_path / "saves"]).list()
    assert [(run["name"], run["step"], run["steps"], run["adapter"]) for run in runs] == [
        ("watched", 0, 0, None),
        ("saves/deep/new", 4, 9, None),
        ("saves/old", 9, 9, str(old)),
    ]
    assert runs[1]["directory"] == str(new) and runs[1]["changed"] == 200.0
    assert TrainingRuns().list() == [] and TrainingRuns(empty).log_of(None) is not None


def test_search_is_bounded_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(30):
        (tmp_path / f"empty-{index:02d}").mkdir()
    write_run(tmp_path / "run", 1, 1.0)
    assert len(list(find_trainings([tmp_path]))) == 1
    monkeypatch.setattr(training, "SEARCHED_FOLDERS", 20)
    assert list(find_trainings([tmp_path])) == [], "a large folder does not take longer"
    monkeypatch.undo()
    searches: list[int] = []
    runs = TrainingRuns(roots=lambda: searches.append(1) or [tmp_path])  # type: ignore[func-returns-value]
    assert len(runs.list()) == len(runs.list()) == 1 and searches == [1]
    monkeypatch.setattr(training, "SEARCH_SECONDS", 0.0)
    assert runs.list() and searches == [1, 1]


def test_large_folder_and_links_do_not_hide_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(30):
        (tmp_path / "home" / f"empty-{index:02d}").mkdir(parents=True)
    inside = write_run(tmp_path / "home" / "models" / "run", 1, 1.0)
    outside = write_run(tmp_path / "outside" / "run", 1, 2.0)
    (tmp_path / "home" / "models" / "link").symlink_to(outside.parent)
    roots = [tmp_path / "home", tmp_path / "home" / "models"]
    assert find_trainings(roots) == [inside], "a link out of the folder is not followed, and no folder is found twice"
    monkeypatch.setattr(training, "SEARCHED_FOLDERS", 20)
    assert find_trainings(roots) == [inside]
    monkeypatch.setattr(training, "MAX_RUNS", 1)
    (run,) = TrainingRuns(roots=lambda: [tmp_path / "home" / "models", tmp_path / "outside"]).list()
    assert run["directory"] == str(outside), "the newest are kept"


def test_log_of_a_diverged_run_is_json(tmp_path: Path) -> None:
    (tmp_path / "trainer_log.jsonl").write_text('{"current_steps": 1, "loss": NaN, "grad_norm": Infinity}\nNaN\n[1]\n')
    found = TrainingRuns(tmp_path).log_of(None)
    assert found is not None
    assert found.lines_after(0)["lines"] == [{"current_steps": 1, "loss": None, "grad_norm": None}]


def test_clients_name_a_found_run_and_no_path(
    harness: EngineHarness, adapters: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("fastapi")
    from ktransformers.serve.http.api import create_app
    from tests.serve.http.test_api import get

    write_run(tmp_path / "found" / "run", 3, 1.0)
    other = write_run(tmp_path / "other", 3, 1.0)
    app = create_app(make_service(harness, adapters), training=TrainingRuns(roots=lambda: [tmp_path / "found"]))
    with run_app(app) as url:
        (run,) = json.loads(get(url, "/training/runs")[1])["runs"]
        first = json.loads(get(url, f"/training?run={run['name']}")[1])
        assert [line["current_steps"] for line in first["lines"]] == [1, 2, 3], "complete lines"
        assert json.loads(get(url, f"/training?run={run['name']}&after={first['next']}")[1])["lines"] == []
        for name in (str(other), "../other", "", "/etc"):
            status, body = get(url, f"/training?run={name}")
            assert status == 404 and "training/runs" in json.loads(body)["error"]["message"]
        metrics = dict(line.rsplit(" ", 1) for line in get(url, "/metrics")[1].splitlines() if not line.startswith("#"))
        resident, total = (float(metrics[name]) for name in ("process_resident_memory_bytes", "kt_host_memory_bytes"))
        assert 1e8 < resident < total and 0 < float(metrics["kt_host_memory_available_bytes"]) < total


def test_counters_have_all_digits(
    harness: EngineHarness, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page draws tokens/s from differences of counters."""
    from collections import Counter

    from ktransformers.serve.http import metrics

    service = make_service(harness, adapters)
    monkeypatch.setattr(service.engine.counts, "new_tokens", 12_345_678)
    assert "\nkt_new_tokens_total 12345678\n" in metrics.render(service, Counter(), 0)


def test_server_looks_around_its_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktransformers.serve.launch import training_roots

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "ktransformers.ground.model_registry.search_folders", lambda: [tmp_path / "models", tmp_path / "gone"]
    )
    for folder in ("models", "saves"):
        (tmp_path / folder).mkdir()
    loaded = {"law": SimpleNamespace(adapter=SimpleNamespace(source=str(tmp_path / "saves" / "law")))}
    service = SimpleNamespace(registry=SimpleNamespace(loaded=loaded))
    assert training_roots(service) == [tmp_path, tmp_path / "models", tmp_path / "saves"]
