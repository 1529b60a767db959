"""Training through the placement engine: keys, the run itself, statistics. The engine is on
torch's CPU device, so that all of it runs without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ktransformers.ground.errors import InputError
from ktransformers.place import apply, attach
from ktransformers.place.apply import as_planned
from ktransformers.place.residents import load_counts
from ktransformers.train.placement import TrainPlacement, options_of
from ktransformers.train.plan import make_plan
from ktransformers.train.resolve import read_settings
from tests.support.training import RunRecorder, recipe
from tests.support.training_runs import run

pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")


def test_placement_keys_are_read(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KT_PLACE", raising=False)
    keys = recipe(tiny, tmp_path / "out")
    nothing = options_of(read_settings(keys))
    assert nothing.policies == ("auto", "cpu") and as_planned(nothing, None).policy == "auto"
    asked = {
        "kt_num_gpu_experts": 2,
        "kt_config": {"kt_enable_dynamic_expert_update": True, "kt_expert_update_steps": 7},
    }
    wish = options_of(read_settings(keys | asked))
    assert (wish.policy, wish.kt_num_gpu_experts, wish.kt_expert_update_steps) == ("resident", 2, 7)
    rule = options_of(read_settings(keys | {"kt_optimize_rule": "DeepSeek-V3-Chat-sft-amx-multi-gpu-4.yaml"}))
    assert rule.kt_optimize_rule is not None and rule.policy == "cpu"
    for wrong in (
        {"kt_place": "gpu"},
        {"kt_place": "split"},
        {"kt_max_deferred_experts_per_token": 2},
        {"kt_gpu_experts_ratio": 2},
    ):
        with pytest.raises(InputError, match=next(iter(wrong))):
            read_settings(keys | wrong)
    placing = TrainPlacement(read_settings(keys | {"kt_optimize_rule": "x-multi-gpu-4.yaml", "use_cpu": True}), None)
    assert placing.gpus == 1 and placing.loading_device == torch.device("cpu")


def test_split_is_refused_before_anything_is_loaded(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_PLACE", "split")
    keys = recipe(tiny, tmp_path / "out")
    for refused in (make_plan, lambda settings: TrainPlacement(settings, None)):
        with pytest.raises(InputError, match="KT_PLACE: given split, expected in training one of auto, cpu"):
            refused(read_settings(keys))
    assert make_plan(read_settings(keys | {"kt_place": "stream"})).plan.forecast is not None


def test_run_with_placed_experts(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses of a run whose experts the CPU computes, to bf16's rounding; a key without effect is noted."""
    losses = []
    file = tmp_path / "counts.safetensors"
    more: dict[str, Any] = {"kt_place": "resident", "kt_num_gpu_experts": 2, "kt_record_experts": str(file)}
    more |= {"kt_enable_dynamic_expert_update": True, "kt_expert_update_steps": 2}
    for at, keys in enumerate(({}, more)):
        if keys:
            monkeypatch.setattr(apply, "attach", lambda model, **given: attach(model, **(given | {"device": "cpu"})))
        watcher = RunRecorder()
        run(recipe(tiny, tmp_path / str(at), learning_rate=1e-2, **keys), watcher)
        losses.append([step.values["loss"] for step in watcher.steps if "loss" in step.values])
    assert len(losses[0]) == 4 and losses[0][-1] < losses[0][0]
    assert np.allclose(*losses, rtol=0.02)
    assert sum("kt_enable_dynamic_expert_update: accepted, has no effect" in note for note in watcher.notes) == 1
    assert any("policy resident; 2 residents in each of" in note for note in watcher.notes)
    assert any(str(file) in note for note in watcher.notes)
    from safetensors.numpy import load_file

    names = sorted(load_file(file))
    assert all(row.sum() > 0 for row in load_counts(file, names))
