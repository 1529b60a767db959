"""Forward of one layer of routed experts against the roof of this machine, and against peers in the same run.

    python bench/moe.py --shapes qwen3-30b --tokens 1,512,2048 --peers kt=/path/to/python torch

The roof of a cell is max(operations / tile rate, expert bytes touched / read bandwidth). Both rates are measured before
and after every round of ours and averaged over the cell, because the speed of a machine drifts by more within minutes
than two kernels differ by; for the same reason ours and the peers alternate in short rounds. `timing.py` times rounds,
`shapes.py` makes the work, `layer_bench.py` runs the peers. docs/bench.md explains the columns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import layer_bench
from arguments import numbers
from layer_bench import NAMES, RATES, ROUNDS, TIMES, Column, LayerBench, Program, Setup
from peers.protocol import Peer, Runner
from shapes import DEFAULT_SHAPES, DEFAULT_TOKENS, Shape, Weights, Work
from timing import SETTLE, Stopwatch, Yardstick, spread

if TYPE_CHECKING:
    import torch

    from ktransformers import _core
    from ktransformers.checkpoint.encoded import Encoded

OPERATOR_BYTES = 1 << 30  # of matrices that the torch operator between our calls rotates over
PROGRAMS = {"kt": Program("peers.kt"), "torch": Program("peers.torch_loop", kt=False)}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = layer_bench.options(__doc__, PROGRAMS, DEFAULT_SHAPES)
    parser.add_argument("--tokens", type=numbers, help=f"default {','.join(map(str, DEFAULT_TOKENS))}")
    parser.add_argument("--alternate", action="store_true", help="also time both in alternation with a torch operator")
    parser.add_argument("--seconds-per-cell", type=float, help="of timed calls for each implementation, default 0.6")
    parser.add_argument("--quick", action="store_true", help="tokens 1,16,512,2048 and half the time")
    args = layer_bench.parse(parser, PROGRAMS, argv)
    if args.tokens is None:
        args.tokens = [1, 16, 512, 2048] if args.quick else list(DEFAULT_TOKENS)
    layer_bench.check_tokens(parser, "--tokens", args.tokens)
    if args.seconds_per_cell is None:
        args.seconds_per_cell = 0.3 if args.quick else 0.6
    return args


class Ours:
    """The packed stores under test, one for each layer; `source` where they are not packed from bf16."""

    def __init__(
        self,
        pool: _core.Pool,
        isa: str,
        format: str = "bf16",
        source: dict[str, Encoded] | None = None,
        w8a8: bool = False,
    ) -> None:
        self._pool, self._isa, self._format, self._source, self._w8a8 = pool, isa, format, source, w8a8

    def facts(self) -> dict[str, Any]:
        return {"threads": self._pool.threads}

    @property
    def packed_bytes(self) -> int:
        """Of a layer's experts."""
        return self._stores[0].packed_bytes

    def load(self, shape: Shape, weights: Weights, layers: int, max_tokens: int) -> list[float]:
        from ktransformers.nn import ExpertStore

        source: dict[str, Any] = self._source or {"gate": weights.gate, "up": weights.up, "down": weights.down}
        sizes = shape.experts, shape.hidden, shape.intermediate
        self._stores, seconds = [], []
        for _ in range(layers):
            store = ExpertStore(*sizes, pool=self._pool, isa=self._isa, formats=self._format)
            start = time.perf_counter()
            store.pack(gate=source["gate"], up=source["up"], down=source["down"])
            store.w8a8 = self._w8a8
            seconds.append(time.perf_counter() - start)
            self._stores.append(store)
        start = time.perf_counter()  # once more into memory that is already there: the kernel without page faults
        store.pack(gate=source["gate"], up=source["up"], down=source["down"])
        return [*seconds, time.perf_counter() - start]

    def bind(self, work: Work) -> Callable[[int], torch.Tensor]:
        import torch

        out = torch.empty_like(work.hidden)

        def call(step: int) -> torch.Tensor:
            layer, ids = work.step(step)
            self._stores[layer].forward(work.hidden, ids, work.weights, out=out)
            return out

        return call


