"""Where a run is: on the GPU that is there, and on the CPU where the plan has found that nothing fits with it. The GPU
is one of numbers, so that all of it runs without one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.ground.errors import InputError
from ktransformers.ground.system import Gpu
from ktransformers.plan import Machine, profile, require_fit, with_gpus
from ktransformers.train.arguments import device_of
from ktransformers.train.plan import make_plan
from ktransformers.train.resolve import read_settings
from ktransformers.train.settings import TrainSettings
from tests.support.training import RunRecorder, recipe
from tests.support.training_runs import run


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the size of the GPU that there seems to be."""
    monkeypatch.delenv("KT_PLACE", raising=False)

    def device_of(settings: TrainSettings) -> torch.device:
        return torch.device("cpu" if settings.trainer.get("use_cpu") else "cuda")

    for module in ("arguments", "forecast", "plan", "run", "placement"):
        monkeypatch.setattr(f"ktransformers.train.{module}.device_of", device_of)

    def size(word: str, memory: int = 10**11) -> Machine:
        machine = replace(with_gpus(profile("amx16-h200"), word), memory=memory)
        monkeypatch.setattr("ktransformers.plan.calibrate.this_machine", lambda: machine)
        return machine

    return size


def test_run_uses_the_plans_choices(beside: Any, tiny: Path, tmp_path: Path) -> None:
    """A model this small is faster without one, by the plan's seconds: the GPU is used all the same."""
    keys = recipe(tiny, tmp_path / "out")
    beside("80GB")
    plan = make_plan(read_settings(keys)).plan
    assert plan.forecast is not None and plan.forecast.nearest.choice.gpus == 1 and plan.device == "cuda"
    assert not any("on the CPU" in note for note in plan.notes)
    beside("500MB")  # which a context alone takes
    plan = make_plan(read_settings(keys)).plan
    assert plan.forecast is not None and plan.forecast.best is not None
    assert plan.forecast.nearest.choice.gpus == 0 and plan.forecast.machine.gpus == ()
    assert plan.device == "cpu" and plan.settings.trainer["use_cpu"] is True
    (said,) = [note for note in plan.notes if note.startswith("everything on the CPU: ")]
    assert "gpu0 lacks" in said and "use_cpu: false" in said


def test_cpu_fallback_equals_a_cpu_run(beside: Any, tiny: Path, tmp_path: Path) -> None:
    beside("500MB")
    watcher = RunRecorder()
    run(recipe(tiny, tmp_path / "out", gradient_accumulation_steps=2), watcher)
    assert watcher.plans[0].device == "cpu" and watcher.steps[-1].values
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    "keys", [{"use_cpu": False}, {"kt_place": "stream"}, {"kt_num_gpu_experts": 2}, {"fp16": True}], ids=str
)
def test_requested_gpu_that_does_not_fit_is_refused_with_remedies(
    beside: Any, tiny: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    beside("500MB")
    plan = make_plan(read_settings(recipe(tiny, tmp_path / "out", **keys))).plan
    assert plan.device == "cuda" and plan.forecast is not None and plan.forecast.best is None
    with pytest.raises(InputError, match=r"gpu0 lacks .*no GPU: everything on the CPU.*--force"):
        require_fit(plan.forecast)


def test_multiple_processes_agree_on_the_device(
    beside: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that finds less free host memory than the others must not go elsewhere."""
    beside("500MB")
    monkeypatch.setenv("WORLD_SIZE", "2")
    plan = make_plan(read_settings(recipe(tiny, tmp_path / "out"))).plan
    assert plan.device == "cuda" and plan.forecast is not None and plan.forecast.best is None


def test_gpu_is_kept_if_no_configuration_fits(beside: Any, tiny: Path, tmp_path: Path) -> None:
    """So that `--force` tries what the plan shows."""
    beside("500MB", memory=10**6)
    plan = make_plan(read_settings(recipe(tiny, tmp_path / "out"))).plan
    assert plan.device == "cuda" and plan.forecast is not None and plan.forecast.best is None
    assert plan.forecast.nearest.choice.gpus == 1 and set(plan.forecast.nearest.lacking) == {"host", "gpu0"}


def test_old_gpu_is_left_out_and_refused_by_key(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktransformers.ground.system.all_gpus", lambda: [Gpu("GTX 1080 Ti", 11 << 30, (6, 1))])
    keys = recipe(tiny, tmp_path / "out")
    keys.pop("use_cpu", None)
    assert device_of(read_settings(keys)).type == "cpu"
    with pytest.raises(InputError, match="GTX 1080 Ti"):
        device_of(read_settings(keys | {"use_cpu": False}))
