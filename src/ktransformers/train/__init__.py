"""`kt train`: LoRA fine-tuning (SFT) and preference training (DPO) from LLaMA-Factory's YAML files.

The steps of a run: `resolve` (keys into settings) -> `plan` (data, template, targets, sizes; loads no weights) -> `run`
(the model, stock PEFT, TRL's trainers) -> the output directory. Submodules are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktransformers.train.plan import TrainPlan, make_plan
    from ktransformers.train.resolve import read_settings
    from ktransformers.train.run import train

__all__ = ["TrainPlan", "make_plan", "read_settings", "train"]

_MODULE_OF = {
    "read_settings": "ktransformers.train.resolve",
    "TrainPlan": "ktransformers.train.plan",
    "make_plan": "ktransformers.train.plan",
    "train": "ktransformers.train.run",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ktransformers.train' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
