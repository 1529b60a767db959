"""Where experts are computed, and what that takes: shapes, machines, memory, time, and the plan made of them; and
`attach`, the engine that computes them there, which is imported with torch when it is first asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ktransformers.place.machine import Machine, profile, profiles, with_gpus, with_memory
from ktransformers.place.meter import Comparison, Meter, compare
from ktransformers.place.plan import Candidate, Plan, Way, make_plan, refuse
from ktransformers.place.shape import ModelShape, open_shape, shipped
from ktransformers.place.work import Choice, Serving, Training

if TYPE_CHECKING:
    from ktransformers.place.placement import Placement, attach

__all__ = [
    "Candidate",
    "Choice",
    "Comparison",
    "Machine",
    "Meter",
    "ModelShape",
    "Placement",
    "Plan",
    "Serving",
    "Training",
    "Way",
    "attach",
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


def __getattr__(name: str) -> object:
    if name not in ("Placement", "attach"):
        raise AttributeError(f"module 'ktransformers.place' has no attribute {name!r}")
    return getattr(importlib.import_module("ktransformers.place.placement"), name)
