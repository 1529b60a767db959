"""`load_by_rules`: `load_model` with the rules of a file, on the CPU. `kt train` and `kt serve` do the same with
options of their own, and put layers on GPUs afterwards (`place/apply.py`)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ktransformers.modeling.load import load_model
from ktransformers.modeling.skeleton import meta_model
from ktransformers.operators.apply import apply_operators
from ktransformers.operators.loader import Loader
from ktransformers.operators.plan import plan_operators
from ktransformers.operators.rules import require_rules


def load_by_rules(
    path: str | Path, rules: str | Path, *, experts: str | Path | None = None, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """The model in `path` with the operators of a rule file, all of it on the CPU. Rules are checked first."""
    folder = Path(path)
    on_cpu, _ = require_rules(rules).on_machine(0, cpu_only=True)
    plan = plan_operators(meta_model(folder), on_cpu)

    def apply(model: PreTrainedModel) -> Collection[str]:
        return apply_operators(model, plan, Loader(folder))

    return load_model(folder, experts=experts, dtype=dtype, formats=plan.expert_formats, on_loaded=apply)
