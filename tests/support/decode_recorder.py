"""A stand-in for the capture of decode steps on machines without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ktransformers.place.placement import Placement
from ktransformers.serve.graphs.step_graphs import Compute, StepGraphs
from tests.support.serving import EngineHarness


class EagerCapture:
    """Calls the step again instead of replaying it; counts captures, and fails them with `failure`."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self.captures = 0
        self.failure: Callable[[], Exception] | None = None

    def __call__(self, compute: Compute) -> Compute:
        if self.failure is not None:
            raise self.failure()
        compute()
        self.captures += 1

        def replay() -> torch.Tensor:
            with self._placement.capture_warmup(recaptured=True):
                return compute()

        return replay


def graphs_of(harness: EngineHarness) -> StepGraphs:
    assert harness.forward.graphs is not None
    return harness.forward.graphs
