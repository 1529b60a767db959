"""Forward of one layer of routed experts against the roof of this machine, and against peers in the same run.

    python bench/moe.py --shapes qwen3-30b --tokens 1,512,2048 --peers kt=/path/to/python torch

The roof of a cell is max(operations / tile rate, expert bytes touched / read bandwidth). Both rates are taken before
and after every round of ours and averaged over the cell, because a machine drifts more within minutes than a kernel
improves in a week; for the same reason ours and the peers take turns in short rounds. `timing.py` has the clockwork,
`shapes.py` the work, `peers/` the others. docs/bench.md explains the columns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.protocol import MODULES, Peer, PeerGone, Runner
from shapes import DEFAULT_SHAPES, DEFAULT_TOKENS, SHAPES, Shape, Weights, Work
from timing import SETTLE, Reading, Stopwatch, Table, Yardstick, describe_machine, print_last_line, save, spread

if TYPE_CHECKING:
    import torch

    from ktransformers import _core

ROUNDS = 3
OPERATOR_BYTES = 1 << 30  # of matrices that the torch operator between our calls walks over


def parse(argv: list[str] | None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=words, default=list(DEFAULT_SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--tokens", type=numbers, help=f"default {','.join(map(str, DEFAULT_TOKENS))}")
    parser.add_argument("--isa", type=words, default=[], help="CPU variants, `all` for those that run here")
    parser.add_argument("--threads", type=int, default=0, help="of our pool; 0: as many as are fastest")
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME[=PYTHON]", help="kt=PYTHON, torch[=PYTHON]")
    parser.add_argument("--kt-threads", type=int, default=0, help="kt-kernel's workers; 0: all CPUs but two")
    parser.add_argument("--alternate", action="store_true", help="also take turns with a torch operator")
    parser.add_argument("--layers", type=int, default=0, help="to walk over; 0: enough to be beyond the caches")
    parser.add_argument("--seconds-per-cell", type=float, help="of timed calls for each contender, default 0.6")
    parser.add_argument("--longest", type=float, default=10.0, help="skip cells whose roof alone is above (seconds)")
    parser.add_argument("--quick", action="store_true", help="tokens 1,16,512,2048 and half the time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    args = parser.parse_args(argv)

    for name in args.shapes:
        if name not in SHAPES:
            parser.error(f"--shapes: no shape {name!r}; there are {', '.join(SHAPES)}")
    args.peers = dict(word.partition("=")[::2] for word in args.peers)
    for name in args.peers:
        if name not in MODULES:
            parser.error(f"--peers: no peer {name!r}; there are {', '.join(MODULES)}")
    if args.peers.get("kt") == "":
        parser.error("--peers: kt needs the interpreter that has kt-kernel, kt=/path/to/python")
    if args.tokens is None:
        args.tokens = [1, 16, 512, 2048] if args.quick else list(DEFAULT_TOKENS)
    if min(args.tokens, default=0) < 1:
        parser.error("--tokens: expected counts from 1 up, such as 1,16,512")
    if args.seconds_per_cell is None:
        args.seconds_per_cell = 0.3 if args.quick else 0.6
    return args


class Ours:
    """The packed store under test, one for each layer."""

    def __init__(self, pool: _core.Pool, isa: str) -> None:
        self._pool, self._isa = pool, isa

    def facts(self) -> dict[str, Any]:
        return {"threads": self._pool.threads}

    def load(self, shape: Shape, weights: Weights, layers: int, max_tokens: int) -> list[float]:
        from ktransformers.nn import ExpertStore

        self._stores, seconds = [], []
        for _ in range(layers):
            store = ExpertStore(shape.experts, shape.hidden, shape.intermediate, pool=self._pool, isa=self._isa)
            start = time.perf_counter()
            store.pack(gate=weights.gate, up=weights.up, down=weights.down)
            seconds.append(time.perf_counter() - start)
            self._stores.append(store)
        start = time.perf_counter()  # once more into memory that is already there: the kernel without page faults
        store.pack(gate=weights.gate, up=weights.up, down=weights.down)
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
class Turns:
    """Milliseconds of ours and of the torch operator, each alone and in alternation."""

    ours_alone: float
    ours: float
    operator_alone: float
    operator: float


def take_turns(ours: Stopwatch, operator: Stopwatch, seconds: float) -> Turns:
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
    return Turns(median(alone), median(ms for _, ms in both), median(operator_alone), median(ms for ms, _ in both))


@dataclass
class Stand:
    """One shape and variant being measured: who takes part, and what the machine could do whenever it was looked at."""

    shape: Shape
    isa: str
    ours: Runner
    peers: dict[str, Peer]
    yardstick: Yardstick
    seen: list[Reading]

    def look(self) -> None:
        self.seen.append(self.yardstick.take())

    def reading(self) -> Reading:
        """The mean of the looks since the last time this was asked."""
        seen, self.seen = self.seen, []
        return Reading.mean(seen)


def judge(stand: Stand, tokens: int, mode: str, ms: float, unique: float) -> dict[str, Any]:
    """A cell of the document: the time and what the machine would have allowed."""
    shape, reading = stand.shape, stand.reading()
    operations, touched = shape.operations(tokens), unique * shape.expert_bytes
    roof_ms = 1e3 * reading.roof_seconds(operations, touched)
    return {
        "shape": shape.name,
        "tokens": tokens,
        "isa": stand.isa,
        "format": "bf16",
        "mode": mode,
        "ms": ms,
        "roof_ms": roof_ms,
        "share": roof_ms / ms,
        "peers": {},
        "bound": "tile" if operations / reading.tile > touched / reading.read else "memory",
        "tflops": operations / ms / 1e9,
        "gbs": touched / ms / 1e6,
        "us_per_token": 1e3 * ms / tokens,
        "unique_experts": unique,
        "activation_bytes": shape.activation_bytes(tokens),
        "register_share": operations / reading.registers * 1e3 / ms,
        "tile_tflops": reading.tile / 1e12,
        "register_tflops": reading.registers / 1e12,
        "read_gbs": reading.read / 1e9,
    }


def judge_pack(shape: Shape, isa: str, ms: list[float], reading: Reading) -> dict[str, Any]:
    """Packing reads each weight once and writes it once; it is set against the reading alone. `ms` has every layer's
    first packing, into memory that the system hands out meanwhile, and last a second one into the same memory."""
    best, again, roof_ms = min(ms[:-1]), ms[-1], 1e3 * shape.layer_bytes / reading.read
    return {
        "shape": shape.name,
        "tokens": 0,
        "isa": isa,
        "format": "bf16",
        "mode": "pack",
        "ms": best,
        "roof_ms": roof_ms,
        "share": roof_ms / best,
        "peers": {},
        "gbs": shape.layer_bytes / best / 1e6,
        "again_ms": again,
        "again_gbs": shape.layer_bytes / again / 1e6,
        "read_gbs": reading.read / 1e9,
    }


class Bench:
    """One run: the pool under test, the pool that the roof is measured with, the growing table and document."""

    def __init__(self, args: argparse.Namespace) -> None:
        from ktransformers import _core

        self.args = args
        self.pool = _core.Pool(threads=args.threads)
        # The roof belongs to the machine: all its CPUs are tried, also where the pool has settled for fewer.
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
        self.document: dict[str, Any] = {"bench": "moe", "machine": machine, "cells": []}
        self.failed = False
        print(f"{machine['cpu']}: {machine['cpus']} CPUs, {self.pool.threads} threads, torch {machine['torch']}")
        peer_heads = [head for name in args.peers for head in (f"{name} ms", f"{name} x")]
        heads = ["shape", "tokens", "isa", "mode", "ms", "roof ms", "share", "bound", "TFLOPS", "GB/s", "us/token"]
        heads += ["regs", "act MB", "tile TF", "read GB/s", *peer_heads]
        self.table = Table(heads, [16, 6, 11, 9, 8, 8, 5, 6, 6, 6, 8, 5, 7, 7, 6] + [8, 5] * len(args.peers))

    def note(self, text: str) -> None:
        print(f"! {text}", flush=True)
        self.document.setdefault("notes", []).append(text)

    def add(self, cell: dict[str, Any]) -> None:
        cell["speedup"] = {name: ms / cell["ms"] for name, ms in cell["peers"].items()}
        self.document["cells"].append(cell)

        def shown(key: str, digits: int, scale: float = 1.0) -> str:
            return f"{cell[key] * scale:.{digits}f}" if key in cell else "-"

        row = [cell["shape"], str(cell["tokens"] or "-"), cell["isa"], cell["mode"], shown("ms", 3)]
        row += [shown("roof_ms", 3), shown("share", 2), cell.get("bound", "memory"), shown("tflops", 2)]
        row += [shown("gbs", 1), shown("us_per_token", 1), shown("register_share", 2)]
        row += [shown("activation_bytes", 2, 1e-6), shown("tile_tflops", 2), shown("read_gbs", 1)]
        for name in self.args.peers:
            ms = cell["peers"].get(name)
            row += [f"{ms:.3f}", f"{ms / cell['ms']:.2f}"] if ms else ["-", "-"]
        self.table.row(row)
        if self.args.json:
            save(self.document, self.args.json)

    def start_peers(self) -> dict[str, Peer]:
        """Started and past their imports, so that ours is packed in quiet."""
        started: dict[str, Peer] = {}
        for name, python in self.args.peers.items():
            threads, env = self.args.threads, {}
            if name == "kt":
                threads, env = self.args.kt_threads, {"OMP_NUM_THREADS": "4"}
                folders = os.environ.get("KT_PEER_PYTHONPATH", "").split(os.pathsep)
                if any(folders):
                    env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(folder) for folder in folders if folder)
            try:
                started[name] = Peer(name, python or sys.executable, ["--threads", str(threads)], env)
            except PeerGone as gone:
                self.lose(gone)
        for name, facts in self.ask_peers(started, {"do": "hello"}).items():
            self.document["machine"]["peers"][name] = facts
        return started

    def lose(self, gone: PeerGone) -> None:
        self.failed = True
        self.note(str(gone))

    def ask_peers(self, peers: dict[str, Peer], request: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """One after the other; a pause around each, so that none finds the threads of another still spinning."""
        answers = {}
        for name, peer in list(peers.items()):
            time.sleep(SETTLE)
            try:
                answers[name] = peer.ask(request)
            except PeerGone as gone:
                self.lose(gone)
                peers.pop(name).close()
        if answers:
            time.sleep(SETTLE)
        return answers

    def measure_shape(self, shape: Shape, isa: str, peers: dict[str, Peer]) -> None:
        stand = Stand(shape, isa, Runner(Ours(self.pool, isa)), peers, Yardstick(self.roof_pool, isa), [])
        layers = self.args.layers or shape.layers(self.cache)
        request = {"do": "load", "shape": shape.name, "layers": layers, "max_tokens": max(self.args.tokens)}
        stand.look()
        pack_ms = stand.ours.ask(request)["ms"]
        stand.look()
        reading = stand.reading()
        pack = judge_pack(shape, isa, pack_ms, reading)
        for name, answer in self.ask_peers(peers, request).items():
            if answer["ms"]:
                pack["peers"][name] = min(answer["ms"])
        self.add(pack)
        for tokens in self.args.tokens:
            least = reading.roof_seconds(shape.operations(tokens), 0)
            if least > self.args.longest:
                self.note(f"{shape.name} {isa}: {tokens} tokens skipped, {least:.1f} s a call at best; see --longest")
                continue
            unique = self.measure_forward(stand, tokens)
            if self.args.alternate:
                self.measure_turns(stand, tokens, unique)

    def measure_forward(self, stand: Stand, tokens: int) -> float:
        """Adds the cell; the experts that a call touched, on average."""
        request = {"do": "round", "tokens": tokens, "seconds": self.args.seconds_per_cell / ROUNDS}
        mine, theirs = [], []
        stand.ours.prepare(tokens)
        for _ in range(ROUNDS):
            stand.look()
            mine.append(stand.ours.ask(request))
            stand.look()
            theirs.append(self.ask_peers(stand.peers, request))
        ms = [value for answer in mine for value in answer["ms"]]
        unique: float = mine[0]["unique_experts"]
        cell = judge(stand, tokens, "forward", statistics.median(ms), unique)
        cell.update(reps=len(ms), spread=spread(ms), foreign=max(answer["foreign"] for answer in mine))
        for name in stand.peers:
            cell["peers"][name] = statistics.median(value for answers in theirs for value in answers[name]["ms"])
            self.compare(f"{stand.shape.name}, {tokens} tokens, {name}", mine[0], theirs[0][name])
        self.add(cell)
        return unique

    def compare(self, where: str, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
        """Both must have done the same work; whether the numbers are right is for the tests."""
        if mine["routes"] != theirs["routes"]:
            self.note(f"{where}: routed differently, so the times do not compare")
        elif abs(theirs["norm"] - mine["norm"]) > 0.02 * mine["norm"]:
            self.note(f"{where}: output of norm {theirs['norm']:.4g}, ours {mine['norm']:.4g}")

    def measure_turns(self, stand: Stand, tokens: int, unique: float) -> None:
        operator = Stopwatch(Attention(stand.shape, tokens))
        stand.look()
        turns = take_turns(stand.ours.prepare(tokens), operator, self.args.seconds_per_cell)
        stand.look()
        cell = judge(stand, tokens, "alternate", turns.ours, unique)
        cell.update(alone_ms=turns.ours_alone, torch_ms=turns.operator, torch_alone_ms=turns.operator_alone)
        self.add(cell)
        print(
            f"    in turns with torch: ours {turns.ours:.3f} ms, alone {turns.ours_alone:.3f}"
            f" ({turns.ours / turns.ours_alone:.2f}x); torch {turns.operator:.3f} ms, alone {turns.operator_alone:.3f}"
            f" ({turns.operator / turns.operator_alone:.2f}x)",
            flush=True,
        )

    def run(self) -> None:
        for name in self.args.shapes:
            for index, isa in enumerate(self.isas):
                peers = self.start_peers() if index == 0 else {}  # they have one variant: once a shape is enough
                try:
                    self.measure_shape(SHAPES[name], isa, peers)
                finally:
                    for peer in peers.values():
                        peer.close()


def main(argv: list[str] | None = None) -> int:
    bench = Bench(parse(argv))
    bench.run()
    print_last_line(bench.document)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
