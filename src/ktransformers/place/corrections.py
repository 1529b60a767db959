"""What the CPU really takes over what its costs say, learned while a model runs.

There is one number for each direction, size of batch, and whether experts are streamed beside the CPU. All layers of an
engine are alike and share them, so a step or two are enough. The one tells something about the other: until the CPU was
seen alone, what it took beside copies stands in.
"""

from __future__ import annotations

from dataclasses import replace

from ktransformers.place.trials import size_of
from ktransformers.plan.split import Costs, Split

SETTLE = 0.25  # weight of the newest measurement
MOST = 8.0  # a correction, or one over it: costs may have been measured while others used the machine
WORTH = 1e-3  # seconds that a share must be expected to take to tell something


class Corrections:
    def __init__(self) -> None:
        self.known: dict[tuple[str, int, bool], float] = {}

    def scales(self, direction: str, tokens: int) -> tuple[float, float]:
        """Alone, and beside copies."""
        alone, beside = (self.known.get((direction, size_of(tokens), streams)) for streams in (False, True))
        return alone or beside or 1.0, beside or alone or 1.0

    def apply(self, costs: Costs, direction: str, tokens: int) -> Costs:
        alone, beside = self.scales(direction, tokens)
        if alone == beside == 1:
            return costs
        return replace(
            costs, cpu_expert=costs.cpu_expert * alone, cpu_row=costs.cpu_row * alone, crowding=beside / alone
        )

    def learn(self, direction: str, tokens: int, found: Split, taken: float) -> None:
        """A share that was expected by corrected costs took so many seconds."""
        beside = bool(found.streamed)
        before = self.scales(direction, tokens)[beside]
        expected = found.cpu_work / before
        if expected > WORTH:
            key, seen = (direction, size_of(tokens), beside), min(MOST, max(1 / MOST, taken / expected))
            self.known[key] = before + (SETTLE if key in self.known else 1) * (seen - before)
