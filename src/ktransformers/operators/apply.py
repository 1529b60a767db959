"""A plan of operators carried out on a loaded model: each assigned module is replaced by what its operator makes of it.
Names stay those of the stock model, so adapters and state dicts fit both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ktransformers.ground.errors import InputError
from ktransformers.ground.log import logger
from ktransformers.operators.base_operator import RuledModel
from ktransformers.operators.loader import Loader
from ktransformers.operators.plan import Assignment, OperatorPlan

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
