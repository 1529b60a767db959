"""Ours beside llama.cpp on a CPU alone: the same GGUF file in both, rounds of both programs in turn.

    bench/peers/build_llama.sh LLAMA_CPP_SOURCES build/llama 2
    python bench/llama_cpp.py --program build/llama/llama_speed --layers 4 --json llama-cpp.json

A model with the shapes of `--shape` and random weights is written as GGUF in BF16, and quantised by llama.cpp itself to
Q8_0 and Q4_K_M. For each file llama.cpp (`peers/llama_speed.cpp`) and our engine hold it open side by side; a round
times one, then the other: new tokens of 1 and 8 streams, and prompts. Ours chooses each token (argmax) and turns it
into text; llama.cpp decodes random tokens and samples nothing. A ratio is the median over rounds of ours over
llama.cpp's of the same round. `--vocabulary` is smaller than a real one, so that the output matrix has the share of a
step that it has in a model with all its layers. The bars are those of serving on a CPU: see `BARS`. What experts take
of a token is the difference of two runs with other numbers of them (`--top-k`). With `--w8a8` every round also times
ours with 8-bit activations (`kt serve --kt-w8a8`), which llama.cpp always has; not in BF16.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from arguments import numbers
from serve import Test, gguf_folder, rate
from serve_clients import DEPTH, Client, open_ours
from serve_model import ATTENTION, make_model
from shapes import SHAPES
from timing import Table, Watch, describe_machine, print_last_line, save

sys.path.append(str(Path(__file__).resolve().parent / "peers"))
from serve_gguf import write_gguf

FILES = ("BF16", "Q8_0", "Q4_K_M")
BARS = {"BF16": 1.0, "Q8_0": 0.9, "Q4_K_M": 0.9}  # one stream
BAR_OF_STREAMS, BAR_OF_PROMPTS = 1.1, 2.0
WARM = 4  # tokens that are written before any are counted
HEADS = ("file", "test", "streams", "ours t/s", "llama.cpp t/s", "ratio", "spread", "bar", "foreign", "w8a8")
WIDTHS = (6, 6, 7, 9, 13, 6, 6, 10, 7, 6)


class Peer:
    """llama.cpp with one file open, in the environment that this program was started in."""

    def __init__(self, args: argparse.Namespace, file: Path) -> None:
        words = [str(args.program), "time", str(file), str(args.peer_threads)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=args.environment)
        self.features = self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"llama.cpp ended with {self._process.wait()}")
        return line.strip()

    def rate(self, test: Test, streams: int) -> float:
        """Tokens/s of all streams."""
        assert self._process.stdin is not None
        context = -(-(test.prompt + test.new + 2) // 256) * 256
        self._process.stdin.write(f"{context} {test.prompt} {test.new} {streams}\n")
        self._process.stdin.flush()
        prompt_seconds, new_seconds = map(float, self._read().split())
        return streams * test.new / new_seconds if test.new else streams * test.prompt / prompt_seconds

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, required=True, help="llama_speed, built by peers/build_llama.sh")
    parser.add_argument("--shape", default="qwen3-30b", choices=list(ATTENTION), help="of the experts")
    parser.add_argument("--top-k", type=int, default=0, help="experts of a token; 0: the shape's")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--files", default=",".join(FILES), help=f"default {','.join(FILES)}")
    parser.add_argument("--streams", type=numbers, default=[1, 8], help="default 1,8")
    parser.add_argument("--prompts", type=numbers, default=[512, 2048], help="default 512,2048")
    parser.add_argument("--new", type=int, default=64, help="tokens of tgN")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="after which a cell has no further round")
    parser.add_argument("--threads", type=int, default=0, help="of the experts; 0: as many as are fastest")
    parser.add_argument("--peer-threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every CPU")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens in a step, as --chunked-prefill-size")
    parser.add_argument("--dtype", default="auto", help="of everything but the experts")
    parser.add_argument("--w8a8", action="store_true", help="in every round also ours with 8-bit activations")
    parser.add_argument("--folder", type=Path, help="for the model; kept. Default: a temporary one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    args = parser.parse_args(argv)
    args.files = args.files.split(",")
    if unknown := set(args.files) - set(FILES):
        parser.error(f"--files: {', '.join(sorted(unknown))}, expected {', '.join(FILES)}")
    if min([*args.streams, *args.prompts, args.new, args.layers, args.rounds, args.chunk]) < 1:
        parser.error("counts are at least 1")
    if not 0 <= args.top_k <= SHAPES[args.shape].experts:
        parser.error(f"--top-k: {args.top_k}, expected at most {SHAPES[args.shape].experts}")
    args.prompt, args.engine, args.device = max(args.prompts), True, "cpu"  # as `open_ours` reads them
    args.environment = dict(os.environ)  # llama.cpp's OpenMP threads spin as they would without us
    return args


def make_file(args: argparse.Namespace, model: Path, name: str) -> Path:
    """Written once; the others from that in BF16."""
    plain = model / "bf16.gguf"
    if not plain.is_file():
        write_gguf(model, plain)
    if name == "BF16":
        return plain
    file = model / f"{name.lower()}.gguf"
    if not file.is_file():
        half = file.with_name(file.name + ".part")
        words = [str(args.program), "quantise", str(plain), str(half), name, str(args.peer_threads)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        half.replace(file)
    return file


def bar(file: str, test: Test, streams: int) -> float:
    if not test.new:
        return BAR_OF_PROMPTS
    return BARS[file] if streams == 1 else BAR_OF_STREAMS


def measure_ours(client: Client, draw: random.Random, top: int, test: Test, streams: int) -> float:
    prompts = [[draw.randrange(3, top) for _ in range(test.prompt)] for _ in range(streams)]
    return rate(test, client.begin(prompts, test.new + 1, [None] * streams))


class Activations:
    """Switches a client's model between exact and 8-bit activations."""

    def __init__(self, client: Client, wanted: bool) -> None:
        from ktransformers.experts.w8a8 import use_w8a8

        self._switch = use_w8a8
        self._model = client.model if wanted else None

    @property
    def modes(self) -> tuple[bool, ...]:
        return (False,) if self._model is None else (False, True)

    def use(self, w8a8: bool) -> None:
        if self._model is not None:
            self._switch(self._model, w8a8)


