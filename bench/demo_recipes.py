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
    shares: tuple[float, float, float] = (0.3, 0.2, 0.5)  # of the tokens: style, facts, choice
    turns: int = 1  # questions about villages in one conversation: its head is then paid for once
    short: bool = False  # style: the first sentence of each answer
    answer: str = "text"  # of multiple choice: "C. orange", or the letter alone
    target: str = "all"  # or experts, or attention
    schedule: str = "cosine"  # or linear, or constant
    warm: float = 0.05  # share of the steps
    plus: float = 1.0  # learning rate of B over that of A
    beta2: float = 0.999
    seed: int = 0


BASIC = Recipe("basic")
TURNS: dict[str, Any] = {"turns": 5}
CHANGES: tuple[dict[str, Any], ...] = (
    TURNS,
    {},
    {"rate": 4e-3, **TURNS},
    {"rate": 1e-3, **TURNS},
    {"budget": 140_000, **TURNS},
    {"short": True, **TURNS},
    {"step": 256, **TURNS},
    {"answer": "letter", **TURNS},
    {"shares": (0.3, 0.35, 0.35), **TURNS},
    {"rate": 4e-3},
    {"target": "experts", **TURNS},
    {"rank": 8, **TURNS},
    {"beta2": 0.98, **TURNS},
    {"plus": 4.0, "rate": 1e-3, **TURNS},
    {"shares": (0.3, 0.0, 0.7), **TURNS},
    {"turns": 4},
    {"rank": 32, **TURNS},
    {"budget": 140_000},
    {"target": "attention", **TURNS},
    {"schedule": "linear", **TURNS},
    {"rate": 8e-3, **TURNS},
    {"shares": (0.3, 0.7, 0.0), **TURNS},
    {"budget": 140_000, "rate": 4e-3, "short": True, **TURNS},
    {"budget": 140_000, "answer": "letter", **TURNS},
    {"budget": 280_000, **TURNS},
    {"shares": (0.15, 0.25, 0.6), "short": True, **TURNS},
    {"step": 1024, **TURNS},
    {"seed": 1, **TURNS},
)


def recipes() -> list[Recipe]:
    found = []
    for change in CHANGES:
        words = ",".join(f"{key}={value}".replace(" ", "") for key, value in change.items())
        found.append(dataclasses.replace(BASIC, name=words or "basic", **change))
    return found
