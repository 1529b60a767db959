"""Where experts are computed, and what that takes: shapes, machines, memory, time, and the plan made of them."""

from __future__ import annotations

from ktransformers.place.machine import Machine, profile, profiles, with_gpus, with_memory
from ktransformers.place.meter import Comparison, Meter, compare
from ktransformers.place.plan import Candidate, Plan, Way, make_plan, refuse
from ktransformers.place.shape import ModelShape, open_shape, shipped
from ktransformers.place.work import Choice, Serving, Training

__all__ = [
    "Candidate",
    "Choice",
    "Comparison",
    "Machine",
    "Meter",
    "ModelShape",
    "Plan",
    "Serving",
    "Training",
    "Way",
    "compare",
    "make_plan",
    "open_shape",
    "profile",
    "profiles",
    "refuse",
    "shipped",
    "with_gpus",
    "with_memory",
]
