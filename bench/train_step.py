"""Forward and backward of one layer of routed experts with LoRA against the roof of this machine, and against peers.

    python bench/train_step.py --shapes qwen3-30b --peers kt=/path/to/python kt_private=/path/to/python

Five modes for each count of tokens, measured in the same sweeps (`sweeps.py`): forward and backward without LoRA, both
with rank 8, and a backward that computes gate and up again because nothing was kept. All forwards keep gate and up for
their backward, as in training. The roof counts the product of the input's gradient once, plus LoRA's terms, plus what
is computed again. Rounds, yardsticks and peers are those of `moe.py`; docs/bench.md explains the columns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import moe
from peers.protocol import Peer, PeerGone
from shapes import DEFAULT_SHAPES, SHAPES, Shape, Weights, Work
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
from timing import Reading, Table, Yardstick, describe_machine, print_last_line, save, spread

if TYPE_CHECKING:
    import torch

    from ktransformers import _core

DEFAULT_TOKENS = (512, 2048, 8192)
PEERS: dict[str, list[str]] = {"kt": [], "kt_private": ["--private"]}  # options of peers/kt_sft.py
PLAIN = {"forward_lora": "forward", "backward_lora": "backward"}  # what LoRA's cost is told against
REPACKS = 9


def parse(argv: list[str] | None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    tokens = list(DEFAULT_TOKENS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=words, default=list(DEFAULT_SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--tokens", type=numbers, default=tokens, help=f"default {','.join(map(str, tokens))}")
    parser.add_argument("--isa", type=words, default=[], help="CPU variants, `all` for those that run here")
    parser.add_argument("--threads", type=int, default=0, help="of our pool; 0: as many as are fastest")
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME=PYTHON", help="kt=PYTHON, kt_private=PYTHON")
    parser.add_argument("--kt-threads", type=int, default=0, help="kt-kernel's workers; 0: all CPUs but two")
    parser.add_argument("--layers", type=int, default=0, help="to walk over; 0: enough to be beyond the caches")
    parser.add_argument("--seconds-per-cell", type=float, default=3.0, help="of timed calls for each contender")
    parser.add_argument("--longest", type=float, default=10.0, help="skip cells whose roof alone is above (seconds)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    args = parser.parse_args(argv)

    for name in args.shapes:
        if name not in SHAPES:
            parser.error(f"--shapes: no shape {name!r}; there are {', '.join(SHAPES)}")
    args.peers = dict(word.partition("=")[::2] for word in args.peers)
    for name, python in args.peers.items():
        if name not in PEERS:
            parser.error(f"--peers: no peer {name!r}; there are {', '.join(PEERS)}")
        if not python:
            parser.error(f"--peers: {name} needs the interpreter that has kt-kernel, {name}=/path/to/python")
    if min(args.tokens, default=0) < 1:
        parser.error("--tokens: expected counts from 1 up, such as 512,2048")
    return args


class Ours(moe.Ours):
    """The packed stores under test, each with LoRA of its own."""

    def __init__(self, pool: _core.Pool, isa: str) -> None:
        super().__init__(pool, isa)
        import ktransformers.nn.factors  # noqa: F401 (modules are no part of what a layer takes)

    def load(self, shape: Shape, weights: Weights, layers: int, max_tokens: int) -> list[float]:
        from ktransformers.nn.factors import factors_of, gradients_like, packed
        from ktransformers.nn.lora import ExpertLora, Factor

        seconds = super().load(shape, weights, layers, max_tokens)
        made = make_lora(shape)
        self._factors, self._adapters, self._grads, self._targets = [], [], [], []
        for store in self._stores:
            own = {name: tensor.clone() for name, tensor in made.items()}
            gate, up, down = (
                Factor(own[f"{matrix}_a"], own[f"{matrix}_b"], ALPHA / RANK) for matrix in ("gate", "up", "down")
            )
            factors = factors_of(ExpertLora(gate=gate, up=up, down=down))
            grads, targets = gradients_like(factors)
            self._factors.append(factors)
            self._adapters.append([packed(store, factors)])
            self._grads.append(dict(zip(factors.roles, grads, strict=True)))
            self._targets.append([targets])
        return seconds

    @property
    def packed_bytes(self) -> tuple[int, int]:
        """Of a layer's experts, and of its LoRA."""
        return self._stores[0].packed_bytes, self._adapters[0][0].packed_bytes

    def repack(self, step: int) -> float:
        """Seconds to take in the factors of a layer that an optimizer has changed."""
        from torch.autograd.graph import increment_version

        from ktransformers.nn.factors import packed

        store, factors = self._stores[step % len(self._stores)], self._factors[step % len(self._stores)]
        increment_version(factors.tensors)
        start = time.perf_counter()
        packed(store, factors)
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

        def sweep(index: int) -> Swept:
            steps = sweep_steps(work, layers, index)
            seconds: dict[str, list[float]] = {}
            for step in steps:
                timed(seconds, "forward", forward, *step, False)
            for step in reversed(steps):
                timed(seconds, "backward", backward, *step, False, True)
            for step in steps:
                timed(seconds, "forward_lora", forward, *step, True)
            for mode, kept in (("backward_lora_recompute", False), ("backward_lora", True)):
                for step in reversed(steps):
                    timed(seconds, mode, backward, *step, True, kept)
            first = steps[0][0]
            results = {"out": outs[first], "hidden": grads[first][0], "weights": grads[first][1]}
            return Swept(seconds, {**results, **self._grads[first]})

        return sweep


