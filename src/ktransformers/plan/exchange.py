"""Bytes that rows take between hosts which share the experts of a layer, and how the routing of a batch spreads over
those hosts. Pure functions without torch: the planner predicts with them, tests compare what was sent with them.

A token's row travels once to every other host that has at least one of its k experts, with the ids and routing weights
of its slots, and comes back as one partial sum. How many hosts that are follows from drawing k of E experts without
replacement: a host with n experts is missed with probability C(E - n, k) / C(E, k). In backward the same pairs of hosts
exchange the gradient of the output and the gradients of the row and of its routing weights; ids and weights are known
by then. Which experts of a batch have rows is uneven too: a layer waits for the host that has most of them
(`expected_max`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktransformers.plan.memory import MemoryPlan

SLOT_BYTES = 8  # of one expert of a row: int32 id, float32 routing weight
WEIGHT_BYTES = 4  # of the gradient of a routing weight
ADAPTER_BYTES = 4  # of a row's adapter index
HEADER_BYTES = 64  # of a message (serve/nodes/wire.py)


@dataclass(frozen=True)
class RowBytes:
    """Bytes of one row on its way to a host and back."""

    sent: int
    returned: int


def forward_row(hidden: int, top_k: int, element: int, *, adapters: bool = False) -> RowBytes:
    """`element`: bytes of a number of a hidden state; `adapters`: every row names its adapter."""
    row = hidden * element
    return RowBytes(row + top_k * SLOT_BYTES + (ADAPTER_BYTES if adapters else 0), row)


def backward_row(hidden: int, top_k: int, element: int) -> RowBytes:
    row = hidden * element
    return RowBytes(row, row + top_k * WEIGHT_BYTES)


@dataclass(frozen=True)
class TrafficForecast:
    """Expected bytes of one layer and pass between one host and all others."""

    sent: float
    returned: float
    peers: int  # hosts that get rows, at least sometimes

    @property
    def bytes(self) -> float:
        return self.sent + self.returned


def hit_probabilities(counts: Sequence[int], top_k: int) -> tuple[float, ...]:
    """For each host the probability that it has one of a token's experts; `counts`: experts of a layer by host."""
    total = sum(counts)
    drawn = math.comb(total, min(top_k, total))
    return tuple(1 - math.comb(total - own, min(top_k, total)) / drawn if own else 0.0 for own in counts)


def layer_exchange(tokens: float, row: RowBytes, counts: Sequence[int], top_k: int, home: int) -> TrafficForecast:
    """Of `tokens` whose rows are on the host `home`, under uniform routing; one message each way to every host that
    has experts."""
    hits = [hit for host, hit in enumerate(hit_probabilities(counts, top_k)) if host != home and hit]
    rows, headers = tokens * sum(hits), len(hits) * HEADER_BYTES
    return TrafficForecast(rows * row.sent + headers, rows * row.returned + headers, len(hits))


def expected_max(counts: Sequence[int], drawn: int, among: Sequence[int]) -> float:
    """Expected experts with rows on the busiest of the hosts `among`, if `drawn` of all experts have rows, each set of
    so many as probable as any other."""
    total = sum(counts)
    drawn = min(drawn, total)
    if drawn in (0, total) or not among:
        return float(max((counts[host] for host in among), default=0)) if drawn else 0.0
    share = drawn / total
    every = _product([_binomial(own, share, own) for own in counts])[drawn]
    limit = max(counts[host] for host in among)
    expected = 0.0
    for most in range(min(limit, drawn)):  # E[max] = sum over m of P(max > m)
        parts = [_binomial(own, share, most if host in among else own) for host, own in enumerate(counts)]
        product = _product(parts)
        expected += 1 - (product[drawn] / every if drawn < len(product) else 0.0)
    return float(expected)


def _binomial(trials: int, share: float, most: int) -> NDArray[np.float64]:
    """Probabilities of 0 .. min(trials, most) hits."""
    logs: list[float] = [
        math.lgamma(trials + 1)
        - math.lgamma(hits + 1)
        - math.lgamma(trials - hits + 1)
        + hits * math.log(share)
        + (trials - hits) * math.log1p(-share)
        for hits in range(min(trials, most) + 1)
    ]
    probabilities: NDArray[np.float64] = np.exp(np.array(logs))
    return probabilities


def _product(parts: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    product = np.ones(1)
    for part in parts:
        product = np.convolve(product, part)
    return product


@dataclass(frozen=True)
class Network:
    """The link of every host."""

    name: str
    bandwidth: float  # bytes per second of payload, each direction
    round_trip: float

    def seconds(self, size: float) -> float:
        return size / self.bandwidth


@dataclass(frozen=True)
class Wire:
    """Bytes of rows that the busiest link carries, both directions together."""

    per_token: float  # of one token through all layers of experts, from its own host to the others and back
    per_step: float  # of a training step, or of one decode step
    per_prompt: float  # of a served prompt; 0 in training
    reduced: float  # of gradients that data parallel adds to a training step
    hosts_of_token: float  # other hosts that a token's row travels to in an average layer


@dataclass(frozen=True)
class Hosts:
    """A partition of the routed experts over several machines, with its predicted memory and bytes."""

    network: Network
    form: str  # by expert ids or by layers
    shares: tuple[int, ...]  # experts of each layer by host; by layers: layers by host
    memory: tuple[MemoryPlan, ...]
    wire: Wire
