"""Models with rules: `with_rules` adds a plan of operators to a `ModelSpec`, for `kt train`, `kt serve` and
LLaMA-Factory, which put layers on GPUs afterwards (`place/apply.py`); `load_by_rules` is `load_model` with the rules of
a file, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ktransformers.ground.errors import InputError
from ktransformers.ground.log import logger
from ktransformers.modeling.load import meta_model, open_model
from ktransformers.modeling.spec import ModelSpec
from ktransformers.operators.base_operator import RuledModel
from ktransformers.operators.loader import Loader
from ktransformers.operators.plan import Assignment, OperatorPlan, plan_operators
from ktransformers.operators.rules import require_rules

log = logger(__name__)


def apply_operators(model: nn.Module, plan: OperatorPlan, loader: Loader) -> frozenset[str]:
    """The names of modules that have an operator of their own now, whose weights are as it wants them. `loader` opens
    the files that the model was loaded from."""
    ruled = RuledModel(model)
    for item in plan.assignments:
        _apply(model, item, ruled, loader)
    loader.release()
    replaced = frozenset(item.name for item in plan.assignments if not item.outcome.keeps_stock)
    log.info("rules: %d modules replaced, %d assigned in all", len(replaced), len(plan.assignments))
    return replaced


def _apply(model: nn.Module, item: Assignment, ruled: RuledModel, loader: Loader) -> None:
    module, config = model.get_submodule(item.name), getattr(model, "config", None)
    stock: Any = config
    injected = item.operator.inject(replace(item.match, module=module, model=ruled), loader, stock)
    if injected is module:
        return
    parent, _, name = item.name.rpartition(".")
    if not name:
        given = f"{item.operator.__name__} for the whole model"
        raise InputError(item.rule.where, given, "a module of it", "match `.` to leave the model itself out")
    setattr(model.get_submodule(parent), name, injected)


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
