"""Serving in llama-bench's words: `pp512` reads a prompt, `tg128` writes an answer, with several streams at once.

    python bench/serve.py --shape qwen3-30b --layers 8 --engine
    python bench/serve.py --shape tiny --peers transformers=/path/to/python llama=/path/to/python

The base, one adapter, and four adapters mixed in one batch, so that their cost stands beside it. `--engine` drives the
engine in this process, which needs neither FastAPI nor a port; without it every token comes over HTTP from a server on
loopback. Peers get the same directory, the same prompts' lengths and the same streams in an interpreter of their own:
transformers' continuous batching (what its `serve --continuous-batching` runs), and llama.cpp, in BF16 and Q4_K; with
`--gguf` we take the experts of llama.cpp's Q4_K file, and then the whole file, too. Rates are tokens/s of all streams
together; prompts never repeat, so no computed prefix is found again. Cells are repeated until `--seconds` have passed,
and the document is written after each: a run that is cut off leaves what it had.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arguments import numbers
from serve_clients import DEPTH, Client, open_ours
from serve_model import ATTENTION, make_adapter, make_model
from serve_ratios import print_ratios
from shapes import SHAPES
from timing import Table, Watch, describe_machine, print_last_line, save

PEERS = {"transformers": "serve_transformers.py", "llama": "serve_llama.py"}
WARM = 8  # tokens that are written before any are counted
HEADS = ("contender", "adapters", "test", "streams", "t/s", "±", "experts", "x base", "foreign")
WIDTHS = (22, 8, 7, 7, 9, 7, 7, 6, 7)


@dataclass(frozen=True)
class Test:
    prompt: int  # tokens that are read
    new: int = 0  # tokens that are written; 0: reading is measured

    @property
    def name(self) -> str:
        return f"tg{self.new}" if self.new else f"pp{self.prompt}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b", choices=list(ATTENTION), help="of the experts")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of ppN")
    parser.add_argument("--new", type=int, default=128, help="tokens of tgN")
    parser.add_argument("--streams", type=numbers, default=[1, 8, 16], help="default 1,8,16")
    parser.add_argument("--adapters", type=numbers, default=[0, 1, 4], help="in a batch; default 0,1,4")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3, help="of a cell, at most")
    parser.add_argument("--seconds", type=float, default=5.0, help="after which a cell is not repeated")
    parser.add_argument("--engine", action="store_true", help="in this process, without HTTP")
    parser.add_argument("--threads", type=int, default=0, help="of the experts; 0: as many as are fastest")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens in a step, as --chunked-prefill-size")
    parser.add_argument("--device", help="cpu or cuda: everything but the experts")
    parser.add_argument("--dtype", default="auto", help="of everything but the experts")
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME=PYTHON", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--peer-seconds", type=float, default=600.0, help="after which a peer is ended")
    parser.add_argument("--peers-only", action="store_true", help="measure nothing of ours but what --gguf asks for")
    parser.add_argument(
        "--gguf", action="store_true", help="ours with the experts of llama.cpp's Q4_K, and with the whole file"
    )
    parser.add_argument("--folder", type=Path, help="for the model and the adapters; kept. Default: a temporary one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    args = parser.parse_args(argv)
    args.peers = dict(word.partition("=")[::2] for word in args.peers)
    for name, python in args.peers.items():
        if name not in PEERS or not python:
            parser.error(f"--peers: {name}={python}, expected NAME=PYTHON with a name of {', '.join(PEERS)}")
    if min([*args.streams, args.prompt, args.new, args.layers, args.repetitions, args.chunk]) < 1:
        parser.error("counts are at least 1")
    return args


def rate(test: Test, times: list[list[float]]) -> float:
    """Tokens/s of all streams."""
    if not test.new:
        return len(times) * test.prompt / max(arrivals[0] for arrivals in times)
    ready = max(arrivals[0] for arrivals in times)  # from here on every stream writes
    ends = [arrivals[min(test.new, len(arrivals) - 1)] for arrivals in times]
    count = sum(ready < at <= end for arrivals, end in zip(times, ends, strict=True) for at in arrivals)
    return count / (max(ends) - ready)


class Bench:
    def __init__(self, args: argparse.Namespace, environment: dict[str, str]) -> None:
        self.args, self._environment = args, environment
        self.draw = random.Random(0)
        shape = SHAPES[args.shape]
        self.document: dict[str, Any] = {
            "bench": "serve",
            "machine": describe_machine(),
            "model": {"shape": args.shape, "layers": args.layers, "vocabulary": ATTENTION[args.shape].vocabulary},
            "rank": args.rank,
            "engine": args.engine,
            "device": args.device,
            "tests": {"prompt": args.prompt, "new": args.new, "chunk": args.chunk},
            "expert_bytes": shape.layer_bytes * args.layers,
            "cells": [],
        }
        self.table = Table(HEADS, WIDTHS)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        top = ATTENTION[self.args.shape].vocabulary
        return [[self.draw.randrange(3, top) for _ in range(length)] for _ in range(count)]

    def tests(self) -> tuple[Test, Test]:
        return Test(DEPTH, self.args.new), Test(self.args.prompt)

    def ours(self, client: Client, kind: str, adapters: list[int]) -> None:
        for test in self.tests():
            for streams in self.args.streams:
                for count in adapters:
                    if count > max(1, streams):
                        continue
                    names = [f"base:a{place % count}" if count else None for place in range(streams)]
                    self.measure(kind, client, test, streams, count, names)

    def measure(self, kind: str, client: Client, test: Test, streams: int, count: int, names: list[str | None]) -> None:
        rates: list[float] = []
        shares: list[float] = []
        few = names if test.new else names[:1]
        client.begin(self.prompts(len(few), test.prompt), min(test.new, WARM) + 1, few)
        watch, first = Watch(), time.perf_counter()
        while not rates or (len(rates) < self.args.repetitions and time.perf_counter() - first < self.args.seconds):
            client.expert_seconds()
            begun = time.perf_counter()
            times = client.begin(self.prompts(streams, test.prompt), test.new + 1, names)
            spent = time.perf_counter() - begun
            rates.append(rate(test, times))
            shares.append(client.expert_seconds() / spent)
        self.add(kind, count, test.name, streams, rates, statistics.fmean(shares), watch.foreign())

    def add(
        self, kind: str, count: int, test: str, streams: int, rates: list[float], share: float | None, foreign: float
    ) -> None:
        mean = statistics.fmean(rates)
        same = [cell for cell in self.document["cells"] if (cell["test"], cell["streams"]) == (test, streams)]
        base = next((cell["tokens_per_second"] for cell in same if not cell["adapters"]), None)
        cell = {
            "contender": kind,
            "adapters": count,
            "test": test,
            "streams": streams,
            "tokens_per_second": mean,
            "deviation": statistics.stdev(rates) if len(rates) > 1 else 0.0,
            "samples": rates,
            "expert_share": share,
            "to_base": mean / base if base else 1.0,
            "foreign": foreign,
        }
        self.document["cells"].append(cell)
        self.table.row(
            (
                kind,
                str(count),
                test,
                str(streams),
                f"{mean:.2f}",
                f"{cell['deviation']:.2f}",
                "-" if share is None else f"{share:.0%}",
                f"{cell['to_base']:.2f}",
                f"{foreign:.0%}",
            )
        )
        if self.args.json:
            save(self.document, self.args.json)

    def peer(self, name: str, python: str, model: Path) -> None:
        """A program beside this one, in the environment that this one was started in; every line that it prints is a
        cell."""
        words = [python, str(Path(__file__).resolve().parent / "peers" / PEERS[name]), str(model)]
        words += ["--prompt", str(self.args.prompt), "--new", str(self.args.new)]
        words += ["--streams", ",".join(map(str, self.args.streams))]
        words += ["--repetitions", str(self.args.repetitions), "--seconds", str(self.args.seconds)]
        words += ["--device", self.args.device] if self.args.device else []
        words += ["--dtype", self.args.dtype] if self.args.dtype != "auto" else []
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.args.device == "cpu" else {}
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=self._environment | hidden) as process:
            assert process.stdout is not None
            clock = threading.Timer(self.args.peer_seconds, process.kill)
            clock.start()
            for line in process.stdout:
                if not line.startswith("{"):
                    continue
                cell = json.loads(line)
                if "about" in cell:
                    self.document.setdefault("peers", {})[name] = cell["about"]
                    continue
                samples, foreign = cell["samples"], cell.get("foreign", 0.0)
                self.add(cell["contender"], 0, cell["test"], cell["streams"], samples, None, foreign)
                self.document["cells"][-1] |= {"new": cell["new"]} if "new" in cell else {}
            clock.cancel()
        if process.returncode:
            self.document.setdefault("notes", []).append(f"{name}: ended with {process.returncode}")
            print(f"! {name}: ended with {process.returncode}", flush=True)


def run(args: argparse.Namespace, bench: Bench, model: Path, adapters: dict[str, Path]) -> None:
    kind = "kt engine" if args.engine else "kt http"
    if not args.peers_only:
        with open_ours(args, model, adapters) as client:
            bench.ours(client, kind, args.adapters)
        del client
        gc.collect()  # a peer should find memory as we did
    for name, python in args.peers.items():
        bench.peer(name, python, model)
    if args.gguf:
        file = model / "q4_k.gguf"
        if not file.is_file():
            bench.document.setdefault("notes", []).append(f"no {file}: llama.cpp did not write it")
            return
        with open_ours(args, model, {}, file) as client:
            bench.ours(client, f"{kind} Q4_K", [0])
        del client
        gc.collect()
        with open_ours(args, gguf_folder(model, file), {}) as client:
            bench.ours(client, f"{kind} Q4_K whole", [0])


def gguf_folder(model: Path, file: Path) -> Path:
    """A model's directory whose weights are this file alone."""
    folder = model.with_name(f"{model.name}-{file.stem}")
    folder.mkdir(exist_ok=True)
    for entry in model.iterdir():
        if entry == file or (entry.suffix not in (".gguf", ".safetensors") and not entry.name.endswith(".index.json")):
            link = folder / entry.name
            link.unlink(missing_ok=True)
            link.symlink_to(entry)
    return folder


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    environment = dict(os.environ)
    from ktransformers.ground.openmp import limit_spinning

    limit_spinning()  # as `kt serve` does, before torch is there
    with tempfile.TemporaryDirectory(prefix="kt-serve-") as temporary:
        folder = args.folder or Path(temporary)
        shape = SHAPES[args.shape]
        begun = time.perf_counter()
        model = make_model(folder / f"{args.shape}-{args.layers}", shape, args.layers)
        wanted = range(0 if args.peers_only else max(args.adapters, default=0))
        adapters = {
            f"a{at}": make_adapter(folder / f"a{at}", model, shape, args.layers, args.rank, at) for at in wanted
        }
        print(f"model and adapters: {time.perf_counter() - begun:.0f} s", flush=True)
        bench = Bench(args, environment)
        run(args, bench, model, adapters)
    bench.document["ratios"] = print_ratios(bench.document["cells"])
    if args.json:
        save(bench.document, args.json)
    print_last_line(bench.document)
    return 1 if bench.document.get("notes") else 0


if __name__ == "__main__":
    sys.exit(main())
