"""`kt train`: LoRA fine-tuning and preference training from the YAML files that people already have.

The road of a run: `resolve` (keys into settings) -> `plan` (data, template, targets, sizes; nothing heavy) -> `run`
(the model, stock PEFT, TRL's trainers) -> the output directory. Nothing here is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktransformers.train.plan import TrainPlan, make_plan
    from ktransformers.train.resolve import read_settings
    from ktransformers.train.run import train

__all__ = ["TrainPlan", "make_plan", "read_settings", "train"]

_HOME = {
    "read_settings": "ktransformers.train.resolve",
    "TrainPlan": "ktransformers.train.plan",
    "make_plan": "ktransformers.train.plan",
    "train": "ktransformers.train.run",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ktransformers.train' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
