"""Measured memory and speed of a run, to compare with its plan: peak host memory sampled by a thread, seconds of a
step.

Host memory is the anonymous memory of the process, pinned memory included: experts packed at loading, adapters,
activations. Mapped pages of the files, a packed directory's experts among them, belong to the page cache and are left
out, as in the plan. Shorter peaks than the sampling period of a few
milliseconds are missed.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from dataclasses import dataclass
from types import TracebackType

from ktransformers.ground.system import resident_bytes
from ktransformers.plan.planner import Candidate

PROBE_BYTES = 64 << 20  # of pinned memory, to see whether a counter of the kernel has them
SAMPLE_SECONDS = 0.005  # seconds between two samples
AT_END = "host memory at the end"  # what a server compares when it ends


def anonymous_bytes() -> int:
    """Resident anonymous memory of this process, with what torch has pinned."""
    return resident_bytes("RssAnon") + uncounted_pinned("RssAnon")


def uncounted_pinned(kind: str) -> int:
    """Bytes of torch's pinned allocator that `resident_bytes(kind)` does not see: the driver maps them."""
    torch = sys.modules.get("torch")  # without CUDA in use nothing is pinned
    if torch is None or not torch.cuda.is_initialized() or _counts_pinned(kind):
        return 0
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


@functools.cache
def _counts_pinned(kind: str) -> bool:
    import torch

    before = resident_bytes(kind)
    probe = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1)
    return resident_bytes(kind) - before >= probe.numel() // 2


class Meter:
    """Peak of `anonymous_bytes` inside a `with` block."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kt-meter", daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
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

    def __str__(self) -> str:  # `read_comparison` reads it
        return f"{self.what}: {self.measured:.3g} {self.unit}, predicted {self.predicted:.3g} ({self.error:+.0%})"


def read_comparison(text: str, what: str) -> PlanComparison | None:
    """The last one that a program's log has of it."""
    lines = re.findall(rf"{re.escape(what)}: (\S+) (\S+), predicted (\S+) \(", text)
    return PlanComparison(what, float(lines[-1][2]), float(lines[-1][0]), lines[-1][1]) if lines else None


def compare_with_plan(
    plan: Candidate, *, host: int = 0, gpu: int = 0, tokens_per_second: float | None = None
) -> tuple[PlanComparison, ...]:
    """Predicted and measured values of what was measured. `gpu`: bytes reserved by torch's allocator, which do not
    include the CUDA context."""
    comparisons = []
    if host:
        comparisons.append(PlanComparison("host memory", plan.memory.host_bytes / 1e9, host / 1e9, "GB"))
    if gpu and plan.memory.gpus:
        predicted = plan.memory.gpu_bytes[0] - plan.memory.gpus[0]["context"]
        comparisons.append(PlanComparison("GPU memory", predicted / 1e9, gpu / 1e9, "GB"))
    if tokens_per_second:
        comparisons.append(PlanComparison("speed", plan.time.tokens_per_second, tokens_per_second, "tokens/s"))
    return tuple(comparisons)
