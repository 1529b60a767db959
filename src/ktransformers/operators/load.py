"""Models with rules: `with_rules` adds a plan of operators to a `ModelSpec`, for `kt train`, `kt serve` and
LLaMA-Factory, which put layers on GPUs afterwards (`place/apply.py`); `load_by_rules` is `load_model` with the rules of
a file, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ktransformers.modeling.load import open_model
from ktransformers.modeling.skeleton import meta_model
from ktransformers.modeling.spec import ModelSpec
from ktransformers.operators.apply import apply_operators
from ktransformers.operators.loader import Loader
from ktransformers.operators.plan import OperatorPlan, plan_operators
from ktransformers.operators.rules import require_rules


def with_rules(spec: ModelSpec, plan: OperatorPlan | None, expert_format: str | None = None) -> ModelSpec:
    """The spec with the plan's operators, and experts in the formats of the plan, in `expert_format` where it has none;
    without either they keep the formats of the files."""
    if plan is None:
        return replace(spec, formats=expert_format)
    formats = ({} if expert_format is None else {"": expert_format}) | plan.expert_formats
    loader = Loader(spec.path)
    return replace(spec, formats=formats, on_loaded=lambda model: apply_operators(model, plan, loader))


def load_by_rules(
    path: str | Path, rules: str | Path, *, experts: str | Path | None = None, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """The model in `path` with the operators of a rule file, all of it on the CPU. Rules are checked first."""
    on_cpu, _ = require_rules(rules).on_machine(0, cpu_only=True)
    spec = ModelSpec(Path(path), experts=experts, dtype=dtype)
    return open_model(with_rules(spec, plan_operators(meta_model(spec.path), on_cpu)))
