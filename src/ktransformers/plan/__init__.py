"""Memory and time of a model on a machine, predicted before anything is loaded: model shapes, machines, weight formats,
byte and time formulas, and the planner that picks the fastest configuration that fits. Importing it does not import
torch."""

from __future__ import annotations

from ktransformers.plan.machine import Machine, profile, profiles, with_gpus, with_memory
from ktransformers.plan.meter import Meter, PlanComparison, compare_with_plan
from ktransformers.plan.model_shape import ModelShape, open_shape, shipped_shapes, stored_as
from ktransformers.plan.planner import Candidate, Plan, Remedy, make_plan, require_fit
from ktransformers.plan.workload import Choice, Serving, Training

__all__ = [
    "Candidate",
    "Choice",
    "Machine",
    "Meter",
    "ModelShape",
    "Plan",
    "PlanComparison",
    "Remedy",
    "Serving",
    "Training",
    "compare_with_plan",
    "make_plan",
    "open_shape",
    "profile",
    "profiles",
    "require_fit",
    "shipped_shapes",
    "stored_as",
    "with_gpus",
    "with_memory",
]