def judge(stand: moe.Stand, reading: Reading, tokens: int, mode: str, ms: float, unique: float) -> dict[str, Any]:
    """A cell of the document: the time and what the machine would have allowed."""
    work, touched = operations(stand.shape, tokens, mode), unique * stand.shape.expert_bytes
    roof_ms = 1e3 * reading.roof_seconds(work, touched)
    return {
        "shape": stand.shape.name,
        "tokens": tokens,
        "isa": stand.isa,
        "format": "bf16",
        "mode": mode,
        "ms": ms,
        "roof_ms": roof_ms,
        "share": roof_ms / ms,
        "peers": {},
        "bound": "tile" if work / reading.tile > touched / reading.read else "memory",
        "tflops": work / ms / 1e9,
        "gbs": touched / ms / 1e6,
        "unique_experts": unique,
        "tile_tflops": reading.tile / 1e12,
        "read_gbs": reading.read / 1e9,
    }


class Bench(moe.Bench):
    """One run. Pools, peers and document are kept as the forward bench keeps them; cells and table differ."""

    def __init__(self, args: argparse.Namespace) -> None:
        from ktransformers import _core

        self.args = args
        self.pool = _core.Pool(threads=args.threads)
        cpus = len(os.sched_getaffinity(0))
        self.roof_pool = _core.Pool(threads=cpus) if not args.threads and self.pool.threads < cpus else self.pool
        runnable = {v["name"]: v["native"] for v in _core.variants() if v["native"] or v["emulated"]}
        self.isas = [name for name, native in runnable.items() if native] if args.isa == ["all"] else args.isa
        self.isas = self.isas or [_core.isa()]
        unknown = [isa for isa in self.isas if isa not in runnable]
        if unknown:
            raise SystemExit(f"--isa: {', '.join(unknown)} does not run here; these do: {', '.join(runnable)}")
        machine = describe_machine()
        self.cache = int(machine["l3"])
        machine.update(threads=self.pool.threads, emulated=[isa for isa in self.isas if not runnable[isa]], peers={})
        self.document: dict[str, Any] = {"bench": "train_step", "machine": machine, "rank": RANK}
        self.document.update(memory=[], cells=[])
        self.failed = False
        print(f"{machine['cpu']}: {machine['cpus']} CPUs, {self.pool.threads} threads, LoRA rank {RANK}")
        heads = ["shape", "tokens", "isa", "mode", "ms", "roof ms", "share", "bound", "TFLOPS", "GB/s"]
        heads += ["tile TF", "read GB/s", "LoRA %", "x fwd"]
        heads += [head for name in args.peers for head in (f"{name} ms", f"{name} x")]
        widths = [16, 6, 11, 23, 9, 9, 5, 6, 6, 6, 7, 6, 6, 5]
        self.table = Table(heads, widths + [9, 5] * len(args.peers))

    def add(self, cell: dict[str, Any]) -> None:
        cell["speedup"] = {name: ms / cell["ms"] for name, ms in cell["peers"].items()}
        self.document["cells"].append(cell)

        def shown(key: str, digits: int, scale: float = 1.0) -> str:
            return f"{cell[key] * scale:.{digits}f}" if key in cell else "-"

        row = [cell["shape"], str(cell["tokens"] or "-"), cell["isa"], cell["mode"], shown("ms", 3)]
        row += [shown("roof_ms", 3), shown("share", 2), cell["bound"], shown("tflops", 2), shown("gbs", 1)]
        row += [shown("tile_tflops", 2), shown("read_gbs", 1), shown("lora_cost", 1, 100), shown("over_forward", 2)]
        for name in self.args.peers:
            ms = cell["peers"].get(name)
            row += [f"{ms:.3f}", f"{ms / cell['ms']:.2f}"] if ms else ["-", "-"]
        self.table.row(row)
        if self.args.json:
            save(self.document, self.args.json)

    def start_peers(self) -> dict[str, Peer]:
        started: dict[str, Peer] = {}
        folders = [folder for folder in os.environ.get("KT_PEER_PYTHONPATH", "").split(os.pathsep) if folder]
        env = {"OMP_NUM_THREADS": "4"}
        if folders:
            env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(folder) for folder in folders)
        for name, python in self.args.peers.items():
            options = ["--threads", str(self.args.kt_threads), *PEERS[name]]
            try:
                started[name] = Peer(name, python, options, env, "peers.kt_sft")
            except PeerGone as gone:
                self.lose(gone)
        for name, facts in self.ask_peers(started, {"do": "hello"}).items():
            self.document["machine"]["peers"][name] = facts
        return started

    def measure_shape(self, shape: Shape, isa: str, peers: dict[str, Peer]) -> None:
        ours = Ours(self.pool, isa)
        stand = moe.Stand(shape, isa, Sweeper(ours), peers, Yardstick(self.roof_pool, isa), [])
        layers = self.args.layers or shape.layers(self.cache)
        request = {"do": "load", "shape": shape.name, "layers": layers, "max_tokens": max(self.args.tokens)}
        resident = stand.ours.ask(request)["resident"]
        theirs = {name: answer["resident"] for name, answer in self.ask_peers(peers, request).items()}
        self.add_memory(stand, ours, layers, resident, theirs)
        self.measure_repack(stand, ours)
        for tokens in self.args.tokens:
            stand.look()
            least = stand.seen[-1].roof_seconds(operations(shape, tokens, MODES[-1]), 0)
            if least > self.args.longest:
                self.note(f"{shape.name} {isa}: {tokens} tokens skipped, {least:.1f} s a call at best; see --longest")
                continue
            self.measure_modes(stand, tokens)

    def add_memory(self, stand: moe.Stand, ours: Ours, layers: int, resident: int, theirs: dict[str, int]) -> None:
        parameters = stand.shape.layer_bytes // 2
        experts, lora = ours.packed_bytes
        entry: dict[str, Any] = {
            "shape": stand.shape.name,
            "isa": stand.isa,
            "layers": layers,
            "packed_bytes_per_parameter": experts / parameters,
            "packed_lora_bytes_per_parameter": lora / parameters,
            "resident_bytes_per_parameter": resident / (layers * parameters),
            "peers": {name: taken / (layers * parameters) for name, taken in theirs.items()},
        }
        self.document["memory"].append(entry)
        told = [f"{entry['packed_bytes_per_parameter']:.2f} packed"]
        told += [f"{entry['resident_bytes_per_parameter']:.2f} resident with LoRA and its gradients"]
        told += [f"{name} {value:.2f}" for name, value in entry["peers"].items()]
        print(
            f"    {stand.shape.name}, {stand.isa}, {layers} layers: bytes per parameter {', '.join(told)}", flush=True
        )

    def measure_repack(self, stand: moe.Stand, ours: Ours) -> None:
        """Reads and writes every factor once; set against the reading alone."""
        ours.repack(0)
        stand.look()
        ms = [1e3 * ours.repack(step) for step in range(REPACKS)]
        stand.look()
        reading = stand.reading()
        source = 2 * stand.shape.experts * lora_parameters(stand.shape)
        taken, roof_ms = statistics.median(ms), 1e3 * source / reading.read
        cell = {"shape": stand.shape.name, "tokens": 0, "isa": stand.isa, "format": "bf16", "mode": "repack"}
        cell.update(ms=taken, roof_ms=roof_ms, share=roof_ms / taken, peers={}, bound="memory")
        cell.update(gbs=source / taken / 1e6, read_gbs=reading.read / 1e9, reps=len(ms), spread=spread(ms))
        self.add(cell)

    def measure_modes(self, stand: moe.Stand, tokens: int) -> None:
        request = {"do": "round", "tokens": tokens, "seconds": self.args.seconds_per_cell / moe.ROUNDS}
        mine, theirs = [], []
        stand.ours.prepare(tokens)
        for _ in range(moe.ROUNDS):
            stand.look()
            mine.append(stand.ours.ask(request))
            stand.look()
            theirs.append(self.ask_peers(stand.peers, request))
        reading, unique = stand.reading(), mine[0]["unique_experts"]
        medians: dict[str, float] = {}
        for mode in MODES:
            ms = [value for answer in mine for value in answer["ms"][mode]]
            medians[mode] = statistics.median(ms)
            cell = judge(stand, reading, tokens, mode, medians[mode], unique)
            cell.update(reps=len(ms), spread=spread(ms), foreign=max(answer["foreign"] for answer in mine))
            if mode in PLAIN:
                cell["lora_cost"] = medians[mode] / medians[PLAIN[mode]] - 1
            if mode.startswith("backward"):
                cell["over_forward"] = medians[mode] / medians["forward" if mode == "backward" else "forward_lora"]
            for name in stand.peers:
                times = [value for answers in theirs for value in answers[name]["ms"].get(mode, [])]
                if times:
                    cell["peers"][name] = statistics.median(times)
            self.add(cell)
        for name in stand.peers:
            self.compare(f"{stand.shape.name}, {tokens} tokens, {name}", mine[0], theirs[0][name])

    def compare(self, where: str, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
        """Both must have done the same work, gradients included; whether the numbers are right is for the tests."""
        if mine["routes"] != theirs["routes"]:
            self.note(f"{where}: routed differently, so the times do not compare")
            return
        for name, norm in mine["norms"].items():
            other = theirs["norms"][name]
            if not abs(other - norm) <= 0.02 * norm:
                what = "output" if name == "out" else f"gradient of {name}"
                self.note(f"{where}: {what} of norm {other:.4g}, ours {norm:.4g}")


def main(argv: list[str] | None = None) -> int:
    bench = Bench(parse(argv))
    bench.run()
    print_last_line(bench.document)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
