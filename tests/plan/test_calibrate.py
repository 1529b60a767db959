"""Calibration: rates are measured once, cached, and measured again if the cache file is invalid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ktransformers import _core
from ktransformers.plan import Serving, make_plan, open_shape
from ktransformers.plan import calibrate as module
from ktransformers.plan.machine import EXPERTS_SECONDS, LAYER_SECONDS, PYTHON_SECONDS


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "LOOP_SECONDS", 0.02)
    monkeypatch.setattr(module, "LAYER_SECONDS", 0.01)
    return tmp_path / "ktransformers"


def test_rates_are_measured_once_and_cached(cache: Path) -> None:
    first = module.calibrate()
    (file,) = cache.iterdir()
    assert module.calibrate() == first  # to the last digit: from the file
    assert json.loads(file.read_text())["tile_flops"] == first.tile_flops
    for rate in (first.tile_flops, first.read_bytes, first.dense_flops, first.dense_flops_f32):
        assert rate > 1e6
    assert 0.02 < first.forward_share < 4 and 0.02 < first.backward_share < 4
    file.write_text("{")
    assert module.calibrate().version == module.VERSION
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 0, "tile_flops": 1.0}))
    assert module.calibrate().tile_flops > 1e6
    assert [path.name for path in cache.iterdir()] == [file.name]  # nothing half-written beside it


def test_rates_measured_too_low_are_measured_again(cache: Path) -> None:
    first = module.calibrate()
    (file,) = cache.iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tile_flops": 1e3, "read_bytes": 1e18}))
    found = module.remeasure_rates()
    assert found.tile_flops > 1e6 and found.read_bytes == 1e18  # what was faster before stays
    assert module.calibrate() == found and found.forward_share == first.forward_share


def test_unwritable_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(module, "LOOP_SECONDS", 0.01)
    monkeypatch.setattr(module, "LAYER_SECONDS", 0.005)
    assert module.calibrate().read_bytes > 0


def test_this_machine_can_be_planned_for(cache: Path) -> None:
    machine = module.this_machine()
    assert machine.measured and machine.memory > 0
    plan = make_plan(open_shape("deepseek-v2-lite"), Serving(), machine)
    assert plan.nearest.time.first_token is not None and plan.nearest.time.first_token > 0


def test_launch_times_follow_the_speed_of_python(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.system, "python_loop_seconds", lambda: 2 * PYTHON_SECONDS)
    machine = module.this_machine()
    assert machine.layer_seconds == 2 * LAYER_SECONDS and machine.experts_seconds == 2 * EXPERTS_SECONDS


def test_time_spent_waiting_for_a_core_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([(1.0, 1.0), (2.0, 4.0)])  # on a core and waiting for one: a quarter of the time on a core
    monkeypatch.setattr(module.system, "scheduled_seconds", lambda: next(seconds))
    assert module._running_rate(lambda: 5.0) == 20.0
    monkeypatch.setattr(module.system, "scheduled_seconds", lambda: (0.0, 0.0))  # a kernel that does not count it
    assert module._running_rate(lambda: 5.0) == 5.0


def test_waiting_for_the_limit_of_a_container_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([(1.0, 1.0), (2.0, 4.0)])
    monkeypatch.setattr(module.system, "scheduled_seconds", lambda: next(seconds))
    monkeypatch.setattr(_core, "machine", lambda: {"quota": 2.0})
    assert module._running_rate(lambda: 5.0) == 5.0
