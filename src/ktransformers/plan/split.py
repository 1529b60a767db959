"""Who computes which expert of one layer for one batch: a pure function of token counts and seconds.

Experts whose weights are on the GPU stay there. Of the others the hottest are streamed and the rest computed by the
CPU, so many that the later of the two sides ends as early as possible. Streaming costs the same for every expert and
the CPU's time grows with rows, so for any number of streamed experts the hottest are the right ones, and trying every
number is enough. Experts whose copies are under way are streamed in any case: a copy that is queued takes its time of
the link, wanted or not. Both sides draw on the same memory: while the link reads, the CPU has only the
rest of it. The surprising decision: two sides must be a tenth faster than the better of one alone. Handing rows from
one to the other takes Python's time, which no seconds here know, and a model is not right to a tenth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GAIN = 0.1
LEAST = 0.1  # of the memory's rate that is always left to the CPU


@dataclass(frozen=True)
class Costs:
    """Seconds of one layer on one machine, for one direction."""

    cpu_call: float  # a call, with its copies of hidden states down and results up
    cpu_token: float  # the same copies, by token
    cpu_expert: float  # reading one expert
    cpu_row: float  # multiplying one (token, expert) pair
    link_expert: float  # one expert over PCIe
    memory_expert: float  # one expert out of DRAM, when nothing else goes on
    gpu_call: float  # launches, and what the last group takes after its bytes have arrived
    gpu_expert: float  # decoding one expert
    gpu_row: float
    crowding: float = 1.0  # the CPU's time beside streaming over what is expected of it
    sum: float = 1.6  # how reading and multiplying add up on the CPU: 1 after each other, infinity together

    @property
    def slowed(self) -> float:
        """How much longer the CPU reads while the link does."""
        share = self.memory_expert / self.link_expert if self.link_expert else 1.0
        return 1 / max(LEAST, 1 - share)

    def cpu(self, experts: float, rows: float, tokens: float, beside: bool = False) -> float:
        """`beside`: experts are streamed at the same time."""
        if not experts:
            return 0.0
        reading, multiplying = experts * self.cpu_expert * (self.slowed if beside else 1), rows * self.cpu_row
        together: float = (reading**self.sum + multiplying**self.sum) ** (1 / self.sum)
        return self.cpu_call + tokens * self.cpu_token + together * (self.crowding if beside else 1)

    def gpu(self, streamed: float, there: float, rows: float, backlog: float = 0.0) -> float:
        if not streamed and not there:
            return 0.0
        crossing = max(0.0, backlog + streamed * self.link_expert) if streamed else 0.0
        return self.gpu_call + max(crossing, (streamed + there) * self.gpu_expert + rows * self.gpu_row)


@dataclass(frozen=True)
class Split:
    """Expert numbers; those without tokens are in none of them, unless nobody knew who has any."""

    there: tuple[int, ...]  # on the GPU already
    streamed: tuple[int, ...]  # the hottest first
    cpu: tuple[int, ...]
    seconds: float  # what the costs say
    cpu_seconds: float
    cpu_work: float = 0.0  # of these, what the core takes


def seconds(costs: Costs, counts: NDArray[np.int64], tokens: int, split: Split, backlog: float = 0.0) -> float:
    """What a given split takes; a negative `backlog` is how long ago the first copies could begin."""
    rows = float(counts[list(split.there + split.streamed)].sum())
    cpu = costs.cpu(len(split.cpu), float(counts[list(split.cpu)].sum()), tokens, bool(split.streamed))
    return _later(costs, split.there, split.streamed, split.cpu, rows, cpu, backlog)


def _later(
    costs: Costs,
    there: tuple[int, ...],
    streamed: tuple[int, ...],
    cpu: tuple[int, ...],
    rows: float,
    cpu_seconds: float,
    backlog: float,
) -> float:
    """When the last of both sides and of their memory ends; `rows` are the GPU's."""
    gpu = costs.gpu(len(streamed), len(there), rows, backlog)
    return max(gpu, cpu_seconds, (len(streamed) + len(cpu)) * costs.memory_expert + min(0.0, backlog))


