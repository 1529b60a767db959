"""Forward and backward of one layer of routed experts with LoRA against the roof of this machine, and against peers.

    python bench/train_step.py --shapes qwen3-30b --peers kt=/path/to/python kt_private=/path/to/python

Five modes for each count of tokens, measured in the same sweeps (`sweeps.py`): forward and backward without LoRA, both
with rank 8, and a backward that computes gate and up again because nothing was kept. All forwards keep gate and up for
their backward, as in training. The roof counts the product of the input's gradient once, plus LoRA's terms, plus what
is recomputed. Rounds, rates and peers are those of `moe.py`; docs/bench.md explains the columns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import layer_bench
import moe
from arguments import numbers
from layer_bench import NAMES, RATES, TIMES, Column, LayerBench, Program, Setup
from peers.protocol import Peer
from shapes import DEFAULT_SHAPES, Shape, Weights, Work
from sweeps import (
    ALPHA,
    MODES,
    RANK,
    Sweeper,
    Swept,
    grad_out,
    lora_parameters,
    make_lora,
    operations,
    sweep_steps,
    timed,
)
from timing import Yardstick, spread

if TYPE_CHECKING:
    import torch

    from ktransformers import _core
    from ktransformers.checkpoint.encoded import Encoded

DEFAULT_TOKENS = (512, 2048, 8192)
PROGRAMS = {"kt": Program("peers.kt_sft"), "kt_private": Program("peers.kt_sft", ("--private",))}
PLAIN = {"forward_lora": "forward", "backward_lora": "backward"}  # what LoRA's cost is relative to
REPACKS = 9


def parse(argv: list[str] | None) -> argparse.Namespace:
    tokens = list(DEFAULT_TOKENS)
    parser = layer_bench.options(__doc__, PROGRAMS, DEFAULT_SHAPES)
    parser.add_argument("--tokens", type=numbers, default=tokens, help=f"default {','.join(map(str, tokens))}")
    parser.add_argument("--seconds-per-cell", type=float, default=3.0, help="of timed calls for each implementation")
    args = layer_bench.parse(parser, PROGRAMS, argv)
    layer_bench.check_tokens(parser, "--tokens", args.tokens)
    return args


class Ours(moe.Ours):
    """The packed stores under test, each with LoRA of its own; a sweep goes through `modes`."""

    def __init__(
        self,
        pool: _core.Pool,
        isa: str,
        format: str = "bf16",
        source: dict[str, Encoded] | None = None,
        modes: Sequence[str] = MODES,
    ) -> None:
        super().__init__(pool, isa, format, source)
        self._modes = modes
        import ktransformers.experts.lora  # noqa: F401 (modules are no part of what a layer takes)

    def load(self, shape: Shape, weights: Weights, layers: int, max_tokens: int) -> list[float]:
        from ktransformers.experts.lora import ExpertLora, LoraPair, empty_gradients, packed_adapter

        seconds = super().load(shape, weights, layers, max_tokens)
        made = make_lora(shape)
        self._factors, self._adapters, self._grads, self._targets = [], [], [], []
        for store in self._stores:
            own = {name: tensor.clone() for name, tensor in made.items()}
            gate, up, down = (
                LoraPair(own[f"{matrix}_a"], own[f"{matrix}_b"], ALPHA / RANK) for matrix in ("gate", "up", "down")
            )
            factors = ExpertLora(gate=gate, up=up, down=down)
            grads, targets = empty_gradients(factors)
            self._factors.append(factors)
            self._adapters.append([packed_adapter(store, factors)])
            self._grads.append(dict(zip(factors.roles, grads, strict=True)))
            self._targets.append([targets])
        return seconds

    @property
    def packed_lora_bytes(self) -> int:
        """Of a layer's factors."""
        return self._adapters[0][0].packed_bytes

    def repack(self, step: int) -> float:
        """Seconds to take in the factors of a layer that an optimizer has changed."""
        from torch.autograd.graph import increment_version

        from ktransformers.experts.lora import packed_adapter

        store, factors = self._stores[step % len(self._stores)], self._factors[step % len(self._stores)]
        increment_version(factors.tensors)
        start = time.perf_counter()
        packed_adapter(store, factors)
        return time.perf_counter() - start

    def bind(self, work: Work) -> Callable[[int], Swept]:  # type: ignore[override] # sweeps, not calls
        import torch

        layers = len(self._stores)
        above = grad_out(work)
        outs = [torch.empty_like(work.hidden) for _ in range(layers)]
        keeps = [store.new_keep(*work.weights.shape) for store in self._stores]
        grads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def forward(layer: int, ids: torch.Tensor, lora: bool) -> None:
            self._stores[layer].forward(
                work.hidden,
                ids,
                work.weights,
                out=outs[layer],
                keep=keeps[layer],
                adapters=self._adapters[layer] if lora else (),
            )

        def backward(layer: int, ids: torch.Tensor, lora: bool, kept: bool) -> None:
            grads[layer] = self._stores[layer].backward(
                above,
                work.hidden,
                ids,
                work.weights,
                keep=keeps[layer] if kept else None,
                adapters=self._adapters[layer] if lora else (),
                factors=self._targets[layer] if lora else None,
            )

        # What is kept serves the backward that follows, so the pass that keeps nothing comes first.
        passes: dict[str, tuple[Callable[..., None], tuple[bool, ...]]] = {
            "forward": (forward, (False,)),
            "backward": (backward, (False, True)),
            "forward_lora": (forward, (True,)),
            "backward_lora_recompute": (backward, (True, False)),
            "backward_lora": (backward, (True, True)),
        }

        def sweep(index: int) -> Swept:
            steps = sweep_steps(work, layers, index)
            seconds: dict[str, list[float]] = {}
            for mode, (call, how) in passes.items():
                if mode in self._modes:
                    for step in steps if call is forward else reversed(steps):
                        timed(seconds, mode, call, *step, *how)
            first = steps[0][0]
            results = {"out": outs[first], "hidden": grads[first][0], "weights": grads[first][1]}
            return Swept(seconds, {**results, **self._grads[first]})

        return sweep


