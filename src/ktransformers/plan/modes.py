"""In which mode a layer of routed experts runs, chosen from predicted or timed seconds. Pure functions without torch:
the planner decides with the rates of a machine profile, the dispatcher (`place/dispatch.py`) with costs measured on the
machine, by the same rule.

Each pass is of one kind, and each kind has its candidate modes in order of preference. The chosen mode is the first in
that order whose seconds are within the margin of the fastest. Predictions have a margin of the cost model's own error,
so a prediction overrules the preference only when it can tell two modes apart. In decoding the host callback is
preferred, because a CUDA graph can hold it. In training streaming is preferred, by a wide margin and without timing
anything: copies overlap with attention, recomputation and the optimizer, which neither a prediction nor a timing of
expert layers alone contains. A CPU that was 14 % faster over such layers made whole steps 49 % slower (docs/log.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

import numpy as np
from numpy.typing import NDArray

from ktransformers.plan.split import Costs, split

CPU = "cpu"  # the CPU computes every expert
RESIDENT = "resident"  # experts on the GPU are computed there, the rest by the CPU
HOST_CALLBACK = (
    "host_callback"  # the same without synchronising the host on expert ids; can be captured in a CUDA graph
)
STREAM = "stream"  # every expert that has tokens is copied to the GPU
STREAM_ALL = "stream_all"  # every expert is copied regardless of routing; captured passes need no ids on the host
SPLIT = "split"  # some experts streamed, the rest computed by the CPU at the same time; in passes without gradients
MODES = (CPU, RESIDENT, HOST_CALLBACK, STREAM, STREAM_ALL, SPLIT)

DECODE, PREFILL, TRAINING = "decode", "prefill", "training"
NEARLY_ALL = 0.9  # share of a layer's experts that the last batch used: from here on `stream` copies all of them
MAX_DECODE_TOKENS = 32  # of a batch without gradients that a host callback takes

COST_MODEL_ERROR = 0.2  # 7 to 20 % over the recorded cells of bench/
TIMED_MARGIN = 0.03
TRAINING_MARGIN = 1.0  # streamed layers take about half of their prediction within a step: bench/train_e2e.py
TRAINING_CALL_SECONDS = 6e-3  # of a CPU share under autograd and PEFT, either direction: 5 to 6.7 ms at every size


@dataclass(frozen=True)
class Decision:
    mode: str
    predicted: Mapping[str, float]  # seconds of a layer by candidate mode, the preferred first; empty: a fixed policy
    timed: Mapping[str, float]  # the same measured when the placement was attached; empty: the prediction decided

    @property
    def reason(self) -> str:
        seconds = self.timed or self.predicted
        if not seconds:
            return f"{self.mode} (by the policy)"
        others = ", ".join(f"{mode} {1e3 * seconds[mode]:.2f}" for mode in seconds if mode != self.mode)
        how = "timed" if self.timed else "predicted"
        return f"{self.mode} ({how} {1e3 * seconds[self.mode]:.2f} ms a layer{'; ' + others if others else ''})"


def pass_kind(tokens: int, training: bool) -> str:
    if training:
        return TRAINING
    return DECODE if tokens <= MAX_DECODE_TOKENS else PREFILL


def size_bucket(tokens: int) -> int:
    """Batches of similar size share a decision: half octaves."""
    return round(2 * log2(max(1, tokens)))


def bucket_tokens(bucket: int) -> int:
    return round(2 ** (bucket / 2))


def even_counts(rows: int, experts: int) -> NDArray[np.int64]:
    """Rows of each expert under even routing."""
    return np.diff(np.arange(experts + 1) * rows // experts)


def candidate_modes(kind: str, residents: bool, host_callback: bool) -> tuple[str, ...]:
    """In order of preference."""
    if kind == TRAINING:
        return STREAM, RESIDENT if residents else CPU
    if kind == PREFILL:
        return SPLIT, STREAM, RESIDENT if residents else CPU
    modes = (RESIDENT, CPU, STREAM) if residents else (CPU, STREAM)
    return (HOST_CALLBACK, *modes) if host_callback else modes


def predict(
    kind: str,
    costs: Mapping[str, Costs],
    tokens: int,
    counts: NDArray[np.int64],
    residents: int,
    *,
    host_callback: bool = False,
    lead: float = 0.0,
) -> dict[str, float]:
    """Seconds of a layer by candidate mode, the preferred first; training sums both directions. `counts` [E]: rows of
    each expert; `lead`: seconds that the link has before the layer begins."""
    resident = frozenset(range(residents))
    call = TRAINING_CALL_SECONDS if kind == TRAINING else 0.0
    directions = ("forward", "backward") if kind == TRAINING else ("forward",)
    seconds: dict[str, float] = {}
    for mode in candidate_modes(kind, residents > 0, host_callback):
        parts = [
            split(
                counts,
                tokens,
                costs[direction],
                resident=resident,
                backlog=-lead,
                mode=RESIDENT if mode == HOST_CALLBACK else mode,
            )
            for direction in directions
        ]
        if mode == SPLIT and not (parts[0].streamed and parts[0].cpu):
            continue  # no division is predicted to gain
        seconds[mode] = sum(part.seconds + call * bool(part.cpu) for part in parts)
    return seconds


def inseparable(kind: str, predicted: Mapping[str, float]) -> tuple[str, ...]:
    """Modes of a pass without gradients that the cost model cannot tell from the fastest. Layers of a few tokens take
    about a millisecond, most of it launching and waking threads, which is in no formula: all of their modes."""
    if kind == DECODE:
        return tuple(predicted)
    fastest = min(predicted.values())
    return tuple(mode for mode, seconds in predicted.items() if seconds <= (1 + COST_MODEL_ERROR) * fastest)


def decide(kind: str, predicted: Mapping[str, float], timed: Mapping[str, float] | None = None) -> Decision:
    if timed:
        return Decision(_first_within(timed, predicted, TIMED_MARGIN), predicted, timed)
    if kind == DECODE and RESIDENT not in predicted:
        return Decision(CPU, predicted, {})  # without residents a call from Python is the shorter way to the CPU
    margin = TRAINING_MARGIN if kind == TRAINING else COST_MODEL_ERROR
    return Decision(_first_within(predicted, predicted, margin), predicted, {})


def _first_within(seconds: Mapping[str, float], order: Mapping[str, float], margin: float) -> str:
    fastest = min(seconds.values())
    return next(mode for mode in order if mode in seconds and seconds[mode] <= (1 + margin) * fastest)
