"""Stand-in for CUDA graph capture on machines without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ktransformers.place.placement import Placement
from ktransformers.serve.graphs.decode_graphs import Compute, DecodeGraphs
from tests.support.serving import EngineHarness


class EagerCapture:
    """Replays by computing eagerly again; `captured` counts the captures."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self.captured = 0
        self.refusal: Callable[[], Exception] | None = None

    def __call__(self, compute: Compute) -> Compute:
        if self.refusal is not None:
            raise self.refusal()
        compute()
        self.captured += 1

        def again() -> torch.Tensor:
            with self._placement.rehearsal():
                return compute()

        return again


def graphs_of(harness: EngineHarness) -> DecodeGraphs:
    assert harness.forward.graphs is not None
    return harness.forward.graphs