def split(
    counts: Sequence[int] | NDArray[np.int64],
    tokens: int,
    costs: Costs,
    *,
    there: frozenset[int] = frozenset(),
    coming: tuple[int, ...] = (),
    backlog: float = 0.0,
    policy: str = "auto",
) -> Split:
    """`counts` [E]: rows of each expert; `there`: on the GPU; `coming`: on the way, in order; `backlog`: seconds until
    the link is free."""
    rows = np.asarray(counts, dtype=np.int64)
    active = np.flatnonzero(rows)
    if policy == "cpu":
        return _made(costs, rows, tokens, (), (), tuple(active.tolist()), backlog)
    here = tuple(expert for expert in active.tolist() if expert in there)
    under_way = frozenset(coming) - there
    queued = [expert for expert in coming if expert in under_way and rows[expert]]
    rest = np.array([e for e in active.tolist() if e not in there and e not in under_way], dtype=np.int64)
    order = queued + rest[np.argsort(-rows[rest], kind="stable")].tolist()
    if policy == "stream":
        return _made(costs, rows, tokens, here, tuple(order), (), backlog)
    if policy == "resident" or not order:
        return _made(costs, rows, tokens, here, (), tuple(sorted(order)), backlog)
    behind = backlog if backlog < 0 else max(0.0, backlog - len(queued) * costs.link_expert)  # queued for others
    number = _best(costs, rows[order], len(here), float(rows[list(here)].sum()), tokens, behind)
    number = max(number, len(queued))
    return _made(costs, rows, tokens, here, tuple(order[:number]), tuple(sorted(order[number:])), behind)


def _best(costs: Costs, hottest: NDArray[np.int64], here: int, here_rows: float, tokens: int, backlog: float) -> int:
    """How many of the hottest to stream."""
    count = len(hottest)
    streamed = np.arange(count + 1)
    moved = np.concatenate(([0], np.cumsum(hottest))).astype(np.float64)
    left, left_rows = count - streamed, moved[-1] - moved
    reading = left * costs.cpu_expert * np.where(streamed > 0, costs.slowed, 1.0)
    together = (reading**costs.sum + (left_rows * costs.cpu_row) ** costs.sum) ** (1 / costs.sum)
    together = together * np.where(streamed > 0, costs.crowding, 1.0)
    cpu = np.where(left > 0, costs.cpu_call + tokens * costs.cpu_token + together, 0.0)
    crossing = np.where(streamed > 0, np.maximum(0.0, backlog + streamed * costs.link_expert), 0.0)
    work = (streamed + here) * costs.gpu_expert + (moved + here_rows) * costs.gpu_row
    gpu = np.where(streamed + here > 0, costs.gpu_call + np.maximum(crossing, work), 0.0)
    taken = np.maximum(np.maximum(cpu, gpu), count * costs.memory_expert + min(0.0, backlog))
    found = int(np.argmin(taken))
    alone = 0 if taken[0] < taken[count] and not here else count  # one side has everything
    return alone if taken[found] > (1 - GAIN) * taken[alone] else found


def _made(
    costs: Costs,
    rows: NDArray[np.int64],
    tokens: int,
    there: tuple[int, ...],
    streamed: tuple[int, ...],
    cpu: tuple[int, ...],
    backlog: float,
) -> Split:
    total = float(rows.sum())  # everybody with rows is somewhere: of few tokens, indexing takes longer than the rest
    mine = 0.0 if not cpu else total if not there and not streamed else float(rows[list(cpu)].sum())
    cpu_seconds = costs.cpu(len(cpu), mine, tokens, bool(streamed))
    work = max(0.0, cpu_seconds - costs.cpu_call - tokens * costs.cpu_token)
    taken = _later(costs, there, streamed, cpu, total - mine, cpu_seconds, backlog)
    return Split(there, streamed, cpu, taken, cpu_seconds, work)