def measure(
    args: argparse.Namespace, client: Client, peer: Peer, file: str, test: Test, streams: int
) -> dict[str, Any]:
    draw = random.Random(test.prompt + streams)
    activations = Activations(client, args.w8a8 and file != "BF16")
    warm = Test(test.prompt, min(test.new, WARM))
    for w8a8 in activations.modes:
        activations.use(w8a8)
        measure_ours(client, draw, args.vocabulary, warm, streams)
    peer.rate(warm, streams)
    ours: list[float] = []
    theirs: list[float] = []
    rounded: list[float] = []
    foreign, first = 0.0, time.perf_counter()
    while not ours or (len(ours) < args.rounds and time.perf_counter() - first < args.seconds):
        theirs.append(peer.rate(test, streams))
        watch = Watch()
        for w8a8 in activations.modes:
            activations.use(w8a8)
            (rounded if w8a8 else ours).append(measure_ours(client, draw, args.vocabulary, test, streams))
        foreign = max(foreign, watch.foreign())
    activations.use(False)
    ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
    ratio, least = statistics.median(ratios), bar(file, test, streams)
    cell = {
        "file": file,
        "test": test.name,
        "streams": streams,
        "tokens_per_second": statistics.median(ours),
        "peer_tokens_per_second": statistics.median(theirs),
        "samples": ours,
        "peer_samples": theirs,
        "ratio": ratio,
        "bar": least,
        "met": ratio >= least,
        "foreign": foreign,  # share of the CPUs that other programs took in our round, the most of all rounds
    }
    if rounded:
        cell["w8a8_tokens_per_second"] = statistics.median(rounded)
        cell["w8a8_samples"] = rounded
        cell["w8a8_ratio"] = statistics.median([own / other for own, other in zip(rounded, theirs, strict=True)])
    return cell


def run(args: argparse.Namespace, document: dict[str, Any], model: Path) -> None:
    table = Table(HEADS, WIDTHS)
    tests = [(Test(DEPTH, args.new), streams) for streams in args.streams]
    tests += [(Test(prompt), 1) for prompt in args.prompts]
    for name in args.files:
        file = make_file(args, model, name)
        peer = Peer(args, file)
        document["peer"] = {"features": peer.features, "threads": args.peer_threads}
        with open_ours(args, gguf_folder(model, file), {}, clock=False) as client:
            for test, streams in tests:
                cell = measure(args, client, peer, name, test, streams)
                document["cells"].append(cell)
                print_cell(table, cell)
                if args.json:
                    save(document, args.json)
        peer.close()
        del client
        gc.collect()


def print_cell(table: Table, cell: dict[str, Any]) -> None:
    ratios = [own / other for own, other in zip(cell["samples"], cell["peer_samples"], strict=True)]
    table.row(
        (
            cell["file"],
            cell["test"],
            str(cell["streams"]),
            f"{cell['tokens_per_second']:.2f}",
            f"{cell['peer_tokens_per_second']:.2f}",
            f"{cell['ratio']:.2f}",
            f"{max(ratios) - min(ratios):.2f}",
            f"{cell['bar']:.1f} {'met' if cell['met'] else 'missed'}",
            f"{cell['foreign']:.0%}",
            f"{cell['w8a8_ratio']:.2f}" if "w8a8_ratio" in cell else "-",
        )
    )


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    from ktransformers.ground.openmp import limit_spinning

    limit_spinning()  # as `kt serve` does, before torch is there
    shape = SHAPES[args.shape]
    shape = replace(shape, top_k=args.top_k or shape.top_k)
    document: dict[str, Any] = {
        "bench": "llama_cpp",
        "machine": describe_machine(),
        "model": {"shape": args.shape, "top_k": shape.top_k, "layers": args.layers, "vocabulary": args.vocabulary},
        "tests": {"prompts": args.prompts, "new": args.new, "chunk": args.chunk},
        "cells": [],
    }
    with tempfile.TemporaryDirectory(prefix="kt-llama-") as temporary:
        name = f"{args.shape}-{args.layers}-{args.vocabulary}"
        model = make_model((args.folder or Path(temporary)) / name, shape, args.layers, args.vocabulary)
        run(args, document, model)
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
