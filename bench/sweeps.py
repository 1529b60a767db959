"""Timed sweeps of the training bench and its peers, the LoRA of a layer, and the operations of every mode.

A sweep is what a step of training does to a stack of layers: forward through all of them, then backward from the last
to the first, each call timed by itself. Backward thus never has its layer's weights in the caches, and an
implementation that shares a buffer between layers has to fill it again. LoRA is rank 8 on gate, up and down, each with
an A of its own (`a` [E, r, in], `b` [E, out, r], bf16, scale 2): kt-kernel has no shared A.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.protocol import Runner
from shapes import Shape, Work, make_work
from timing import NOISY, SETTLE, Watch

if TYPE_CHECKING:
    import torch

RANK = 8
ALPHA = 16.0
FACTORS = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")
MODES = ("forward", "forward_lora", "backward", "backward_lora", "backward_lora_recompute")
LONG = 0.5  # seconds; sweeps that take longer are not warmed up again and repeated less
FIRST_TOKENS = 32  # of the sweep after which memory is looked at


def make_lora(shape: Shape, seed: int = 2) -> dict[str, torch.Tensor]:
    """The factors of one layer by name; B is no zero, so that nothing can be left out."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    hidden, wide = shape.hidden, shape.intermediate
    sizes = [(RANK, hidden), (wide, RANK), (RANK, hidden), (wide, RANK), (RANK, wide), (hidden, RANK)]
    factors = {}
    for name, size in zip(FACTORS, sizes, strict=True):
        deviation = (1.0 if name.endswith("a") else 0.2) * size[1] ** -0.5
        normal = torch.randn(shape.experts, *size, generator=generator)
        factors[name] = (normal * deviation).to(torch.bfloat16)
    return factors


def lora_parameters(shape: Shape) -> int:
    """Of one expert."""
    return 3 * RANK * (shape.hidden + shape.intermediate)


def operations(shape: Shape, tokens: int, mode: str) -> float:
    """Multiplications and additions that `mode` cannot do without.

    Backward multiplies with each weight once. LoRA's terms are one product with each factor in forward; in backward one
    that carries the gradient on and one that is the factor's own. What recomputing adds is gate and up.
    """
    rows = tokens * shape.top_k
    total = shape.operations(tokens)
    lora = 2.0 * rows * lora_parameters(shape)
    if mode == "forward_lora":
        total += lora
    if mode.startswith("backward_lora"):
        total += 2 * lora
    if mode == "backward_lora_recompute":
        total += 2 / 3 * (shape.operations(tokens) + lora)
    return total


@dataclass(frozen=True)
class Swept:
    """Seconds of every call by mode, and what the layer of the sweep's first step gave: `out`, the gradients `hidden`
    and `weights`, and those of LoRA's factors by name."""

    seconds: dict[str, list[float]]
    results: dict[str, torch.Tensor]


def sweep_steps(work: Work, layers: int, index: int) -> list[tuple[int, torch.Tensor]]:
    """(layer, ids) of one sweep, every layer once."""
    count = len(work.steps) // layers
    start = index % count * layers
    return work.steps[start : start + layers]


def grad_out(work: Work) -> torch.Tensor:
    """The output's gradient [T, H]: as random as the hidden states, and other numbers."""
    return work.hidden.flip(1).contiguous()


def timed(seconds: dict[str, list[float]], mode: str, call: Callable[..., object], *args: object) -> None:
    start = time.perf_counter()
    call(*args)
    seconds.setdefault(mode, []).append(time.perf_counter() - start)


def resident_bytes() -> int:
    """Anonymous memory of this process, without what the allocator merely holds back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Sweeper(Runner):
    """Answers the requests of `protocol.py` with sweeps of an implementation whose `bind` gives a function from the
    index of a sweep to what it `Swept`. A round's `ms` is a list for each mode; a load's `resident` the bytes
    that the process grew by for its layers, their LoRA and the gradients of one small sweep."""

    def _load(self, shape: Shape, layers: int, max_tokens: int) -> dict[str, Any]:
        self._shape, self._layers, self._tokens = shape, layers, 0
        weights = self._make(shape)
        self._before = resident_bytes()
        seconds = self._implementation.load(shape, weights, layers, max_tokens)
        self._implementation.bind(make_work(shape, FIRST_TOKENS, layers))(0)
        # The source is held until here: some allocators would give it to the layers, others back to the system.
        resident = resident_bytes() - self._before
        return {"ms": [1e3 * taken for taken in seconds], "resident": resident}

    def resident(self) -> int:
        """The bytes that the process has grown by once the batch at hand is dropped: layers, LoRA, and what is kept to
        compute with."""
        self._tokens = 0
        self._sweep: Callable[[int], Swept] = _nothing
        return resident_bytes() - self._before

    def _results(self, work: Work) -> dict[str, torch.Tensor]:
        swept: Swept = self._implementation.bind(work)(0)
        return swept.results

    def prepare(self, tokens: int) -> None:  # type: ignore[override] # no Stopwatch: a sweep has several times
        if self._tokens == tokens:
            return
        work = make_work(self._shape, tokens, self._layers)
        self._sweep = self._implementation.bind(work)
        first = self._sweep(0)
        norms = {name: float(tensor.float().norm()) for name, tensor in first.results.items()}
        self._check: dict[str, Any] = {"unique_experts": work.unique_experts, "routes": work.routes, "norms": norms}
        self._next, self._tokens = 1, tokens
        self._last = _total(first)

    def _once(self) -> Swept:
        swept = self._sweep(self._next)
        self._next += 1
        self._last = _total(swept)
        return swept

    def _sweeps(self, seconds: float) -> tuple[list[Swept], float]:
        """At least two (one where they are long), and the share of the CPUs that others took meanwhile."""
        if self._last < LONG:
            self._once()
        taken: list[Swept] = []
        watch, spent = Watch(), 0.0
        while spent < seconds or len(taken) < (2 if self._last < LONG else 1):
            taken.append(self._once())
            spent += self._last
        return taken, watch.foreign()

    def _round(self, tokens: int, seconds: float) -> dict[str, Any]:
        self.prepare(tokens)
        taken, foreign = self._sweeps(seconds)
        if foreign > NOISY and self._last < LONG:
            time.sleep(SETTLE)
            taken, foreign = min((taken, foreign), self._sweeps(seconds), key=lambda sweeps: sweeps[1])
        ms: dict[str, list[float]] = {}
        for swept in taken:
            for mode, values in swept.seconds.items():
                ms.setdefault(mode, []).extend(1e3 * value for value in values)
        return {"ms": ms, "foreign": foreign, **self._check}


def _nothing(index: int) -> Swept:
    raise RuntimeError("no batch is at hand")


def _total(swept: Swept) -> float:
    return sum(sum(values) for values in swept.seconds.values())
