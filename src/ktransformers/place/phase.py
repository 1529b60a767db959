"""What a pass through a layer of experts is for: forward, forward again in a backward pass, or backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Phase:
    name: str  # forward, again (recomputed in a backward pass) or backward
    direction: str

    @property
    def walk(self) -> str:
        """What is computed again belongs to the walk back: the one finds what the other fetched."""
        return "forward" if self.name == "forward" else "back"


PHASES = {"forward": Phase("forward", "forward"), "again": Phase("again", "forward")}
PHASES["backward"] = Phase("backward", "backward")


def phase_of(direction: str) -> Phase:
    again = direction == "forward" and torch._C._current_graph_task_id() != -1
    return PHASES["again" if again else direction]