def measure_modes(
    bench: LayerBench, setup: Setup, tokens: int, modes: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """A cell for each mode, and the first answers of ours (`""`) and of the peers."""
    mine, theirs = bench.rounds(setup, tokens)
    reading, unique = setup.mean_rates(), mine[0]["unique_experts"]
    medians: dict[str, float] = {}
    cells = []
    for mode in modes:
        ms = [value for answer in mine for value in answer["ms"][mode]]
        medians[mode] = statistics.median(ms)
        work = operations(setup.shape, tokens, mode)
        cell = setup.cell(reading, tokens, mode, medians[mode], work, unique)
        cell.update(reps=len(ms), spread=spread(ms), foreign=max(answer["foreign"] for answer in mine))
        if PLAIN.get(mode) in medians:
            cell["lora_cost"] = medians[mode] / medians[PLAIN[mode]] - 1
        if mode.startswith("backward"):
            cell["over_forward"] = medians[mode] / medians["forward" if mode == "backward" else "forward_lora"]
        for name in setup.peers:
            times = [value for answers in theirs for value in answers[name]["ms"].get(mode, [])]
            if times:
                cell["peers"][name] = statistics.median(times)
        cells.append(cell)
    return cells, {"": mine[0], **{name: theirs[0][name] for name in setup.peers}}


class Bench(LayerBench):
    NAME = "train_step"
    PROGRAMS = PROGRAMS
    COLUMNS: ClassVar = [
        *NAMES,
        Column("mode", 23, "mode"),
        *TIMES,
        *RATES,
        Column("LoRA %", 6, "lora_cost", 1, 100),
        Column("x fwd", 5, "over_forward", 2),
    ]

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.document.update(rank=RANK, memory=[])

    def measure_shape(self, shape: Shape, isa: str, peers: dict[str, Peer]) -> None:
        ours = Ours(self.pool, isa)
        setup = Setup(shape, isa, Sweeper(ours), peers, Yardstick(self.roof_pool, isa))
        layers = self.args.layers or shape.layers(self.cache)
        request = {"do": "load", "shape": shape.name, "layers": layers, "max_tokens": max(self.args.tokens)}
        resident = setup.ours.ask(request)["resident"]
        theirs = {name: answer["resident"] for name, answer in self.ask_peers(peers, request).items()}
        self.add_memory(setup, ours, layers, resident, theirs)
        self.measure_repack(setup, ours)
        for tokens in self.args.tokens:
            setup.sample_rates()
            if self.too_long(setup, tokens, setup.samples[-1].roof_seconds(operations(shape, tokens, MODES[-1]), 0)):
                continue
            cells, answers = measure_modes(self, setup, tokens, MODES)
            for cell in cells:
                self.add(cell)
            for name in setup.peers:
                self.compare(f"{shape.name}, {tokens} tokens, {name}", answers[""], answers[name])

    def add_memory(self, setup: Setup, ours: Ours, layers: int, resident: int, theirs: dict[str, int]) -> None:
        parameters = setup.shape.layer_bytes // 2
        entry: dict[str, Any] = {
            "shape": setup.shape.name,
            "isa": setup.isa,
            "layers": layers,
            "packed_bytes_per_parameter": ours.packed_bytes / parameters,
            "packed_lora_bytes_per_parameter": ours.packed_lora_bytes / parameters,
            "resident_bytes_per_parameter": resident / (layers * parameters),
            "peers": {name: taken / (layers * parameters) for name, taken in theirs.items()},
        }
        self.document["memory"].append(entry)
        parts = [f"{entry['packed_bytes_per_parameter']:.2f} packed"]
        parts += [f"{entry['resident_bytes_per_parameter']:.2f} resident with LoRA and its gradients"]
        parts += [f"{name} {value:.2f}" for name, value in entry["peers"].items()]
        print(
            f"    {setup.shape.name}, {setup.isa}, {layers} layers: bytes per parameter {', '.join(parts)}", flush=True
        )

    def measure_repack(self, setup: Setup, ours: Ours) -> None:
        """Reads and writes every factor once; set against the reading alone."""
        ours.repack(0)
        setup.sample_rates()
        ms = [1e3 * ours.repack(step) for step in range(REPACKS)]
        setup.sample_rates()
        source = 2 * setup.shape.experts * lora_parameters(setup.shape)
        cell = setup.read_cell(setup.mean_rates(), "repack", statistics.median(ms), source)
        cell.update(reps=len(ms), spread=spread(ms))
        self.add(cell)

    def compare(self, where: str, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
        """Both must have done the same work, gradients included; whether the numbers are right is for the tests."""
        if not self.same_routes(where, mine, theirs):
            return
        for name, norm in mine["norms"].items():
            other = theirs["norms"][name]
            if not abs(other - norm) <= 0.02 * norm:
                what = "output" if name == "out" else f"gradient of {name}"
                self.note(f"{where}: {what} of norm {other:.4g}, ours {norm:.4g}")


def main(argv: list[str] | None = None) -> int:
    return Bench(parse(argv)).main()


if __name__ == "__main__":
    sys.exit(main())
