"""Benches of one layer of experts (`moe.py`, `train_step.py`, `formats.py`): options, peers in processes of their own
that are measured in alternating rounds, the table and the JSON document.

A bench is a `LayerBench` with a name, columns and peer programs; it measures one shape at a time and adds cells, each
a row of the table and an entry of the document. The roof of a cell is max(operations / tile rate, bytes of the experts
touched / read bandwidth), both rates measured before and after every round.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from arguments import words
from peers.protocol import Peer, PeerFailed, Runner
from shapes import SHAPES, Shape
from timing import SETTLE, Reading, Table, Yardstick, describe_machine, print_last_line, save

ROUNDS = 3


@dataclass(frozen=True)
class Program:
    """How a peer is started. kt-kernel has an interpreter, threads and a PYTHONPATH of its own."""

    module: str
    options: tuple[str, ...] = ()
    kt: bool = True


@dataclass(frozen=True)
class Column:
    head: str
    width: int
    key: str  # of a cell; `peers/kt` looks into what it finds, `peers/*` takes the first
    digits: int | None = None  # None: a word or a count
    scale: float = 1.0

    def shown(self, cell: dict[str, Any]) -> str:
        value: Any = cell
        for part in self.key.split("/"):
            value = next(iter(value.values()), {}) if part == "*" else value.get(part, {})
        if value == {} or (self.digits is None and not value):
            return "-"
        return str(value) if self.digits is None else f"{value * self.scale:.{self.digits}f}"


def options(description: str | None, programs: Mapping[str, Program], shapes: Sequence[str]) -> argparse.ArgumentParser:
    """Those that every bench of a layer has; defaults of tokens and seconds are for the bench to set."""
    named = ", ".join(f"{name}=PYTHON" if program.kt else f"{name}[=PYTHON]" for name, program in programs.items())
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=words, default=list(shapes), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--isa", type=words, default=[], help="CPU variants, `all` for those that run here")
    parser.add_argument("--threads", type=int, default=0, help="of our pool; 0: as many as are fastest")
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME[=PYTHON]", help=named)
    parser.add_argument("--kt-threads", type=int, default=0, help="kt-kernel's workers; 0: all CPUs but two")
    parser.add_argument("--layers", type=int, default=0, help="that calls rotate over; 0: enough to exceed the caches")
    parser.add_argument("--longest", type=float, default=10.0, help="skip cells whose roof alone is above (seconds)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    return parser


def parse(
    parser: argparse.ArgumentParser, programs: Mapping[str, Program], argv: list[str] | None
) -> argparse.Namespace:
    args = parser.parse_args(argv)
    for name in args.shapes:
        if name not in SHAPES:
            parser.error(f"--shapes: no shape {name!r}; there are {', '.join(SHAPES)}")
    args.peers = dict(word.partition("=")[::2] for word in args.peers)
    for name, python in args.peers.items():
        if name not in programs:
            parser.error(f"--peers: no peer {name!r}; there are {', '.join(programs)}")
        if programs[name].kt and not python:
            parser.error(f"--peers: {name} needs the interpreter that has kt-kernel, {name}=/path/to/python")
    return args


NAMES = (Column("shape", 16, "shape"), Column("tokens", 6, "tokens"), Column("isa", 11, "isa"))
TIMES = (
    Column("ms", 9, "ms", 3),
    Column("roof ms", 9, "roof_ms", 3),
    Column("share", 5, "share", 2),
    Column("bound", 6, "bound"),
    Column("TFLOPS", 6, "tflops", 2),
    Column("GB/s", 6, "gbs", 1),
)
RATES = (Column("tile TF", 7, "tile_tflops", 2), Column("read GB/s", 6, "read_gbs", 1))


def check_tokens(parser: argparse.ArgumentParser, option: str, tokens: list[int]) -> None:
    if min(tokens, default=0) < 1:
        parser.error(f"{option}: expected counts from 1 up, such as 1,16,512")


@dataclass
class Setup:
    """One shape and CPU variant being measured, ours and the peers, with samples of the machine's rates."""

    shape: Shape
    isa: str
    ours: Runner
    peers: dict[str, Peer]
    yardstick: Yardstick
    format: str = "bf16"
    expert_bytes: float = 0.0  # of one expert in its format; 0: in bf16
    samples: list[Reading] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.expert_bytes = self.expert_bytes or self.shape.expert_bytes

    def sample_rates(self) -> None:
        self.samples.append(self.yardstick.take())

    def mean_rates(self) -> Reading:
        """The mean of the samples since the last call."""
        samples, self.samples = self.samples, []
        return Reading.mean(samples)

    def cell(
        self, reading: Reading, tokens: int, mode: str, ms: float, operations: float, unique: float
    ) -> dict[str, Any]:
        """A cell of the document: the time, the roof and the rates."""
        touched = unique * self.expert_bytes
        roof_ms = 1e3 * reading.roof_seconds(operations, touched)
        return {
            "shape": self.shape.name,
            "tokens": tokens,
            "isa": self.isa,
            "format": self.format,
            "mode": mode,
            "ms": ms,
            "roof_ms": roof_ms,
            "share": roof_ms / ms,
            "peers": {},
            "bound": "tile" if operations / reading.tile > touched / reading.read else "memory",
            "tflops": operations / ms / 1e9,
            "gbs": touched / ms / 1e6,
            "unique_experts": unique,
            "tile_tflops": reading.tile / 1e12,
            "read_gbs": reading.read / 1e9,
        }

    def read_cell(self, reading: Reading, mode: str, ms: float, source: float) -> dict[str, Any]:
        """A cell of work that reads `source` bytes once and multiplies nothing: its roof is the read bandwidth."""
        roof_ms = 1e3 * source / reading.read
        cell = {"shape": self.shape.name, "tokens": 0, "isa": self.isa, "format": self.format, "mode": mode}
        cell.update(ms=ms, roof_ms=roof_ms, share=roof_ms / ms, peers={}, bound="memory")
        cell.update(gbs=source / ms / 1e6, read_gbs=reading.read / 1e9)
        return cell

    def pack_cell(self, reading: Reading, ms: list[float]) -> dict[str, Any]:
        """Packing reads each weight once and writes it once. `ms`: every layer's first packing, into fresh memory, and
        last a second one into the same memory."""
        source = self.shape.experts * self.expert_bytes
        cell = self.read_cell(reading, "pack", min(ms[:-1]), source)
        cell.update(again_ms=ms[-1], again_gbs=source / ms[-1] / 1e6)
        return cell


