"""Runs training in tests: the saved adapter, the change of its tensors, and the first gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from ktransformers.train.build import build_trainer
from ktransformers.train.model import open_trained
from ktransformers.train.plan import make_plan
from ktransformers.train.resolve import read_settings
from ktransformers.train.run import Result, train
from tests.support.forked import Forked
from tests.support.training import RunRecorder

for package in ("trl", "datasets"):
    pytest.importorskip(package)


def run(keys: dict[str, Any], watcher: RunRecorder | None = None) -> Result:
    return train(read_settings(keys), watcher or RunRecorder())


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a tensor, by norms."""
    assert actual.keys() == expected.keys()
    return max(
        ((actual[name] - expected[name]).norm() / expected[name].norm().clamp(min=1e-12)).item() for name in expected
    )


class GradientRecorder(TrainerCallback):
    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.gradients:
            self.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def first_gradients(keys: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients of the first optimizer step. B is randomised before it, so that A has a gradient too."""
    settings = read_settings(keys | {"max_steps": 1, "max_grad_norm": 0, "lr_scheduler_type": "constant"})
    prepared = make_plan(settings)
    assert prepared.directory is not None
    model = open_trained(prepared.directory, settings, torch.float32, torch.device("cpu"))
    trainer = build_trainer(model, prepared)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    if settings.data.stage == "dpo":
        from ktransformers.train.preference import add_reference

        add_reference(trainer, "base", 1000, lambda done, rows: None)
    recorder = GradientRecorder()
    trainer.add_callback(recorder)
    trainer.train()
    return recorder.gradients


SCRIPT = "import typer; from ktransformers.cli.train import train; typer.run(train)"


def start_run(keys: dict[str, Any], file: Path) -> Forked:
    file.write_text(json.dumps(keys))  # JSON is YAML
    return Forked(SCRIPT, file)