class Attention:
    """What attention does between two expert layers, as far as threads and caches go: two products [T, H] x [H, H].

    The matrices rotate over a gigabyte, so that the operator alone finds no more of them in the caches than it does
    after our layer has run.
    """

    def __init__(self, shape: Shape, tokens: int) -> None:
        import torch

        count = max(2, OPERATOR_BYTES // (2 * shape.hidden**2))
        self._matrices = torch.full((count, shape.hidden, shape.hidden), 0.01, dtype=torch.bfloat16)
        self._hidden = torch.full((tokens, shape.hidden), 0.01, dtype=torch.bfloat16)

    def __call__(self, step: int) -> None:
        count = len(self._matrices)
        inner = self._hidden @ self._matrices[2 * step % count]
        inner @ self._matrices[(2 * step + 1) % count]


@dataclass(frozen=True)
class Alternation:
    """Milliseconds of ours and of the torch operator, each alone and in alternation."""

    ours_alone: float
    ours: float
    operator_alone: float
    operator: float


def alternate(ours: Stopwatch, operator: Stopwatch, seconds: float) -> Alternation:
    alone: list[float] = []
    operator_alone: list[float] = []
    both: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        alone += ours.round(seconds / ROUNDS).ms
        time.sleep(SETTLE)
        operator_alone += operator.round(seconds / ROUNDS).ms
        time.sleep(SETTLE)
        least = len(both) + 2
        end = time.perf_counter() + 2 * seconds / ROUNDS
        operator.once()
        ours.once()
        while time.perf_counter() < end or len(both) < least:
            both.append((1e3 * operator.once(), 1e3 * ours.once()))
        time.sleep(SETTLE)
    median = statistics.median
    return Alternation(
        median(alone), median(ms for _, ms in both), median(operator_alone), median(ms for ms, _ in both)
    )


def measure_forward(bench: LayerBench, setup: Setup, tokens: int) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A cell, and the first answers of ours (`""`) and of the peers."""
    mine, theirs = bench.rounds(setup, tokens)
    ms = [value for answer in mine for value in answer["ms"]]
    cell = forward_cell(setup, tokens, "forward", statistics.median(ms), mine[0]["unique_experts"])
    cell.update(reps=len(ms), spread=spread(ms), foreign=max(answer["foreign"] for answer in mine))
    for name in setup.peers:
        cell["peers"][name] = statistics.median(value for answers in theirs for value in answers[name]["ms"])
    return cell, {"": mine[0], **{name: theirs[0][name] for name in setup.peers}}


def forward_cell(setup: Setup, tokens: int, mode: str, ms: float, unique: float) -> dict[str, Any]:
    shape, reading = setup.shape, setup.mean_rates()
    operations = shape.operations(tokens)
    return {
        **setup.cell(reading, tokens, mode, ms, operations, unique),
        "us_per_token": 1e3 * ms / tokens,
        "activation_bytes": shape.activation_bytes(tokens),
        "register_share": operations / reading.registers * 1e3 / ms,
        "register_tflops": reading.registers / 1e12,
    }


class Bench(LayerBench):
    NAME = "moe"
    PROGRAMS = PROGRAMS
    COLUMNS: ClassVar = [
        *NAMES,
        Column("mode", 9, "mode"),
        *TIMES,
        Column("us/token", 8, "us_per_token", 1),
        Column("regs", 5, "register_share", 2),
        Column("act MB", 7, "activation_bytes", 2, 1e-6),
        *RATES,
    ]

    def measure_shape(self, shape: Shape, isa: str, peers: dict[str, Peer]) -> None:
        setup = Setup(shape, isa, Runner(Ours(self.pool, isa)), peers, Yardstick(self.roof_pool, isa))
        layers = self.args.layers or shape.layers(self.cache)
        request = {"do": "load", "shape": shape.name, "layers": layers, "max_tokens": max(self.args.tokens)}
        rates = self.measure_pack(setup, request)
        for tokens in self.args.tokens:
            if self.too_long(setup, tokens, rates.roof_seconds(shape.operations(tokens), 0)):
                continue
            cell, answers = measure_forward(self, setup, tokens)
            for name in setup.peers:
                self.compare(f"{shape.name}, {tokens} tokens, {name}", answers[""], answers[name])
            self.add(cell)
            if self.args.alternate:
                self.measure_alternation(setup, tokens, cell["unique_experts"])

    def compare(self, where: str, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
        """Both must have done the same work; whether the numbers are right is for the tests."""
        if self.same_routes(where, mine, theirs) and abs(theirs["norm"] - mine["norm"]) > 0.02 * mine["norm"]:
            self.note(f"{where}: output of norm {theirs['norm']:.4g}, ours {mine['norm']:.4g}")

    def measure_alternation(self, setup: Setup, tokens: int, unique: float) -> None:
        operator = Stopwatch(Attention(setup.shape, tokens))
        setup.sample_rates()
        taken = alternate(setup.ours.prepare(tokens), operator, self.args.seconds_per_cell)
        setup.sample_rates()
        cell = forward_cell(setup, tokens, "alternate", taken.ours, unique)
        cell.update(alone_ms=taken.ours_alone, torch_ms=taken.operator, torch_alone_ms=taken.operator_alone)
        self.add(cell)
        print(
            f"    alternating with torch: ours {taken.ours:.3f} ms, alone {taken.ours_alone:.3f}"
            f" ({taken.ours / taken.ours_alone:.2f}x); torch {taken.operator:.3f} ms, alone {taken.operator_alone:.3f}"
            f" ({taken.operator / taken.operator_alone:.2f}x)",
            flush=True,
        )


def main(argv: list[str] | None = None) -> int:
    return Bench(parse(argv)).main()


if __name__ == "__main__":
    sys.exit(main())
