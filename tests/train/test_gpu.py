"""`kt train` with the model on a GPU: the same losses as without one, wherever the experts are computed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import RunRecorder, recipe
from tests.support.training_runs import adapter, run

pytestmark = pytest.mark.gpu

LOUD: dict[str, Any] = {"bf16": True, "learning_rate": 1e-2, "max_steps": 6, "lr_scheduler_type": "constant"}


def losses(watcher: RunRecorder) -> list[float]:
    return [step.values["loss"] for step in watcher.steps if "loss" in step.values]


def trained(tiny: Path, output: Path, **keys: Any) -> list[float]:
    watcher = RunRecorder()
    run(recipe(tiny, output, **LOUD | keys), watcher)
    return losses(watcher)


@pytest.fixture(scope="module")
def on_the_cpu(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return trained(tiny, tmp_path_factory.mktemp("cpu") / "sft", use_cpu=True)


@pytest.mark.parametrize("place", ["cpu", "stream", "auto", "resident"])
def test_gpu_losses_equal_cpu_losses(place: str, on_the_cpu: list[float], tiny: Path, tmp_path: Path) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    found = trained(tiny, tmp_path / place, kt_place=place)
    assert torch.cuda.max_memory_allocated() > before, "nothing was computed there"
    assert found == pytest.approx(on_the_cpu, rel=0.02)
    assert found[-1] < found[0]
    assert all(tensor.isfinite().all() for tensor in adapter(tmp_path / place).values())


def test_dpo_loss_starts_at_ln_2(tiny: Path, tmp_path: Path) -> None:
    found = trained(tiny, tmp_path / "dpo", stage="dpo", dataset="style_neko_en_dpo", pref_beta=0.1, max_steps=4)
    assert found[0] == pytest.approx(math.log(2), abs=2e-3)
    assert found[-1] < found[0]


def test_run_resumes_from_checkpoint(tiny: Path, tmp_path: Path) -> None:
    keys = {"save_strategy": "steps", "save_steps": 3}
    whole = trained(tiny, tmp_path / "whole", **keys)
    rest = trained(tiny, tmp_path / "rest", **keys, resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert rest == pytest.approx(whole[3:], rel=0.02)
