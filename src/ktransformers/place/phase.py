"""What a pass through a layer of experts is for: forward, forward again in a backward pass, or backward; and what kind
of walk over the layers it is part of."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Phase:
    name: str  # forward, again (recomputed in a backward pass) or backward
    direction: str
    walk: str  # what is computed again belongs to the walk back: the one finds what the other fetched


PHASES = {
    "forward": Phase("forward", "forward", "forward"),
    "again": Phase("again", "forward", "back"),
    "backward": Phase("backward", "backward", "back"),
}
FEW = Phase("forward", "forward", "few")  # batches that host functions may take, and others not


def phase_of(direction: str) -> Phase:
    again = direction == "forward" and torch._C._current_graph_task_id() != -1
    return PHASES["again" if again else direction]
