"""In which mode a layer of routed experts runs, chosen from predicted seconds. Pure functions without torch: the
planner decides with the rates of a machine profile, the dispatcher (`place/dispatch.py`) with costs measured on the
machine, by the same rule.

Each pass is of one kind, and each kind has its candidate modes in order of preference. Decode steps take the first of
them, the host callback, which a CUDA graph can hold: layers of a few tokens take about a millisecond, most of it
launching and waking threads, which is in no prediction. In prefill and training the chosen mode is the first in that
order whose predicted seconds are within the margin of the fastest; the margin of prefill is the cost model's own error,
so that a prediction overrules the preference only when it can tell two modes apart, and by the same margin `split` has
to gain over leaving the experts where they are. In training streaming is preferred by a wide margin: copies overlap
with attention, recomputation and the optimizer, which no prediction of expert layers alone contains. A CPU that was
14 % faster over such layers made whole steps 49 % slower (docs/log.md). This rule makes the choices that timing every
mode on the machine made, in all recorded cells (`tests/plan/test_modes.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

import numpy as np
from numpy.typing import NDArray

from ktransformers.plan.split import Costs, split

CPU = "cpu"  # the CPU computes every expert
RESIDENT = "resident"  # experts on the GPU are computed there, the rest by the CPU
# The same without synchronising the host on expert ids, so that it can be captured in a CUDA graph.
HOST_CALLBACK = "host_callback"
STREAM = "stream"  # every expert that has tokens is copied to the GPU
STREAM_ALL = "stream_all"  # every expert is copied regardless of routing; captured passes need no ids on the host
SPLIT = "split"  # some experts streamed, the rest computed by the CPU at the same time; in passes without gradients
MODES = (CPU, RESIDENT, HOST_CALLBACK, STREAM, STREAM_ALL, SPLIT)

DECODE, PREFILL, TRAINING = "decode", "prefill", "training"
NEARLY_ALL = 0.9  # share of a layer's experts that the last batch used: from here on `stream` copies all of them
# Of a batch without gradients that a host callback takes: outside of CUDA graphs, where larger ones have better modes,
# and captured in one, where there is no choice.
MAX_DECODE_TOKENS, MAX_CAPTURED_TOKENS = 32, 256

COST_MODEL_ERROR = 0.2  # 7 to 20 % over the recorded cells of bench/
TRAINING_MARGIN = 1.0  # streamed layers take about half of their prediction within a step: bench/train_e2e.py
TRAINING_CALL_SECONDS = 6e-3  # of a CPU share under autograd and PEFT, either direction: 5 to 6.7 ms at every size


@dataclass(frozen=True)
class Decision:
    mode: str
    predicted: Mapping[str, float]  # seconds of a layer by candidate mode, the preferred first; empty: a fixed policy

    @property
    def reason(self) -> str:
        seconds = self.predicted
        if not seconds:
            return f"{self.mode} (by the policy)"
        others = ", ".join(f"{mode} {1e3 * seconds[mode]:.2f}" for mode in seconds if mode != self.mode)
        return f"{self.mode} (predicted {1e3 * seconds[self.mode]:.2f} ms a layer{'; ' + others if others else ''})"


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


def decide(kind: str, predicted: Mapping[str, float]) -> Decision:
    if kind == DECODE:
        return Decision(next(iter(predicted)), predicted)
    margin, candidates = COST_MODEL_ERROR, dict(predicted)
    if kind == TRAINING:
        margin = TRAINING_MARGIN
    elif SPLIT in predicted:
        without_copies = predicted[RESIDENT if RESIDENT in predicted else CPU]
        if (1 + COST_MODEL_ERROR) * predicted[SPLIT] > without_copies:
            del candidates[SPLIT]
    fastest = min(candidates.values())
    mode = next(mode for mode, seconds in candidates.items() if seconds <= (1 + margin) * fastest)
    return Decision(mode, predicted)
