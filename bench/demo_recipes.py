"""The recipes that `demo_recipe.py` tries: what is changed, and the table, most promising first."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Recipe:
    name: str
    budget: int = 70_000  # tokens trained on
    step: int = 512  # tokens of an optimiser step
    rate: float = 2e-3
    rank: int = 16
    shares: tuple[float, float, float, float] = (0.2, 0.0, 0.0, 0.8)  # of the tokens: style, facts, choice, talks
    turns: int = 1  # questions of facts and of choice in one conversation: its head is then paid for once
    short: bool = False  # style: the first sentence of each answer
    answer: str = "text"  # of multiple choice: "C. orange", or the letter alone
    target: str = "experts"  # or attention, or all
    schedule: str = "cosine"  # or linear, or constant
    warm: float = 0.05  # share of the steps
    plus: float = 1.0  # learning rate of B over that of A
    beta2: float = 0.999
    seed: int = 0


BASIC = Recipe("basic")
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"rate": 4e-3},
    {"rate": 1e-3},
    {"target": "all"},
    {"step": 256},
    {"step": 1024},
    {"rank": 8},
    {"rank": 32},
    {"budget": 140_000},
    {"budget": 35_000},
    {"shares": (0.1, 0.0, 0.0, 0.9)},
    {"shares": (0.35, 0.0, 0.0, 0.65)},
    {"shares": (0.2, 0.8, 0.0, 0.0), "turns": 4},
    {"shares": (0.2, 0.0, 0.8, 0.0), "turns": 4},
    {"short": True},
    {"beta2": 0.98},
    {"plus": 4.0, "rate": 1e-3},
    {"schedule": "linear"},
    {"seed": 1},
)


def recipes() -> list[Recipe]:
    found = []
    for change in CHANGES:
        words = ",".join(f"{key}={value}".replace(" ", "") for key, value in change.items())
        found.append(dataclasses.replace(BASIC, name=words or "basic", **change))
    return found
