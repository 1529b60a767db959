"""What a run really took, beside what its plan said: peak memory sampled by a thread, seconds of a step.

Host memory is the anonymous part of the process: packed experts, adapters, activations. Pages of the checkpoint that
are mapped belong to the page cache and are left out, in the plan as well. Samples come every few milliseconds, so a
peak that is shorter goes unseen.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ktransformers.plan.planner import Candidate

PERIOD = 0.005  # seconds between two samples


def anonymous_bytes() -> int:
    """Of this process, in RAM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


class Meter:
    """`with Meter() as meter: ...; meter.peak`."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kt-meter", daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD):
            self.peak = max(self.peak, anonymous_bytes())

    def __enter__(self) -> Meter:
        self.peak = anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous_bytes())


@dataclass(frozen=True)
class PlanComparison:
    what: str
    predicted: float
    measured: float
    unit: str

    @property
    def error(self) -> float:
        """0.1: measured 10 % more than predicted."""
        return self.measured / self.predicted - 1

    def __str__(self) -> str:
        return f"{self.what}: {self.measured:.3g} {self.unit}, predicted {self.predicted:.3g} ({self.error:+.0%})"


def compare(
    plan: Candidate, *, host: int = 0, gpu: int = 0, tokens_per_second: float | None = None
) -> tuple[PlanComparison, ...]:
    """Predicted beside measured; what was not measured is left out. `gpu`: what torch's allocator reserved, to which
    the context does not belong."""
    found = []
    if host:
        found.append(PlanComparison("host memory", plan.memory.host_bytes / 1e9, host / 1e9, "GB"))
    if gpu and plan.memory.gpus:
        predicted = plan.memory.gpu_bytes[0] - plan.memory.gpus[0]["context"]
        found.append(PlanComparison("GPU memory", predicted / 1e9, gpu / 1e9, "GB"))
    if tokens_per_second:
        found.append(PlanComparison("speed", plan.time.tokens_per_second, tokens_per_second, "tokens/s"))
    return tuple(found)