class LayerBench(ABC):
    """One run: the pool under test, the pool that the roof is measured with, the table and the document."""

    NAME: ClassVar[str]
    COLUMNS: ClassVar[Sequence[Column]]
    PROGRAMS: ClassVar[Mapping[str, Program]]

    def __init__(self, args: argparse.Namespace) -> None:
        from ktransformers import _core

        self.args = args
        self.pool = _core.Pool(threads=args.threads)
        # The roof belongs to the machine: all its CPUs are tried, also where the pool chose fewer.
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
        self.document: dict[str, Any] = {"bench": self.NAME, "machine": machine, "cells": []}
        self.failed = False
        print(f"{machine['cpu']}: {machine['cpus']} CPUs, {self.pool.threads} threads, torch {machine['torch']}")
        self.columns = [*self.COLUMNS, *self.peer_columns(args.peers)]
        self.table = Table([column.head for column in self.columns], [column.width for column in self.columns])

    def peer_columns(self, peers: Mapping[str, str]) -> list[Column]:
        pairs = [
            (Column(f"{name} ms", 9, f"peers/{name}", 3), Column(f"{name} x", 5, f"speedup/{name}", 2))
            for name in peers
        ]
        return [column for pair in pairs for column in pair]

    def note(self, text: str) -> None:
        print(f"! {text}", flush=True)
        self.document.setdefault("notes", []).append(text)

    def add(self, cell: dict[str, Any]) -> None:
        cell["speedup"] = {name: ms / cell["ms"] for name, ms in cell["peers"].items()}
        self.document["cells"].append(cell)
        self.table.row([column.shown(cell) for column in self.columns])
        if self.args.json:
            save(self.document, self.args.json)

    def start_peers(self, programs: Mapping[str, Program]) -> dict[str, Peer]:
        """The requested ones of `programs`, started and past their imports, so that packing ours is not disturbed."""
        started: dict[str, Peer] = {}
        for name, program in programs.items():
            if name not in self.args.peers:
                continue
            threads = self.args.kt_threads if program.kt else self.args.threads
            options = ["--threads", str(threads), *program.options]
            env = kt_environment() if program.kt else {}
            try:
                started[name] = Peer(name, self.args.peers[name] or sys.executable, program.module, options, env)
            except PeerFailed as error:
                self.report_failure(error)
        for name, facts in self.ask_peers(started, {"do": "hello"}).items():
            self.document["machine"]["peers"].setdefault(name, {}).update(facts)
        return started

    def report_failure(self, error: PeerFailed) -> None:
        self.failed = True
        self.note(str(error))

    def ask_peers(self, peers: dict[str, Peer], request: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """One after the other, with a pause around each: worker threads spin for a while after a call."""
        answers = {}
        for name, peer in list(peers.items()):
            time.sleep(SETTLE)
            try:
                answers[name] = peer.ask(request)
            except PeerFailed as error:
                self.report_failure(error)
                peers.pop(name).close()
        if answers:
            time.sleep(SETTLE)
        return answers

    def rounds(self, setup: Setup, tokens: int) -> tuple[list[dict[str, Any]], list[dict[str, dict[str, Any]]]]:
        """The answers of ours and of the peers, in alternating rounds."""
        request = {"do": "round", "tokens": tokens, "seconds": self.args.seconds_per_cell / ROUNDS}
        mine, theirs = [], []
        setup.ours.prepare(tokens)
        for _ in range(ROUNDS):
            setup.sample_rates()
            mine.append(setup.ours.ask(request))
            setup.sample_rates()
            theirs.append(self.ask_peers(setup.peers, request))
        return mine, theirs

    def measure_pack(self, setup: Setup, request: dict[str, Any]) -> Reading:
        """Loads a shape everywhere and adds the cell of packing; the rates of the machine meanwhile."""
        setup.sample_rates()
        ms = setup.ours.ask(request)["ms"]
        setup.sample_rates()
        rates = setup.mean_rates()
        cell = setup.pack_cell(rates, ms)
        for name, answer in self.ask_peers(setup.peers, request).items():
            if answer["ms"]:
                cell["peers"][name] = min(answer["ms"])
        self.add(cell)
        return rates

    def same_routes(self, where: str, mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
        """Whether both computed the same routes; if not, a note says so."""
        if mine["routes"] == theirs["routes"]:
            return True
        self.note(f"{where}: routed differently, so the times do not compare")
        return False

    def too_long(self, setup: Setup, tokens: int, seconds: float) -> bool:
        """Whether the cell is left out because its roof alone takes so many seconds."""
        if seconds <= self.args.longest:
            return False
        where = f"{setup.shape.name} {setup.isa}"
        self.note(f"{where}: {tokens} tokens skipped, {seconds:.1f} s a call at best; see --longest")
        return True

    @abstractmethod
    def measure_shape(self, shape: Shape, isa: str, peers: dict[str, Peer]) -> None: ...

    def run(self) -> None:
        for name in self.args.shapes:
            for index, isa in enumerate(self.isas):
                # Peers have one variant: once a shape is enough.
                peers = self.start_peers(self.PROGRAMS) if index == 0 else {}
                try:
                    self.measure_shape(SHAPES[name], isa, peers)
                finally:
                    for peer in peers.values():
                        peer.close()

    def main(self) -> int:
        """The exit status; the last line is the document."""
        self.run()
        print_last_line(self.document)
        return 1 if self.failed else 0


def kt_environment() -> dict[str, str]:
    folders = [folder for folder in os.environ.get("KT_PEER_PYTHONPATH", "").split(os.pathsep) if folder]
    env = {"OMP_NUM_THREADS": "4"}
    if folders:
        env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(folder) for folder in folders)
    return env
