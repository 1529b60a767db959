"""How the experts of one layer are divided between GPU and CPU for one batch: a pure function of token counts and
costs.

Experts that are on the GPU are computed there. Of the others the busiest are streamed over PCIe and the rest is
computed by the CPU, so many that the later of the two ends as early as possible. Streaming costs the same for every
expert and the CPU's time grows with rows, so for any number of streamed experts the busiest are the right ones, and
evaluating every number is enough. Experts whose copies are already queued are streamed in any case: the link is busy
with them whether they are used or not. CPU and link share the memory bandwidth, so the CPU reads more slowly during
copies. A division must be predicted to be a tenth faster than the better of GPU and CPU alone, because handing rows
between them takes Python time that is not in the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_GAIN = 0.1
MIN_MEMORY_SHARE = 0.1  # of the memory bandwidth that the CPU keeps during copies


@dataclass(frozen=True)
class Costs:
    """Seconds of one layer on one machine, for one direction."""

    cpu_call: float  # one call, with its copies of hidden states down and results up
    cpu_token: float  # the same copies, per token
    cpu_expert: float  # reading one expert
    cpu_row: float  # multiplying one (token, expert) pair
    link_expert: float  # one expert over PCIe
    memory_expert: float  # one expert out of DRAM while nothing else reads
    gpu_call: float  # kernel launches, and what the last group takes after its bytes have arrived
    gpu_expert: float  # dequantising one expert
    gpu_row: float
    crowding: float = 1.0  # measured CPU time during copies over the time predicted for it
    sum: float = 1.6  # norm by which reading and multiplying add up on the CPU: 1 sequential, infinity overlapped

    @property
    def slowed(self) -> float:
        """Factor by which the CPU reads more slowly while the link reads too."""
        share = self.memory_expert / self.link_expert if self.link_expert else 1.0
        return 1 / max(MIN_MEMORY_SHARE, 1 - share)

    def cpu_work(self, experts: float, rows: float, beside_copies: bool = False) -> float:
        """Seconds of the kernels alone."""
        reading = experts * self.cpu_expert * (self.slowed if beside_copies else 1)
        total: float = (reading**self.sum + (rows * self.cpu_row) ** self.sum) ** (1 / self.sum)
        return total * (self.crowding if beside_copies else 1)

    def cpu(self, experts: float, rows: float, tokens: float, beside_copies: bool = False) -> float:
        if not experts:
            return 0.0
        return self.cpu_call + tokens * self.cpu_token + self.cpu_work(experts, rows, beside_copies)

    def gpu(self, streamed: float, resident: float, rows: float, backlog: float = 0.0) -> float:
        if not streamed and not resident:
            return 0.0
        crossing = max(0.0, backlog + streamed * self.link_expert) if streamed else 0.0
        return self.gpu_call + max(crossing, (streamed + resident) * self.gpu_expert + rows * self.gpu_row)


@dataclass(frozen=True)
class Split:
    """Expert numbers. Experts without tokens are in none of them, unless all experts are streamed regardless."""

    resident: tuple[int, ...]  # on the GPU already
    streamed: tuple[int, ...]  # the busiest first
    cpu: tuple[int, ...]
    seconds: float  # predicted

    @property
    def gpu(self) -> tuple[int, ...]:
        return self.resident + self.streamed


def split(
    counts: Sequence[int] | NDArray[np.int64],
    tokens: int,
    costs: Costs,
    *,
    resident: frozenset[int] = frozenset(),
    queued: tuple[int, ...] = (),
    backlog: float = 0.0,
    mode: str = "split",
) -> Split:
    """`counts` [E]: rows of each expert; `resident`: experts on the GPU; `queued`: experts whose copies are under way,
    in order; `backlog`: seconds until the link is free, negative for how long ago the first copies could begin. `mode`:
    cpu, resident, stream, or split."""
    rows = np.asarray(counts, dtype=np.int64)
    active = np.flatnonzero(rows)
    if mode == "cpu":
        return _with_seconds(costs, rows, tokens, (), (), tuple(active.tolist()), backlog)
    on_gpu = tuple(expert for expert in active.tolist() if expert in resident)
    under_way = frozenset(queued) - resident
    first = [expert for expert in queued if expert in under_way and rows[expert]]
    rest = np.array([e for e in active.tolist() if e not in resident and e not in under_way], dtype=np.int64)
    order = first + rest[np.argsort(-rows[rest], kind="stable")].tolist()
    if mode == "stream":
        return _with_seconds(costs, rows, tokens, on_gpu, tuple(order), (), backlog)
    if mode == "resident" or not order:
        return _with_seconds(costs, rows, tokens, on_gpu, (), tuple(sorted(order)), backlog)
    others = backlog if backlog < 0 else max(0.0, backlog - len(first) * costs.link_expert)  # copies for other layers
    number = _streamed_count(costs, rows[order], len(on_gpu), float(rows[list(on_gpu)].sum()), tokens, others)
    number = max(number, len(first))
    return _with_seconds(costs, rows, tokens, on_gpu, tuple(order[:number]), tuple(sorted(order[number:])), others)


def _streamed_count(
    costs: Costs, busiest: NDArray[np.int64], residents: int, resident_rows: float, tokens: int, backlog: float
) -> int:
    """How many of the busiest experts to stream."""
    count = len(busiest)
    streamed = np.arange(count + 1)
    moved = np.concatenate(([0], np.cumsum(busiest))).astype(np.float64)
    left, left_rows = count - streamed, moved[-1] - moved
    reading = left * costs.cpu_expert * np.where(streamed > 0, costs.slowed, 1.0)
    work = (reading**costs.sum + (left_rows * costs.cpu_row) ** costs.sum) ** (1 / costs.sum)
    work = work * np.where(streamed > 0, costs.crowding, 1.0)
    cpu = np.where(left > 0, costs.cpu_call + tokens * costs.cpu_token + work, 0.0)
    crossing = np.where(streamed > 0, np.maximum(0.0, backlog + streamed * costs.link_expert), 0.0)
    products = (streamed + residents) * costs.gpu_expert + (moved + resident_rows) * costs.gpu_row
    gpu = np.where(streamed + residents > 0, costs.gpu_call + np.maximum(crossing, products), 0.0)
    seconds = np.maximum(np.maximum(cpu, gpu), count * costs.memory_expert + min(0.0, backlog))
    fastest = int(np.argmin(seconds))
    pure = 0 if seconds[0] < seconds[count] and not residents else count  # all on one of the two
    return pure if seconds[fastest] > (1 - MIN_GAIN) * seconds[pure] else fastest


def _with_seconds(
    costs: Costs,
    rows: NDArray[np.int64],
    tokens: int,
    resident: tuple[int, ...],
    streamed: tuple[int, ...],
    cpu: tuple[int, ...],
    backlog: float,
) -> Split:
    """The division with the time at which its last part ends."""
    total = float(rows.sum())
    cpu_rows = 0.0 if not cpu else total if not resident and not streamed else float(rows[list(cpu)].sum())
    seconds = max(
        costs.gpu(len(streamed), len(resident), total - cpu_rows, backlog),
        costs.cpu(len(cpu), cpu_rows, tokens, bool(streamed)),
        (len(streamed) + len(cpu)) * costs.memory_expert + min(0.0, backlog),
    )
    return Split(resident, streamed, cpu, seconds)
