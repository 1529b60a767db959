"""`report_to` with the packages that it names, offline: the numbers of the run are in what they wrote.

Skipped where a package is missing; the extras `tensorboard` and `mlflow` install them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import recipe
from tests.support.training_runs import run


def logged(output: Path, field: str) -> list[float]:
    lines = [json.loads(line) for line in (output / "trainer_log.jsonl").read_text().splitlines()]
    return [line[field] for line in lines if field in line]


def keys(tiny: Path, output: Path, logger: str) -> dict[str, Any]:
    return recipe(tiny, output, max_steps=3, save_strategy="no") | {"report_to": logger, "run_name": "tracked"}


def test_tensorboard(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output, events = tmp_path / "run", tmp_path / "events"
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(events))
    run(keys(tiny, output, "tensorboard"))
    (file,) = events.rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(file))
    accumulator.Reload()
    for scalar, field in (("train/loss", "loss"), ("train/learning_rate", "lr"), ("train/grad_norm", "grad_norm")):
        values = [event.value for event in accumulator.Scalars(scalar)]
        assert values == pytest.approx(logged(output, field), rel=1e-5) and len(values) == 3


def test_mlflow(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    output, store = tmp_path / "run", f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tiny")
    monkeypatch.chdir(tmp_path)
    run(keys(tiny, output, "mlflow"))
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    (kept,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(kept.info.run_id, "loss")
    assert [metric.value for metric in sorted(history, key=lambda metric: metric.step)] == pytest.approx(
        logged(output, "loss")
    )
    assert kept.info.run_name == "tracked" and kept.info.status == "FINISHED"
